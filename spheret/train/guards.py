"""Guards: count loss spikes, raise an alarm when tokens collapse, name the first sublayer that is not finite."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from spheret.model.gpt import GPT
from spheret.model.monitor import ENTROPY_MARGIN
from spheret.model.probes import Sublayer, probe
from spheret.runs.records import WatchRecord
from spheret.support.sharding import local
from spheret.train.distributed import World
from spheret.train.divergence import where

SPIKE_WINDOW, SPIKE_LEAST, SPIKE_Z = 64, 20, 5.0
COLLAPSED_COSINE = 0.99
# a healthy run passes the unigram entropy; a collapsed one stays there
COLLAPSE_UPDATES = 20
COLLAPSE_ADVICE = (
    "what helps: --head-bias unigram, which stores the frequencies in the head, or a --warmup of 100 updates or more"
)


class NonFinite(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite. The message says where it began."""


class Watch:
    """What the guards remember from step to step."""

    def __init__(self, unigram_entropy: float | None) -> None:
        self.unigram_entropy = unigram_entropy
        self.spikes = 0
        self.collapsed_since: int | None = None
        self.alarmed = False
        self.losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def state(self) -> WatchRecord:
        return WatchRecord(
            spikes=self.spikes,
            collapsed_since=self.collapsed_since,
            alarmed=self.alarmed,
            losses=list(self.losses),
        )

    def restore(self, state: WatchRecord) -> None:
        self.spikes, self.alarmed = state.spikes, state.alarmed
        self.collapsed_since = state.collapsed_since
        self.losses.clear()
        self.losses.extend(state.losses)

    def loss(self, value: float) -> None:
        """Count a spike: a loss more than SPIKE_Z standard deviations above the mean of the last losses."""
        if len(self.losses) >= SPIKE_LEAST:
            mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
            self.spikes += value > mean + SPIKE_Z * max(deviation, 1e-6)
        self.losses.append(value)

    def collapse(self, step: int, warmup: int, sublayers: Iterable[dict[str, Any]]) -> str | None:
        """The alarm, once: all states share one direction and the loss stays at the unigram entropy."""
        if self.unigram_entropy is None or not self.losses:
            return None
        worst = max(sublayers, key=lambda sublayer: sublayer["cosine"])
        recent = list(self.losses)[-SPIKE_LEAST:]
        stuck = abs(statistics.fmean(recent) - self.unigram_entropy) < ENTROPY_MARGIN * self.unigram_entropy
        if step <= warmup or not stuck or worst["cosine"] < COLLAPSED_COSINE:
            self.collapsed_since = None
            return None
        if self.collapsed_since is None:
            self.collapsed_since = step
        if step - self.collapsed_since < COLLAPSE_UPDATES or self.alarmed:
            return None
        self.alarmed = True
        return (
            f"token collapse: after sublayer {worst['sublayer']} the states of different tokens have a mean cosine "
            f"of {worst['cosine']:.3f}, and the loss {statistics.fmean(recent):.3f} stays at the unigram entropy "
            f"{self.unigram_entropy:.3f}; {COLLAPSE_ADVICE}"
        )


def _finite(x: Tensor) -> bool:
    return bool(local(x).isfinite().all())


def _bad_weights(model: torch.nn.Module, world: World) -> str | None:
    bad = next((name for name, p in model.named_parameters() if not _finite(p.detach())), None)
    message = f"the weights {bad} are not finite" if bad else None
    return next((text for text in world.gather(message) if text), None)


def find_non_finite(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    precision: Callable[[], AbstractContextManager[Any]],
    world: World,
) -> str:
    """Run the batches of an update again and name the first value that is not finite, in the order of computing."""
    bad_weights = _bad_weights(model, world)
    if bad_weights is not None:
        return bad_weights
    for x, y in batches:
        problems: list[str] = []

        def see(seen: Sublayer, problems: list[str] = problems) -> None:
            for what, value in (("branch", seen.f), ("output", seen.out)):
                if not _finite(value):
                    problems.append(f"the {what} of {where(seen.number)} is not finite")
            if seen.out.requires_grad:
                seen.out.register_hook(
                    lambda g: (
                        None if _finite(g) else problems.append(f"the gradient at {where(seen.number)} is not finite")
                    )
                )

        model.zero_grad(set_to_none=True)
        with probe(model, see):
            with precision():
                loss = model(x, y)
            if not problems and not _finite(loss):
                problems.append("the loss is not finite, though every sublayer's output is")
            if not world.any(bool(problems)):
                loss.backward()
        if not problems:
            grads = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            bad = next((name for name, grad in grads if not _finite(grad)), None)
            if bad is not None:
                problems.append(f"the gradient of {bad} is not finite")
        # the first process that has a problem reports it
        first = next((each[0] for each in world.gather(problems) if each), None)
        if first is not None:
            return first
    return "run again, every sublayer's output and gradient is finite: the norm of the whole gradient overflowed"


def finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def check_weights(model: torch.nn.Module, world: World) -> None:
    """Raise if a weight is NaN or infinite: such a model is never saved."""
    bad = _bad_weights(model, world)
    if bad is not None:
        raise NonFinite(bad)
