"""The observer of `spheret train`: it measures a GPT on fixed tokens, and judges the losses and what it sees.

It measures with the functions of `spheret.watch`, in forward passes of its own, so that the model that trains has no
hooks and may be compiled. What an untrained model predicts and which flags help stand here, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spheret.model.config import GPTConfig
from spheret.model.gpt import GPT
from spheret.model.head import own_logit
from spheret.model.probes import sublayer_name
from spheret.observe.calls import quietly
from spheret.observe.finding import find_sublayers
from spheret.observe.hooks import StreamHooks
from spheret.observe.judge import Item, Judge
from spheret.observe.measures import fill_gradients, fill_stream, on_bound
from spheret.observe.nonfinite import (
    bad_gradient,
    bad_nowhere,
    bad_outputs,
    bad_weights,
    is_finite,
    items_of,
)
from spheret.observe.processes import Processes
from spheret.observe.records import Event, Observation, Start, SublayerObservation
from spheret.support.precision import wide

if TYPE_CHECKING:
    from spheret.runs.config import TrainConfig

# a warm-up of this many updates kept runs from collapsing that collapsed with a few dozen
LONG_WARMUP = 100
# above this rate no run of ours was of use, and above 0.3 most diverged: docs/settings.md
HIGH_RATE, USUAL_RATE = 0.1, 1e-3


class NonFinite(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite. The event and the message say where it began."""

    def __init__(self, event: Event) -> None:
        super().__init__(event.sentence)
        self.event = event


class Observer:
    """Observes and judges one model. Create it before the weights are sharded.

    Args:
        model: a GPT.
        precision: the context of a forward pass.
        unigram_entropy: the entropy of the token frequencies of its data, if it is known.
        warmup, steps: the run's.
        advice: what helps against a collapse.
    """

    def __init__(
        self,
        model: GPT,
        precision: Callable[[], AbstractContextManager[Any]],
        unigram_entropy: float | None,
        warmup: int,
        steps: int,
        advice: str = "",
    ) -> None:
        self.model, self.precision = model, precision
        device = model.tokens.weight.device
        self._processes = Processes(device)
        trial = torch.zeros(1, min(2, model.config.block), dtype=torch.long, device=device)
        with quietly(model):
            self.anatomy = find_sublayers(model, lambda: model(trial))
        level = math.log(model.config.vocab), "loss of a uniform guess"
        if unigram_entropy is not None:
            level = unigram_entropy, "unigram entropy"
        items = items_of(self.anatomy, sublayer_name)
        self.judge = Judge(items, unigram_entropy, level, warmup, steps, {"collapsed": advice} if advice else {})
        self._gradients: Observation | None = None

    def _items(self) -> list[Item]:
        """What is judged, with its weights. Sharding has put others in the place of those that were found."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return [
            replace(item, parameters={name: named[name] for name in item.parameters}) for item in self.judge.items
        ]

    def _blank(self, step: int) -> Observation:
        names = enumerate(self.anatomy.sublayers, start=1)
        return Observation(step, sublayers=[SublayerObservation(number, found.branch) for number, found in names])

    def see_gradients(self, step: int) -> None:
        """Measure the gradient of every sublayer, after the backward pass of an update. `observe` must follow it."""
        self._gradients = self._blank(step)
        fill_gradients(self._gradients, self._items()[: len(self.anatomy.sublayers)])
        # these are clipped, and without the places outside of the sublayers
        self._gradients.grad_norm = None

    @property
    def looks(self) -> bool:
        """Whether the gradients of the last update were measured."""
        return self._gradients is not None

    def observe(self, step: int, tokens: Tensor, targets: Tensor) -> Observation:
        """What the sublayers do with these tokens, and what the judge says to it. The model is left as it is."""
        observation = self._gradients or self._blank(step)
        self._gradients = None
        hooks = StreamHooks(self.anatomy, dict(self.model.named_modules()))
        try:
            with quietly(self.model), self.precision():
                self.model.token_losses(tokens, targets)
        finally:
            hooks.remove()
        fill_stream(observation, hooks, self._processes)
        observation.on_bound = on_bound(self.model)
        observation.events = [event for event in self.judge.observed(observation) if event.level == "alarm"]
        return observation

    def find_not_finite(self, step: int, batches: Iterable[tuple[Tensor, Tensor]]) -> NonFinite:
        """Run the batches of an update again, and find the first value that is not finite. Gradients are lost."""
        items, first = self._items(), self._processes.first
        event = first(bad_weights(step, items))
        for x, y in batches:
            if event is not None:
                break
            self.model.zero_grad(set_to_none=True)
            with bad_outputs(step, self.model, items) as found, self.precision():
                loss = self.model(x, y)
            event = first(found[0] if found else None if is_finite(loss) else bad_nowhere(step, "loss"))
            if event is None:
                loss.backward()
                event = first(bad_gradient(step, items, self.anatomy.entry))
        return NonFinite(event or bad_nowhere(step, "gradient norm"))

    def check_weights(self, step: int) -> None:
        """Raise if a weight is NaN or infinite: such a model is never saved."""
        event = self._processes.first(bad_weights(step, self._items()))
        if event is not None:
            raise NonFinite(event)


def against_collapse(model: GPTConfig, train: TrainConfig) -> str:
    """The flags that keep tokens from collapsing, for a sentence: docs/collapse.md."""
    high = train.lr > HIGH_RATE
    # one digit that counts
    lower = f"--lr {USUAL_RATE if high else float(f'{train.lr / 3:.0e}'):g}"
    # at a high rate every connection collapses
    flags = [lower] if high else []
    if model.head_bias != "unigram":
        flags.append("--head-bias unigram")
    if model.head == "tied":
        flags.append("--head shifted")
    updates = min(max(2 * train.warmup, LONG_WARMUP), train.steps // 2)
    if updates > train.warmup:
        flags.append(f"--warmup {updates}")
    return f"the most promising first: {', '.join(flags if high else [*flags, lower])}"


def own_logit_and_loss(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """`own_logit` without the head's bias, and the mean loss, from one forward pass in evaluation mode."""
    own: list[float] = []

    def measure(module: nn.Module, args: tuple[Tensor], h: Tensor) -> None:
        weight = model.head_weight()
        # one window at a time, because logits are large
        own.extend(
            own_logit(F.linear(model.read_out(states), weight), ids)
            for states, ids in zip(h.split(1), tokens.split(1), strict=True)
        )

    handle = model.final_norm.register_forward_hook(measure)
    try:
        with quietly(model):
            losses = model.token_losses(tokens, targets)
    finally:
        handle.remove()
    return statistics.fmean(own), float(wide(losses).mean())


def start_of(model: GPT, tokens: Tensor, targets: Tensor, unigram_entropy: float | None) -> Start:
    """What the untrained model predicts, and the loss of a model that knows only what its head's bias starts at."""
    own, loss = own_logit_and_loss(model, tokens, targets)
    known = unigram_entropy if model.config.head_bias == "unigram" else None
    return Start(own, loss, math.log(model.config.vocab) if known is None else known)


def radius_of(model: GPT) -> float | None:
    """The radius of the sphere on which the entry puts the stream, or None if the stream is not on one."""
    radius_value: Callable[[], float] | None = getattr(model.entry_norm, "radius_value", None)
    return None if radius_value is None else radius_value()
