"""The training loop: update, look, log, save. `Trainer.fit` is the loop, `Trainer.update` one update."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spheret import kernels
from spheret.data import Data, Validation
from spheret.model.gpt import GPT
from spheret.observe.observer import NonFinite, Observer, against_collapse, radius_of, start_of
from spheret.observe.outputs import Tracker, finite_numbers, sublayer_scalars
from spheret.observe.records import Start
from spheret.observe.rules import start_warning
from spheret.optim import build_optimizer, clip_gradients, set_learning_rate
from spheret.optim.parametrization import parametrize
from spheret.runs import checkpoint
from spheret.runs.config import EvaluationConfig, TrainConfig
from spheret.runs.layout import CHECKPOINTS, METRICS
from spheret.runs.metrics import Log, MetricsRecord
from spheret.runs.records import BestRecord
from spheret.runs.run import manifest_sha256
from spheret.support import mkl
from spheret.support.errors import FINISHED, SIGNALS, STOPPED_BY_GUARD
from spheret.support.meter import Meter
from spheret.support.sharding import whole
from spheret.train.distributed import World, random_state, set_random_state
from spheret.train.signals import stop_signals
from spheret.train.state import save
from spheret.train.validation import validate

# without evaluations the sublayers are measured this seldom, or ten times per run, for the judge of divergence
LEAST_LOOK_EVERY = 100
# what a tracker gets of a line of metrics.jsonl, beside the sublayers
TRACKED = ("loss", "val_loss", "lr", "grad_norm", "spikes", "radius", "tokens_per_second")


class Trainer:
    """Trains one run in a directory that is locked for it. `fit` returns an exit code.

    Attributes:
        step: the updates so far; `seconds`, how long they took.
        best: the best evaluated step that was saved.
        loss, val_loss: of the last update and of the last evaluation.
        backend: what computed the updates, known after the first one; `backend_before`, what did so before a restart.
        observer: measures the sublayers, and judges them and the losses.
        log: the writer of metrics.jsonl in the main process, within `fit`.
        tracker: gets metrics and alarms too, in the main process, if it is set before `fit`.
    """

    def __init__(
        self,
        path: Path,
        model: GPT,
        config: TrainConfig,
        evaluation: EvaluationConfig,
        data: Data,
        world: World,
        unigram_entropy: float | None = None,
        quiet: bool = False,
    ) -> None:
        self.path, self.config, self.evaluation, self.world = path, config, evaluation, world
        self.model = model.to(world.device).train()
        self.step, self.seconds = 0, 0.0
        self.best: BestRecord | None = None
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.backend: str | None = None
        self.backend_before: str | None = None
        self.data_sha256 = manifest_sha256(data)
        self.unigram_entropy = unigram_entropy
        self._advice = against_collapse(model.config, config)
        self._quiet = quiet or not world.is_main
        block = model.config.block
        self._accumulation = config.accumulation(block, world.size)
        self._loader = data.loader(block, config.batch_size, config.seed, world.rank, world.size, self._accumulation)
        # stays empty if nothing is evaluated
        self._validation: Validation | tuple[()] = ()
        if evaluation.eval_every:
            try:
                self._validation = data.validation(block, config.batch_size, evaluation.eval_windows)
            except ValueError as error:
                raise ValueError(f"{error} Or train without validation: --eval-every 0.") from None
        # both before the weights are sharded
        self.observer = Observer(
            self.model, self.precision, unigram_entropy, config.warmup, config.steps, self._advice
        )
        factors = parametrize(self.model, config)
        self._loss = world.wrap(self.model, config.precision == "bf16")
        if config.compile:
            self._loss = torch.compile(self._loss)
        self.optimizer = build_optimizer(
            self.model, config.optimizer, config.lr, config.weight_decay, config.betas, world.device, factors,
            world.rank, world.size,
        )  # fmt: skip
        self._look_every = evaluation.eval_every or max(LEAST_LOOK_EVERY, config.steps // 10)
        self.log: Log | None = None
        self.tracker: Tracker | None = None
        # the signal that reached this process, and the one that all processes agreed on
        self._received: int | None = None
        self._stopping: int | None = None

    def fit(self) -> int:
        """Train to the last step, or until a signal or a guard stops it. Returns the exit code."""
        self.log = Log(self.path / METRICS, self.step) if self.world.is_main else None
        batches = self._loader.batches(self.step, self.config.steps)
        try:
            with stop_signals(self.request_stop), Meter(f"train {self.model.config.scheme}", self._quiet) as meter:
                start = self._start(meter) if self.step == 0 else None
                while self.step < self.config.steps:
                    try:
                        line = self.update(batches)
                        line.start, start = start, None
                        evaluated = self._due(self.evaluation.eval_every)
                        if self.observer.looks:
                            self._look_inside(line, evaluated)
                        diverged = self.observer.judge.state.diverged
                        if self.evaluation.on_divergence == "stop" and diverged is not None:
                            line.stopped = f"the run diverged at step {diverged}"
                        self._write(line)
                        if evaluated and not math.isfinite(self.val_loss or 0.0):
                            raise self._find_not_finite(self.step, ((x, y) for x, y, _ in self._validation))
                        due = self._due(self.config.checkpoint_every) or self._stopping
                        if due and not line.stopped:
                            save(self, self.val_loss if evaluated else None)
                    except NonFinite as error:
                        line = MetricsRecord(step=self.step + 1, loss=None, stopped=str(error), events=[error.event])
                        self._write(line)
                        meter.say(f"stopped before update {self.step + 1}: {error}; {self._kept()}.")
                        return STOPPED_BY_GUARD
                    self._announce(meter, line)
                    if line.stopped:
                        meter.say(f"stopped at step {self.step}: {line.stopped}; {self._kept()}.")
                        return STOPPED_BY_GUARD
                    self._show(meter, line)
                    if self._stopping and self.step < self.config.steps:
                        meter.say(f"stopped and saved at step {self.step}: run the same command again to continue.")
                        return SIGNALS[signal.Signals(self._stopping)]
            return FINISHED
        finally:
            batches.close()
            if self.log is not None:
                self.log.close()

    def update(self, batches: Iterator[tuple[Tensor, Tensor]]) -> MetricsRecord:
        """One update from `accumulation` micro-batches. Raises NonFinite before it changes anything."""
        begun, step, first = time.perf_counter(), self.step + 1, self.backend is None
        seen = []
        random = random_state(self.world.device) if self.model.config.dropout else None
        with self._naming_backend():
            total = torch.zeros((), device=self.world.device)
            for micro in range(self._accumulation):
                x, y = (part.to(self.world.device, non_blocking=True) for part in next(batches))
                seen.append((x, y))
                with self.world.syncing(micro == self._accumulation - 1):
                    with self.precision():
                        loss = self._loss(x, y) / self._accumulation
                    loss.backward()
                total += loss.detach()
        mean = self._agree(total)
        norm = float(whole(clip_gradients(self.model, self.config.clip)))
        if not math.isfinite(mean) or not math.isfinite(norm):
            if random is not None:
                set_random_state(self.world.device, random)
            raise self._find_not_finite(step, seen)
        self.observer.judge.loss(step, mean)
        self.step = step
        if step == 1 or self._due(self._look_every) or self.observer.judge.wants_a_look(step):
            # the update clears them
            self.observer.see_gradients(step)
        set_learning_rate(self.optimizer, self.config.lr_at(step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss, took = mean, time.perf_counter() - begun
        self.seconds += took
        return MetricsRecord(
            step=step,
            loss=mean,
            lr=self.config.lr_at(step),
            grad_norm=norm,
            spikes=self.observer.judge.state.spikes,
            tokens_per_second=self.config.tokens_per_update / took,
            seconds=self.seconds,
            backend=self.backend if first and self.backend != self.backend_before else None,
        )

    def precision(self) -> AbstractContextManager[Any]:
        """The context of a forward pass: bf16 arithmetic if the config asks for it. Weights stay float32."""
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def _look_inside(self, line: MetricsRecord, evaluated: bool) -> None:
        """Observe the sublayers, and validate if it is time. Adds both to the line."""
        documents: dict[int, tuple[int, float]] = {}
        if evaluated and self._validation:
            self.val_loss, documents = validate(self.model, self._validation, self.world, self.precision)
        seen = self.observer.observe(self.step, *self._fixed_tokens())
        line.events = seen.events or None
        if evaluated:
            line.val_loss, line.radius, line.on_bound = self.val_loss, radius_of(self.model), seen.on_bound
            line.sublayers = seen.sublayers
            if self.step == self.config.steps:
                line.val_documents = [(d, tokens, loss) for d, (tokens, loss) in documents.items()]

    def _fixed_tokens(self) -> tuple[Tensor, Tensor]:
        """Always the same tokens and targets, so that records can be compared."""
        x, y = next(iter(self._validation))[:2] if self._validation else self._loader.batch(0)
        return x.to(self.world.device), y.to(self.world.device)

    def _find_not_finite(self, step: int, batches: Iterable[tuple[Tensor, Tensor]]) -> NonFinite:
        """Where the first value that is not finite appears."""
        batches = ((x.to(self.world.device), y.to(self.world.device)) for x, y in batches)
        with self.world.syncing(False):
            return self.observer.find_not_finite(step, batches)

    @contextmanager
    def _naming_backend(self) -> Iterator[None]:
        """In the first update after a start, note what computes it."""
        serving: AbstractContextManager[set[str]] = nullcontext(set()) if self.backend else kernels.serving()
        with serving as names:
            yield
        if self.backend is None:
            if self.config.compile:
                # a traced graph makes no calls; its choice does not depend on the rows
                rows = torch.zeros(1, self.model.config.width, device=self.world.device)
                names = {"compiled", kernels.chosen(rows, rows)}
            self.backend = "+".join([*(sorted(names) or ["torch"]), *mkl.names()])

    def _agree(self, loss: Tensor) -> float:
        """The mean loss over all processes. A signal that reached one process reaches all of them here."""
        received = [float(self._received == number) for number in SIGNALS]
        total, *counts = self.world.sum(torch.stack([loss, *loss.new_tensor(received)])).tolist()
        for number, count in zip(SIGNALS, counts, strict=True):
            if count:
                self._stopping = number
        return total / self.world.size

    def _due(self, every: int) -> bool:
        return bool(every) and (self.step % every == 0 or self.step == self.config.steps)

    def request_stop(self, number: int) -> None:
        """Stop after the current update, as the signal of this number does."""
        self._received = number

    def _start(self, meter: Meter) -> Start:
        """What the untrained model predicts. Warns of what may go wrong with it."""
        with self.precision():
            start = start_of(self.model, *self._fixed_tokens(), self.unigram_entropy)
        own = start.own_logit if self.model.config.head == "tied" else None
        known = start.expected if self.unigram_entropy is None else self.unigram_entropy
        warning = start_warning(own, start.expected - known)
        if warning and radius_of(self.model) is not None and not self._quiet:
            meter.say(f"WARNING: {warning}. What helps, {self._advice}. docs/collapse.md explains it.")
        return start

    def _announce(self, meter: Meter, line: MetricsRecord) -> None:
        for event in line.events or ():
            name = "divergence: " if event.kind == "diverged" else ""
            helps = f"; what helps, {event.remedy}" if event.kind == "collapsed" else ""
            meter.say(f"ALARM: {name}{event.sentence}{helps}.")
        if line.backend is not None and self.backend_before is not None:
            meter.say(
                f"the backend was {self.backend_before} and is {self.backend} from step {self.step} on: "
                f"the last bits of its updates differ."
            )

    def _kept(self) -> str:
        last = max(checkpoint.steps(self.path / CHECKPOINTS), default=None)
        return "there was no checkpoint yet" if last is None else f"step-{last} is kept"

    def _write(self, line: MetricsRecord) -> None:
        if self.log is not None:
            self.log.append(line)
        if self.tracker is not None:
            numbers = {f"train/{name}": getattr(line, name) for name in TRACKED}
            self.tracker.log(finite_numbers(numbers) | sublayer_scalars(line.sublayers or ()), line.step)
            for event in line.events or ():
                self.tracker.alert(event)

    def _show(self, meter: Meter, line: MetricsRecord) -> None:
        val = "" if self.val_loss is None else f", val {self.val_loss:.4f}"
        text = f"step {self.step}/{self.config.steps}, loss {line.loss:.4f}{val}"
        meter.show(f"{text}, {line.tokens_per_second:,.0f} tokens/s", self.step / self.config.steps, line.evaluated)
