"""`spheret.watch`: see what happens inside a model while it trains, in any loop."""

from __future__ import annotations

import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spheret.model.head import own_logit
from spheret.observe.calls import (
    TokenCounts,
    WaitingLosses,
    first_rows,
    has_tied_head,
    logits_of,
    loss_of,
    quietly,
    token_ids,
)
from spheret.observe.finding import Anatomy, find_sublayers, without_stream
from spheret.observe.hooks import StreamHooks
from spheret.observe.judge import Judge, JudgeState
from spheret.observe.measures import fill_gradients, fill_stream, fill_updates, on_bound
from spheret.observe.nonfinite import bad_gradient, bad_nowhere, bad_outputs, bad_weights, items_of
from spheret.observe.outputs import LineFile, Tracker, say, scalars
from spheret.observe.plateau import LOOK
from spheret.observe.processes import Processes
from spheret.observe.records import Event, EventKind, Header, Observation, PlaceObservation, SublayerObservation
from spheret.observe.rules import collapse_remedy
from spheret.support.errors import need, shortened
from spheret.support.ranges import check_above_zero, check_count

if TYPE_CHECKING:
    from transformers import TrainerCallback

# a long training keeps every second of its older observations
_MOST_OBSERVATIONS = 2000
# a page is not rewritten more often, in seconds
_PAGE_EVERY = 10.0


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP and of torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _is_compiled(model: nn.Module) -> bool:
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())


class Watch:
    """Watch a model while it trains: call `watch.step(loss)` after each backward pass. ::

        watch = spheret.watch(model, every=50)
        for x, y in batches:
            loss = model(x, y)
            loss.backward()
            watch.step(loss)
            optimizer.step()
            optimizer.zero_grad()

    The first forward pass is preceded by a trial pass on two rows of its batch, which finds the residual stream.
    Training is bitwise identical.

    Args:
        model: any torch module, also in DDP, with FSDP2, or compiled: then give the compiled one.
        every: the first step and every `every`-th one are watched.
        out: a directory for watch.jsonl, which `spheret report` shows.
        log: a run of trackio or Weights & Biases, which also gets alarms as alerts, or a function of (values, step).
        on_alarm: called with every `Event`.
        optimizer: if given, its step calls `watch.step`, and the loss is what the model returns.
        unigram_entropy: of the token frequencies, in nats; by default it is estimated from the tokens seen.
        sensitivity: above 1, smaller deviations raise an alarm; below 1, larger ones.
        quiet: print nothing.

    Attributes:
        events: all that was said so far; `alarms` without the warnings.
        observations: what was seen at the watched steps.
        steps: how many updates there were.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        out: str | Path | None = None,
        log: Any = None,
        on_alarm: Callable[[Event], object] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        unigram_entropy: float | None = None,
        sensitivity: float = 1.0,
        quiet: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch takes a torch module, got {type(model).__name__}.")
        if unigram_entropy is not None and not unigram_entropy > 0:
            raise ValueError(f"unigram_entropy must be positive, in nats, got {unigram_entropy!r}.")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        self._sensitivity = check_above_zero("sensitivity", sensitivity)
        self.every = check_count("every", every)
        self.model = unwrapped(model)
        self._on_alarm, self._quiet = on_alarm, quiet
        self._tracker = None if log is None else Tracker(log)
        self._given_entropy = unigram_entropy
        self.steps = 0
        self.events: list[Event] = []
        self.observations: list[Observation] = []
        self.anatomy: Anatomy | None = None
        self.judge: Judge | None = None
        # the judge's, which may be loaded before there is one
        self._state = JudgeState(entropy=unigram_entropy)
        # in compiled code hooks do not run, so that the stream is seen in a forward pass of its own
        self._own_pass = _is_compiled(model)
        self._processes = Processes(next((p.device for p in model.parameters()), torch.device("cpu")))
        self._is_main = self._processes.is_main
        self._file = LineFile(Path(out)) if out is not None and self._is_main else None
        self._modules: dict[str, nn.Module] = {}
        self._hooks: StreamHooks | None = None
        self._looks = True
        self._inputs: tuple[tuple[Any, ...], dict[str, Any], list[tuple[str, torch.dtype]]] | None = None
        self._returned: list[Tensor] = []
        self._summed = False
        # forward passes that may raise an error before the stream is given up, and what was seen in the last one
        self._trials = 3
        self._failed: Anatomy | None = None
        self._own_logit: float | None = None
        vocab = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
        self._tokens = TokenCounts(vocab) if vocab and unigram_entropy is None else None
        self._losses = WaitingLosses()
        self._since: list[float | None] = []
        # an observation that waits for the optimiser's step, with the weights before it
        self._pending: Observation | None = None
        self._before: list[Tensor] = []
        self._begun = time.perf_counter()
        self._page: Path | None = None
        self._page_written = 0.0
        self._inside = False
        self._devices: set[str] = set()
        # the optimisers that have updated a weight of the model, and those that have not
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        # whether the gradients of a few weights were zero before each backward pass of a watched step
        self._zeroed: dict[int, list[bool]] = {}
        self._gradient_hooks: list[Any] = []
        self._seeing: StreamHooks | None = None
        self._handles: list[Any] = [
            # before the hooks of FSDP2, which gather the weights of the pass that follows
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(partial(_meet, weakref.ref(self))),
        ]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.step()))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._finish()))

    @property
    def alarms(self) -> list[Event]:
        """The events without the warnings."""
        return [event for event in self.events if event.level == "alarm"]

    def due(self, step: int) -> bool:
        """Whether a step is watched: the first, and every `every`-th."""
        return step == 1 or step % self.every == 0

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimiser makes a step: is it one of this model?"""
        if optimizer not in self._optimizers:
            own = {id(p) for p in self.model.parameters()}
            weights = (p for group in optimizer.param_groups for p in group["params"])
            self._optimizers[optimizer] = any(id(p) in own for p in weights)

    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimisers that are known to update the model."""
        return [group for optimizer, own in self._optimizers.items() if own for group in optimizer.param_groups]

    # what follows is called by the model

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # a model inside of a compiled one is left to the compiler: a hook there would change what is compiled
        if torch.compiler.is_compiling() or self._inside or not torch.is_grad_enabled():
            return
        self._finish()
        if not self._devices:
            self._devices = {p.device.type for p in self.model.parameters()} or {"cpu"}
        cast = [(t, torch.get_autocast_dtype(t)) for t in self._devices if torch.is_autocast_enabled(t)]
        self._inputs = args, kwargs, cast
        if self.anatomy is None:
            self._begin(args, kwargs)
        if self._looks and self._hooks is None and self.anatomy is not None and not self._own_pass:
            self._hooks = self._seeing = StreamHooks(self.anatomy, self._modules)
            self._seeing.logits.__enter__()
            self._hook_gradients()
        if self._tokens is not None and (ids := token_ids(args, kwargs)) is not None:
            self._tokens.see(ids)

    def _hook_gradients(self) -> None:
        """At the smallest weights, see whether the gradient is zero before a backward pass adds to it."""

        def before(parameter: nn.Parameter, _: Tensor) -> None:
            grad = parameter.grad
            self._zeroed.setdefault(id(parameter), []).append(grad is None or not bool(grad.any()))

        # what nobody updates may be left as it is
        updated = {id(p) for group in self._groups() for p in group["params"]}
        weights = [
            p for p in self.model.parameters() if p.requires_grad and (id(p) in updated or not self._optimizers)
        ]
        self._gradient_hooks = [p.register_hook(partial(before, p)) for p in sorted(weights, key=Tensor.numel)[:3]]

    def _were_zeroed(self) -> bool:
        """Whether gradients did not add up over updates: of several backward passes, one began with zeros."""
        for handle in self._gradient_hooks:
            handle.remove()
        seen, self._zeroed, self._gradient_hooks = self._zeroed, {}, []
        return self.steps == 1 or all(any(passes) for passes in seen.values())

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seeing, self._seeing = self._seeing, None
        if seeing is not None:
            seeing.logits.__exit__(None, None, None)
        # without an output, the model has raised an error
        if torch.compiler.is_compiling() or self._inside or not torch.is_grad_enabled() or output is None:
            return
        loss = loss_of(output)
        if loss is not None:
            self._returned.append(loss.detach())
            # the parts of one mean
            self._summed = kwargs.get("num_items_in_batch") is not None
        if self._looks and self.steps == 0 and self._own_logit is None:
            self._own_logit = self._head(output, args, kwargs)

    def _head(self, output: Any, args: Any, kwargs: Any) -> float | None:
        """The logit of the current token above the mean logit, if the head is the transposed embedding."""
        ids, logits = token_ids(args, kwargs), logits_of(output)
        if ids is None or logits is None or logits.shape[:-1] != ids.shape:
            return None
        return own_logit(logits.detach(), ids) if has_tied_head(self.model, logits.shape[-1]) else None

    # and this by its loop

    def step(self, loss: Tensor | float | None = None) -> None:
        """Call it after the backward passes of an update and before the optimiser's step, best before clipping.

        Args:
            loss: the loss of the update; by default what the model has returned as its loss.
        """
        self._finish()
        self.steps += 1
        step, due = self.steps, self.due(self.steps)
        self._losses.add(step, self.own_loss() if loss is None else loss)
        self._returned = []
        if self.anatomy is None:
            note = "no forward pass was seen before the first step; of a compiled model, watch the compiled one"
            self._start(self._failed or without_stream(self.model, note))
        assert self.judge is not None
        judge = self.judge
        spikes: dict[int, float] = {}
        # the largest that is known: one on a GPU would be waited for
        rates = [group["lr"] for group in self._groups() if "lr" in group]
        known = [float(x) for x in rates if not isinstance(x, Tensor) or x.device.type == "cpu"]
        rate = max(known, default=None)
        events = judge.rates(step, rate)
        bad_loss = False
        # the plateau is judged at certain steps, whatever `every` is, and suspected one before
        wanted = due or self._looks or (step + 1) % LOOK == 0
        for number, value in self._losses.known(wanted, self._processes):
            self._since.append(value if math.isfinite(value) else None)
            if not math.isfinite(value):
                bad_loss = True
            elif judge.loss(number, value):
                spikes[number] = value
        looks = due or self._looks or bool(spikes) or bad_loss
        # of a spike, which branch rose
        observation = self._observe(step, bool(spikes) and self._hooks is None) if looks else None
        total = None if observation is None else observation.grad_norm
        bad_gradient = total is not None and not math.isfinite(total)
        if bad_loss or bad_gradient:
            events += self._not_finite(step, bad_loss)
        else:
            judge.state.finite = True
        for number, each in spikes.items():
            # where several processes or a GPU are not waited for, a spike is known later than its gradient
            events += judge.spike(number, each, observation if number == step else None)
        if step % LOOK == 0:
            (entropy,) = self._processes.of_main([None if self._tokens is None else self._tokens.entropy()])
            self._state.entropy = self._given_entropy or entropy
        if observation is not None:
            observation.rate = rate
            events += judge.observed(observation, not (spikes or bad_loss or bad_gradient))
            observation.events += events
            self._pending = observation
            self._before = [p.detach().clone() for p in self._weights()]
        self._report(events)
        self._looks = self.due(step + 1) or judge.wants_a_look(step + 1)

    def own_loss(self, parts: int = 1) -> Tensor:
        """The loss of the update as the model has returned it, for this process.

        parts: of how many processes the losses add up, where the model was told over how many tokens to take means.
        """
        if not self._returned:
            raise ValueError("the model returned no loss: call watch.step(loss) with the loss of the update.")
        losses = torch.stack([each.reshape(()) for each in self._returned])
        return losses.sum() * parts if self._summed else losses.mean()

    # the trial

    def _begin(self, args: Any, kwargs: Any) -> None:
        few = first_rows((args, kwargs))
        note = "the stream is looked for where the model is called with tensors, numbers and nothing else"
        anatomy = without_stream(self.model, note)
        if few is not None:
            # some models cannot take a part of their batch
            for given, named in (few, (args, kwargs)):
                # what the model warns of, it warns of in the pass that follows
                with self._quietly(), warnings.catch_warnings(action="ignore"):
                    anatomy = find_sublayers(self.model, partial(self.model, *given, **named))
                if anatomy.sublayers:
                    break
            if anatomy.failed and self._trials > 0:
                # the next batch may be a better one
                self._trials -= 1
                self._failed = anatomy
                return
        self._start(anatomy)

    def _start(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._modules = dict(self.model.named_modules())
        vocab = 0 if self._tokens is None else self._tokens.vocab
        remedies: dict[EventKind, str] = {"collapsed": collapse_remedy(has_tied_head(self.model, vocab))}
        self.judge = Judge(items_of(anatomy), self._given_entropy, remedies=remedies, sensitivity=self._sensitivity)
        self.judge.state = self._state
        count = sum(p.numel() for p in self.model.parameters())
        self.header = Header(
            type(self.model).__name__, count, self.every, anatomy.found, anatomy.names(), anatomy.note
        )
        if self._file is not None:
            self._file.begin(self.header)
        if anatomy.found == "parameters only" and self._is_main and not self._quiet:
            print(
                f"spheret.watch: the stream of {self.header.model} was not found, so only its weights are "
                f"watched: {anatomy.note}.",
                file=sys.stderr,
            )

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """A context for passes of ours, which the hooks on the model ignore."""
        self._inside = True
        try:
            with quietly(self.model):
                yield
        finally:
            self._inside = False

    # the observation

    def _weights(self) -> list[nn.Parameter]:
        assert self.judge is not None
        return [p for item in self.judge.items for p in item.parameters.values()]

    def _observe(self, step: int, again: bool = False) -> Observation:
        """again: whether the stream is to be seen in one more forward pass."""
        assert self.anatomy is not None
        assert self.judge is not None
        if (self._own_pass or again) and self.anatomy.sublayers and self._inputs is not None:
            # one forward pass without gradients, for a model whose own pass shows nothing
            self._hooks = StreamHooks(self.anatomy, self._modules)
            with self._again() as call, self._hooks.logits:
                call()
            self._hooks.remove()
        hooks, self._hooks = self._hooks, None
        observation = Observation(step, losses=self._since, zeroed=self._were_zeroed())
        self._since = []
        observation.seconds = time.perf_counter() - self._begun
        observation.on_bound = on_bound(self.model)
        observation.own_logit, self._own_logit = self._own_logit, None
        observation.sublayers = [SublayerObservation(n) for n in range(1, len(self.anatomy.sublayers) + 1)]
        observation.places = [PlaceObservation(name) for name in self.anatomy.places]
        if hooks is not None:
            hooks.remove()
            fill_stream(observation, hooks, self._processes)
            if self.anatomy.sublayers and all(each.norm is None for each in observation.sublayers):
                # in compiled code hooks may not run
                self._own_pass = True
        fill_gradients(observation, self.judge.items)
        return observation

    @contextmanager
    def _again(self) -> Iterator[Callable[[], object]]:
        """A function that calls the model once more as it was called last, without gradients. It does not raise."""
        assert self._inputs is not None
        args, kwargs, cast = self._inputs

        def call() -> None:
            # monitoring must never crash training
            try:
                self.model(*args, **kwargs)
            except Exception as error:
                print(f"spheret.watch: a second forward pass failed: {shortened(str(error), 200)}", file=sys.stderr)

        with self._quietly(), ExitStack() as stack:
            for device, dtype in cast:
                stack.enter_context(torch.autocast(device, dtype))
            yield call

    def _finish(self) -> None:
        """After the optimiser's step: how large it was. The observation is then complete."""
        observation, before = self._pending, self._before
        if observation is None or self.judge is None:
            return
        self._pending, self._before = None, []
        unmoved = fill_updates(observation, self.judge.items, before)
        events = self.judge.updated(observation, unmoved)
        observation.events += events
        self._report(events)
        if observation.grad_norm is not None and not math.isfinite(observation.grad_norm):
            observation.grad_norm = None
        self.observations.append(observation)
        if len(self.observations) > _MOST_OBSERVATIONS:
            # the file has all of them
            half = len(self.observations) // 2
            self.observations = [*self.observations[:half:2], *self.observations[half:]]
        if not self._is_main:
            return
        if self._file is not None:
            self._file.append(observation)
        if self._tracker is not None:
            self._tracker.log(scalars(observation), observation.step)
        if self._page is not None and time.perf_counter() - self._page_written > _PAGE_EVERY:
            self._write_page(live=True)

    def _not_finite(self, step: int, bad_loss: bool) -> list[Event]:
        assert self.judge is not None
        assert self.anatomy is not None
        items = self.judge.items
        # of sharded weights each process sees its own part, and all must continue to the next look together
        event = self._processes.first(bad_weights(step, items))
        if event is None and bad_loss and self._inputs is not None:
            with bad_outputs(step, self.model, items) as found, self._again() as call:
                call()
            event = self._processes.first(found[0] if found else None)
        event = event or self._processes.first(bad_gradient(step, items, self.anatomy.entry))
        return self.judge.not_finite(event or bad_nowhere(step, "loss" if bad_loss else "gradient norm"))

    def _report(self, events: list[Event]) -> None:
        self.events += events
        if not self._is_main:
            return
        for event in events:
            if not self._quiet:
                say(event)
            if self._tracker is not None:
                self._tracker.alert(event)
            if self._on_alarm is not None:
                self._on_alarm(event)

    # what it shows

    def page(self, path: str | Path) -> Path:
        """Write the report's page of what was seen so far, one offline file, and again while training runs."""
        self._page = Path(path)
        if self._is_main:
            self._write_page(live=True)
        return self._page

    def _write_page(self, live: bool) -> None:
        if self._page is not None and self.anatomy is not None:
            lab = need("spheret.lab.watched", "lab")
            lab.write_page(self._page, self.header, self.observations, _PAGE_EVERY if live else None)
        self._page_written = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """What a restarted loop needs to be judged as if it had not stopped. Call it after the optimiser's step."""
        self._finish()
        return {
            "steps": self.steps,
            "looks": self._looks,
            "waiting": [(step, float(loss)) for step, loss in self._losses.waiting],
            "since": list(self._since),
            "tokens": None if self._tokens is None else self._tokens.counts,
            "judge": asdict(self._state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self.steps, self._looks = state["steps"], state["looks"]
        self._losses.waiting, self._since = list(state["waiting"]), list(state["since"])
        if self._tokens is not None:
            self._tokens.counts = state["tokens"]
        healthy = [SublayerObservation(**each) for each in state["judge"]["healthy"]]
        self._state = JudgeState(**{**deepcopy(state["judge"]), "healthy": healthy})
        if self.judge is not None:
            self.judge.state = self._state

    def __repr__(self) -> str:
        found = "not seen yet" if self.anatomy is None else f"{len(self.anatomy.sublayers)} sublayers"
        alarms = "1 alarm" if len(self.alarms) == 1 else f"{len(self.alarms)} alarms"
        return f"Watch({type(self.model).__name__}, {found}, step {self.steps}, {alarms})"

    def close(self) -> None:
        """Take all hooks out of the model, and complete the file and the page. The model is as it was."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._finish()
        for handle in (*self._handles, *self._gradient_hooks):
            handle.remove()
        self._handles, self._inputs, self._returned = [], None, []
        if self._page is not None and self._is_main:
            self._write_page(live=False)
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _meet(watch: weakref.ref[Watch], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Any optimiser makes a step. The hook is torch's own, and must not keep the model alive."""
    seen = None if torch.compiler.is_compiling() else watch()
    if seen is not None:
        seen.meet(optimizer)


# a call reads as what it does: spheret.watch(model)
watch = Watch


def trainer_callback(every: int = 50, **options: Any) -> TrainerCallback:
    """A callback for transformers' Trainer: its attribute `watch` is the `Watch`.

    The Trainer clips before it calls it: give it `max_grad_norm=0` to see the gradient norms as they were.

    Args:
        every: the first step and every `every`-th one are watched.
        options: the options of `watch`.
    """
    transformers = need("transformers", "hub")

    class WatchCallback(transformers.TrainerCallback):  # type: ignore[name-defined]
        """Watches the Trainer's model."""

        watch: Watch | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            self.watch = Watch(model, every, **options)
            self.watch.steps = state.global_step

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                # the Trainer counts the tokens of all processes, so that their losses add up
                self.watch.step(self.watch.own_loss(args.world_size if args.average_tokens_across_devices else 1))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watch is not None:
                self.watch.close()

    return WatchCallback()
