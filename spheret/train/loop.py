"""The training loop: update, validate, log, save."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from spheret import kernels
from spheret.analysis.remedies import against_collapse
from spheret.data import Data, Validation
from spheret.model.gpt import GPT
from spheret.model.monitor import common_gradients, expected_start, gradient_norms, measure_stream, own_logit_and_loss
from spheret.model.probes import sublayer_name
from spheret.optim import build_optimizer, clip_gradients, set_learning_rate
from spheret.optim.parametrization import parametrize
from spheret.runs import checkpoint
from spheret.runs.checkpoint import Checkpoint
from spheret.runs.config import EvaluationConfig, TrainConfig, section_as_dict
from spheret.runs.layout import CHECKPOINTS, METRICS, MODEL, OPTIMIZER, TENSORBOARD
from spheret.runs.metrics import (
    EventRecord,
    Log,
    MetricsRecord,
    StartRecord,
    SublayerRecord,
    Tracker,
)
from spheret.runs.records import BestRecord, DivergenceRecord, StateRecord, TrainingRecord, WatchRecord
from spheret.runs.run import check_config, manifest_sha256
from spheret.runs.tensors import Form, LazyTensor, form
from spheret.support.exit_codes import FINISHED, SIGNALS, STOPPED_BY_GUARD
from spheret.support.meter import Meter
from spheret.support.sharding import like, local, whole
from spheret.train.distributed import World, check_random_state, random_state, set_random_state
from spheret.train.guards import (
    NonFinite,
    check_weights,
    collapse_sentence,
    find_non_finite,
    finite,
    start_warning,
)
from spheret.watching.divergence import Divergence, DivergenceState, moved_sentence
from spheret.watching.losses import LossGuard, LossState

# without evaluations the sublayers are measured this seldom, or ten times per run, for the divergence guard
LEAST_LOOK_EVERY = 100


class Trainer:
    """Trains one run in a directory that is locked for it. `fit` returns an exit code."""

    def __init__(
        self,
        path: Path,
        model: GPT,
        config: TrainConfig,
        evaluation: EvaluationConfig,
        data: Data,
        world: World,
        unigram_entropy: float | None = None,
        tensorboard: bool = True,
        quiet: bool = False,
    ) -> None:
        self.path, self.config, self.evaluation, self.world = path, config, evaluation, world
        self.model = model.to(world.device).train()
        self.step, self.seconds = 0, 0.0
        self.best: BestRecord | None = None
        # what computed the updates, known after the first one, and what did so before a restart
        self.backend: str | None = None
        self._backend_before: str | None = None
        self._data_sha256 = manifest_sha256(data)
        # of the last update and of the last evaluation
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.losses = LossGuard(unigram_entropy)
        self.advice = tuple(against_collapse(model.config, config))
        level, name = math.log(model.config.vocab), "loss of a uniform guess"
        if unigram_entropy is not None:
            level, name = unigram_entropy, "unigram entropy"
        self.divergence = Divergence(level, name, config.warmup, config.steps)
        # the gradient norm of each sublayer, at updates after which the sublayers are measured
        self._gradient_norms: list[float] | None = None
        self._tensorboard, self._quiet = tensorboard, quiet
        block = model.config.block
        self._accumulation = config.accumulation(block, world.size)
        self._loader = data.loader(
            block,
            config.batch_size,
            config.seed,
            world.rank,
            world.size,
            self._accumulation,
        )
        # stays empty if nothing is evaluated
        self._validation: Validation | tuple[()] = ()
        if evaluation.eval_every:
            try:
                self._validation = data.validation(block, config.batch_size, evaluation.eval_windows)
            except ValueError as error:
                raise ValueError(f"{error} Or train without validation: --eval-every 0.") from None
        # before the weights are sharded
        factors = parametrize(self.model, config.optimizer_settings())
        self._loss = world.wrap(self.model, config.precision == "bf16")
        if config.compile:
            self._loss = torch.compile(self._loss)
        self.optimizer = build_optimizer(
            self.model,
            config.optimizer,
            config.lr,
            config.weight_decay,
            config.betas,
            world.device,
            factors,
            world.rank,
            world.size,
        )
        self._named = dict(self.model.named_parameters())
        self._look_every = evaluation.eval_every or max(LEAST_LOOK_EVERY, config.steps // 10)
        self.log: Log | None = None
        # that of `fit`
        self._check_directory: Callable[[], None] = lambda: None
        # the signal that reached this process, and the one that all processes agreed on
        self._received: int | None = None
        self._stopping: int | None = None

    def precision(self) -> AbstractContextManager[Any]:
        """The context of a forward pass: bf16 arithmetic if the config asks for it. Weights stay float32."""
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def update(self, batches: Iterator[tuple[Tensor, Tensor]]) -> MetricsRecord:
        """One update from `accumulation` micro-batches. Raises NonFinite before it changes anything."""
        if self.backend is not None:
            return self._update(batches)
        with kernels.serving() as names:
            line = self._update(batches)
        if self.config.compile:
            # a traced graph makes no calls; its choice does not depend on the rows
            rows = torch.zeros(1, self.model.config.width, device=self.world.device)
            names = {"compiled", kernels.chosen(rows, rows)}
        self.backend = "+".join(sorted(names)) or "torch"
        if self.backend != self._backend_before:
            line.backend = self.backend
        return line

    def _update(self, batches: Iterator[tuple[Tensor, Tensor]]) -> MetricsRecord:
        begun = time.perf_counter()
        step = self.step + 1
        lr = self.config.lr_at(step)
        self.model.at_update(step)
        total = torch.zeros((), device=self.world.device)
        seen_batches = []
        random = random_state(self.world.device) if self.model.config.dropout else None
        for micro in range(self._accumulation):
            x, y = (part.to(self.world.device, non_blocking=True) for part in next(batches))
            seen_batches.append((x, y))
            with self.world.syncing(micro == self._accumulation - 1):
                with self.precision():
                    loss = self._loss(x, y) / self._accumulation
                loss.backward()
            total += loss.detach()
        mean = self._agree(total)
        norm = float(whole(clip_gradients(self.model, self.config.clip)))
        if not finite(mean, norm):
            if random is not None:
                set_random_state(self.world.device, random)
            with self.world.syncing(False):
                raise NonFinite(find_non_finite(self.model, seen_batches, self.precision, self.world))
        self.losses.loss(mean)
        diverged = self.divergence.loss(step, list(self.losses.losses))
        # the update clears the gradients
        looking = diverged or step == 1 or self._due(step, self._look_every) or self.losses.suspects_collapse(step)
        self._gradient_norms = gradient_norms(self.model) if looking else None
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step
        took = time.perf_counter() - begun
        self.seconds += took
        return MetricsRecord(
            step=step,
            loss=mean,
            lr=lr,
            grad_norm=norm,
            spikes=self.losses.spikes,
            tokens_per_second=self.config.tokens_per_update / took,
            seconds=self.seconds,
        )

    def _agree(self, loss: Tensor) -> float:
        """The mean loss over all processes. A signal that reached one process reaches all of them here."""
        received = [float(self._received == number) for number in SIGNALS]
        total, *counts = self.world.sum(torch.stack([loss, *loss.new_tensor(received)])).tolist()
        for number, count in zip(SIGNALS, counts, strict=True):
            if count:
                self._stopping = number
        return total / self.world.size

    def _due(self, step: int, every: int) -> bool:
        return bool(every) and (step % every == 0 or step == self.config.steps)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, dict[int, tuple[int, float]]]:
        """The validation loss, and per document its tokens and summed loss. Processes share the batches."""
        mine: dict[int, list[tuple[int, int, float]]] = {}
        self.model.eval()
        for number, (x, y, documents) in enumerate(self._validation):
            # a process without a batch in the last round computes it too: shards are gathered by all together
            ours, left_over = number % self.world.size == self.world.rank, number == len(self._validation) - 1
            idle = left_over and self.world.rank > number % self.world.size
            if not (ours or idle):
                continue
            with self.precision():
                losses = self.model.token_losses(x.to(self.world.device), y.to(self.world.device))
            flat, owner = losses.cpu().double().flatten().numpy(), documents.flatten().numpy()
            if ours:
                counts, sums = np.bincount(owner), np.bincount(owner, flat)
                mine[number] = [(int(d), int(counts[d]), float(sums[d])) for d in np.flatnonzero(counts)]
        self.model.train()
        totals: dict[int, tuple[int, float]] = {}
        # added up in the order of the batches, on whichever process they were computed
        for _, rows in sorted(pair for part in self.world.gather(mine) for pair in part.items()):
            for document, tokens, loss in rows:
                before = totals.get(document, (0, 0.0))
                totals[document] = before[0] + tokens, before[1] + loss
        return sum(loss for _, loss in totals.values()) / sum(tokens for tokens, _ in totals.values()), totals

    def _fixed_tokens(self) -> tuple[Tensor, Tensor]:
        """Always the same tokens and targets, so that records can be compared."""
        x, y = next(iter(self._validation))[:2] if self._validation else self._loader.batch(0)
        return x.to(self.world.device), y.to(self.world.device)

    def _start(self, meter: Meter) -> StartRecord:
        """What the untrained model predicts. Warns of what may go wrong with it."""
        self.model.at_update(1)
        with self.precision():
            own, loss = own_logit_and_loss(self.model, *self._fixed_tokens())
        entropy = self.losses.unigram_entropy
        start = StartRecord(own_logit=own, loss=loss, expected=expected_start(self.model, entropy))
        warning = start_warning(self.model, start, entropy, self.advice)
        if warning and self.world.is_main and not self._quiet:
            meter.say(f"WARNING: {warning}.")
        return start

    def _look_inside(self, line: MetricsRecord, evaluated: bool) -> list[str]:
        """Measure every sublayer, and validate if it is time. Adds both to the line. Returns the alarms."""
        alarms = []
        if evaluated:
            self.val_loss, documents = self.evaluate()
        x, y = self._fixed_tokens()
        with self.precision():
            stream = measure_stream(self.model, x, y)
        sublayers = [
            SublayerRecord(**asdict(sublayer), grad_norm=norm)
            for sublayer, norm in zip(stream.sublayers, self._gradient_norms or (), strict=True)
        ]
        if evaluated:
            with self.precision():
                shares = common_gradients(self.model, x, y)
            for record, share in zip(sublayers, shares, strict=True):
                record.common_gradient = share
            line.val_loss, line.radius, line.on_bound = self.val_loss, stream.radius, stream.on_bound
            line.sublayers = sublayers
            if self.step == self.config.steps:
                line.val_documents = [(d, tokens, loss) for d, (tokens, loss) in documents.items()]
        events = []
        collapse = self.losses.collapse(sublayers)
        if collapse is not None:
            line.alarm = collapse_sentence(self.losses, collapse, self.advice)
            events.append(EventRecord(**asdict(collapse)))
            alarms.append(line.alarm)
        if self.divergence.step == self.step:
            moved = self.divergence.moved(sublayers)
            line.diverged = f"{self.divergence.reason}; {moved_sentence(moved, sublayer_name)}"
            events.append(EventRecord(**asdict(moved)))
            alarms.append(f"divergence: {line.diverged}")
        line.events = events or None
        self.divergence.remember(self.step, sublayers)
        return alarms

    def _where_validation_fails(self) -> EventRecord:
        """The first place that is not finite, after an update with a finite loss."""
        batches = ((x.to(self.world.device), y.to(self.world.device)) for x, y, _ in self._validation)
        with self.world.syncing(False):
            return find_non_finite(self.model, batches, self.precision, self.world)

    def fit(self, check_directory: Callable[[], None] = lambda: None) -> int:
        """Train to the last step, or until a signal or a guard stops it. Returns the exit code.

        check_directory: raises if the run directory is no longer the one that was locked for this run.
        """
        self._check_directory = check_directory
        self.log = Log(self.path / METRICS, self.step) if self.world.is_main else None
        tracker = Tracker(self.path / TENSORBOARD, self._tensorboard and self.world.is_main, self.step)
        title = f"train {self.model.config.scheme}"
        batches = self._loader.batches(self.step, self.config.steps)
        try:
            with _signals(self.request_stop), Meter(title, self._quiet or not self.world.is_main) as meter:
                start = self._start(meter) if self.step == 0 else None
                while self.step < self.config.steps:
                    try:
                        line, alarms = self._measured_update(batches, start)
                        self._write(line, tracker)
                        self._save_if_due(line)
                    except NonFinite as error:
                        line = MetricsRecord(step=self.step + 1, loss=None, stopped=str(error), events=[error.event])
                        self._write(line, tracker)
                        meter.say(f"stopped before update {self.step + 1}: {error}; {self._kept()}.")
                        return STOPPED_BY_GUARD
                    self._announce(meter, line, alarms)
                    code = self._end(meter, line)
                    if code is not None:
                        return code
            return FINISHED
        finally:
            batches.close()
            tracker.close()
            if self.log is not None:
                self.log.close()

    def _measured_update(
        self, batches: Iterator[tuple[Tensor, Tensor]], start: StartRecord | None
    ) -> tuple[MetricsRecord, list[str]]:
        """One update with all that is measured after it, and the alarms."""
        line = self.update(batches)
        if self.step == 1:
            line.start = start
        self.loss = line.loss
        evaluated = self._due(self.step, self.evaluation.eval_every)
        alarms = [] if self._gradient_norms is None else self._look_inside(line, evaluated)
        if self._due(self.step, self.evaluation.certify_every):
            # most runs do without, and start a quarter of a second sooner
            from spheret.certificates.live_certificate import live_certificate

            line.certificate = live_certificate(self.model, self._loader.batch(self.step - 1)[0])
        if self._stops_diverged():
            line.stopped = f"the run diverged at step {self.divergence.step}"
        return line, alarms

    def _save_if_due(self, line: MetricsRecord) -> None:
        """Save a checkpoint if it is time, or if the run is asked to stop. Raises NonFinite instead of saving."""
        if line.evaluated and not finite(self.val_loss or 0.0):
            raise NonFinite(self._where_validation_fails())
        due = self._due(self.step, self.config.checkpoint_every) or self._stopping
        if due and not self._stops_diverged():
            self.save(self.val_loss if line.evaluated else None)

    def _announce(self, meter: Meter, line: MetricsRecord, alarms: list[str]) -> None:
        for alarm in alarms:
            meter.say(f"ALARM: {alarm}.")
        if line.backend is not None and self._backend_before is not None:
            meter.say(
                f"the backend was {self._backend_before} and is {self.backend} from step {self.step} on: "
                f"the last bits of its updates differ."
            )

    def _end(self, meter: Meter, line: MetricsRecord) -> int | None:
        """The exit code of a run that ends before its last step; None if it goes on."""
        if self._stops_diverged():
            meter.say(f"stopped at step {self.step}: {line.stopped}; {self._kept()}.")
            return STOPPED_BY_GUARD
        self._show(meter, line)
        if self._stopping and self.step < self.config.steps:
            meter.say(f"stopped and saved at step {self.step}: run the same command again to continue.")
            return SIGNALS[signal.Signals(self._stopping)]
        return None

    def _stops_diverged(self) -> bool:
        return self.evaluation.on_divergence == "stop" and self.divergence.step is not None

    def _kept(self) -> str:
        last = max(checkpoint.steps(self.path / CHECKPOINTS), default=None)
        return "there was no checkpoint yet" if last is None else f"step-{last} is kept"

    def request_stop(self, number: int) -> None:
        """Stop after the current update, as the signal of this number does."""
        self._received = number

    def _write(self, line: MetricsRecord, tracker: Tracker) -> None:
        if self.log is not None:
            self.log.append(line)
            tracker.log(line)

    def _show(self, meter: Meter, line: MetricsRecord) -> None:
        val = "" if self.val_loss is None else f", val {self.val_loss:.4f}"
        text = f"step {self.step}/{self.config.steps}, loss {line.loss:.4f}{val}"
        meter.show(f"{text}, {line.tokens_per_second:,.0f} tokens/s", self.step / self.config.steps, line.evaluated)

    def tensors(self) -> dict[str, list[LazyTensor]]:
        """The tensors of a checkpoint: weights, and the optimiser's state under the names of the weights."""

        def lazy(name: str, tensor: Tensor) -> LazyTensor:
            return LazyTensor(name, tensor.dtype, tuple(tensor.shape), lambda: whole(tensor))

        optimizer = [
            lazy(f"{name}.{key}", value)
            for name, parameter in self._named.items()
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items())
        ]
        model = [lazy(name, tensor) for name, tensor in self.model.state_dict().items()]
        return {MODEL: model, OPTIMIZER: optimizer}

    def save(self, val_loss: float | None) -> None:
        """Write a checkpoint of this step, then remove those that are not kept."""
        check_weights(self.model, self.world)
        if val_loss is not None and (self.best is None or val_loss < self.best.val_loss):
            self.best = BestRecord(step=self.step, val_loss=val_loss)
        training = TrainingRecord(
            last_val_loss=self.val_loss,
            best=self.best,
            seconds=self.seconds,
            watch=msgspec.convert(self.losses.state(), WatchRecord, from_attributes=True),
            divergence=msgspec.convert(self.divergence.state(), DivergenceRecord, from_attributes=True),
            rng=self.world.gather(random_state(self.world.device)),
            threads=torch.get_num_threads(),
            backend=self.backend or "none",
            config=self.settings(),
            manifest_sha256=self._data_sha256,
        )
        parts, directory = self.tensors(), self.path / CHECKPOINTS
        if self.log is None:
            # all processes gather the shards, tensor by tensor, for the one that writes
            for tensor in (tensor for part in parts.values() for tensor in part):
                tensor.gather()
            return
        self._check_directory()
        # every line up to a checkpoint's step is on the disk before the checkpoint
        self.log.sync()
        checkpoint.save(directory, parts, StateRecord(step=self.step, val_loss=val_loss, training=training))
        checkpoint.prune(directory, self.config.keep, None if self.best is None else self.best.step)

    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings that decide the updates, as plain data."""
        sections = {"model": self.model.config, "train": self.config, "evaluation": self.evaluation}
        return {name: section_as_dict(section) for name, section in sections.items()}

    def check(self, saved: Checkpoint) -> None:
        """Raise unless this run can continue from a checkpoint: ValueError for other settings, or Damaged."""
        training = saved.state.training
        if training is None:
            raise checkpoint.Damaged("it holds weights alone, and no training to continue")
        check_config(saved, self.path, self.settings())
        if training.manifest_sha256 != self._data_sha256:
            raise ValueError(
                f"{self.path} was trained on other data up to step {saved.step}: give its own with --data."
            )
        try:
            for state in training.rng:
                check_random_state(state)
        except ValueError as error:
            raise checkpoint.Damaged(str(error)) from None
        checkpoint.check_tensors(saved, self.forms())

    def forms(self) -> dict[str, dict[str, Form]]:
        """The forms of the tensors of a checkpoint, which `tensors` returns after an update."""
        optimizer: dict[str, Form] = {}
        group_of = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._named.items():
            for key in self.optimizer.state_names(group_of[parameter]):
                optimizer[f"{name}.{key}"] = ("F32", ()) if key == "step" else form(parameter)
        return {MODEL: {name: form(tensor) for name, tensor in self.model.state_dict().items()}, OPTIMIZER: optimizer}

    @torch.no_grad()
    def restore(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint that `check` has seen, bit for bit."""
        training = saved.state.training
        assert training is not None
        self.load_weights(saved)
        for key, value in saved.optimizer():
            name, _, part = key.rpartition(".")
            parameter = self._named[name]
            placed = value.to(self.world.device) if value.dim() == 0 else like(value, parameter)
            self.optimizer.state[parameter][part] = placed
        self.step, self.seconds = saved.step, training.seconds
        self.best, self.val_loss = training.best, training.last_val_loss
        self._backend_before = training.backend
        self.losses.restore(msgspec.convert(training.watch, LossState, from_attributes=True))
        self.divergence.restore(msgspec.convert(training.divergence, DivergenceState, from_attributes=True))
        self.world.restore_random(training.rng, self.config.seed + self.step)

    @torch.no_grad()
    def load_weights(self, saved: Checkpoint) -> None:
        """Load the weights of a checkpoint, and nothing else."""
        wanted = self.model.state_dict()
        checkpoint.check_fit(saved, wanted)
        for name, value in saved.model():
            local(wanted[name]).copy_(local(like(value, wanted[name])))


@contextmanager
def _signals(received: Callable[[int], None]) -> Iterator[None]:
    """Within the block, the first of SIGNALS calls `received`. A second SIGINT acts as usual.

    The others are ignored from then on until the process ends, which it is about to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handle(number: int, frame: object) -> None:
        received(number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        # a scheduler sends SIGTERM to every process of a job, and the job's shell or torchrun sends it on: the second
        # one must not interrupt the saving
        for each in SIGNALS.keys() - {signal.SIGINT}:
            signal.signal(each, signal.SIG_IGN)

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)
