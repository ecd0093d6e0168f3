"""Guards: warn before the first update, count loss spikes, raise an alarm when tokens collapse, name the first
sublayer that is not finite.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from spheret.analysis.remedies import Advice
from spheret.model.gpt import GPT
from spheret.model.monitor import keeps_its_norm
from spheret.model.probes import Sublayer, probe
from spheret.runs.metrics import StartRecord
from spheret.runs.plateau import on_plateau
from spheret.runs.records import WatchRecord
from spheret.support.sharding import local
from spheret.train.distributed import World
from spheret.train.divergence import where

SPIKE_WINDOW, SPIKE_LEAST, SPIKE_Z = 64, 20, 5.0
# a healthy run passes the unigram entropy within these updates; a collapsed one stays there. While it does, the
# sublayers are measured this often
COLLAPSE_UPDATES, COLLAPSE_LOOK = 20, 10
COLLAPSED_COSINE = 0.95
# at the start Pre-LN has 1.0, a spherical stream 2.0 at width 32 and 3.1 at width 64
HIGH_OWN_LOGIT = 1.5
# nats; of bytes of English they are worth 2.5
HIGH_FREQUENCIES = 0.5


class NonFinite(ArithmeticError):
    """A loss, gradient or weight is NaN or infinite. The message says where it began."""


class Watch:
    """What the guards remember from step to step."""

    def __init__(self, unigram_entropy: float | None, advice: Sequence[Advice] = ()) -> None:
        """advice: what helps against a collapse, for the alarm."""
        self.unigram_entropy, self.advice = unigram_entropy, advice
        self.spikes = 0
        self.alarmed = False
        self.losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def state(self) -> WatchRecord:
        return WatchRecord(
            spikes=self.spikes,
            alarmed=self.alarmed,
            losses=list(self.losses),
        )

    def restore(self, state: WatchRecord) -> None:
        self.spikes, self.alarmed = state.spikes, state.alarmed
        self.losses.clear()
        self.losses.extend(state.losses)

    def loss(self, value: float) -> None:
        """Count a spike: a loss more than SPIKE_Z standard deviations above the mean of the last losses."""
        if len(self.losses) >= SPIKE_LEAST:
            mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
            self.spikes += value > mean + SPIKE_Z * max(deviation, 1e-6)
        self.losses.append(value)

    def stays_on_plateau(self) -> bool:
        """Whether the loss was at the unigram entropy at each of the last COLLAPSE_UPDATES updates."""
        entropy, losses = self.unigram_entropy, list(self.losses)
        if entropy is None or len(losses) < COLLAPSE_UPDATES:
            return False
        return all(on_plateau(losses[: len(losses) - ago], entropy) for ago in range(COLLAPSE_UPDATES))

    def suspects_collapse(self, step: int) -> bool:
        """Whether the sublayers must be measured after this update, although no evaluation may be due."""
        return not self.alarmed and step % COLLAPSE_LOOK == 0 and self.stays_on_plateau()

    def collapse(self, sublayers: Iterable[dict[str, Any]]) -> str | None:
        """The alarm, once: all states share one direction and the loss stays at the unigram entropy."""
        worst = max(sublayers, key=lambda sublayer: sublayer["cosine"])
        if self.alarmed or worst["cosine"] < COLLAPSED_COSINE or not self.stays_on_plateau():
            return None
        self.alarmed = True
        recent = statistics.fmean(list(self.losses)[-COLLAPSE_UPDATES:])
        return (
            f"token collapse: after {where(worst['sublayer'])} the states of different tokens have a mean cosine "
            f"of {worst['cosine']:.3f}, and the loss {recent:.3f} stays at the unigram entropy "
            f"{self.unigram_entropy:.3f}; what helps, the most promising first: {_flags(self.advice)}"
        )


def _flags(advice: Iterable[Advice]) -> str:
    return ", ".join(each.flags for each in advice)


def start_warning(model: GPT, start: StartRecord, entropy: float | None, advice: Sequence[Advice]) -> str | None:
    """What to know before the first update about a stream of constant norm: docs/collapse.md.

    entropy: that of the token frequencies, if it is known.
    """
    own, loss, reasons = start.own_logit, start.loss, []
    if not keeps_its_norm(model) or own is None or loss is None:
        return None
    if model.config.head == "tied" and own >= HIGH_OWN_LOGIT:
        reasons.append(
            f"the model starts by predicting the current token, because its head is the transposed embedding: the "
            f"token's own logit is {own:.1f} above the mean, and the loss {loss:.2f} is {loss - start.expected:.2f} "
            f"above that of a model that knows nothing"
        )
    if entropy is not None and start.expected - entropy >= HIGH_FREQUENCIES:
        reasons.append(
            f"the stream has to carry the token frequencies, which are worth {start.expected - entropy:.2f} nats, "
            "because the head has no bias that starts at them"
        )
    if not reasons:
        return None
    return (
        f"{'; and '.join(reasons)}. Training then moves all tokens in one direction first, and a stream of constant "
        f"norm may stay collapsed there. What helps, the most promising first: {_flags(advice)}. docs/collapse.md "
        "explains it"
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
