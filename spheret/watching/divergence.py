"""Divergence without NaN: the loss stays far above what token frequencies alone give, and which layer moved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spheret.watching.observations import Finding, Measured, Moved

# the median of the last WINDOW losses is watched: the spike of a few batches does not change it
WINDOW = 20
# a median this share above the reference is a sign of divergence, because a collapsed model stays at the entropy
MARGIN = 0.1
# it must last this many updates, or this share of the run: a healthy run recovers from a spike
PATIENCE, PATIENCE_SHARE = 100, 0.02
# a run that explodes does not wait: FEW losses in a row, each HUGE times the reference
HUGE, FEW = 10.0, 5
# a sublayer stands out if one of its measures changed by this factor
MOVED = 2.0
# smaller angles and shares of the gradient are noise
LEAST_ANGLE, LEAST_SHARE = 0.01, 1e-3
TINY = 1e-30

# what a sublayer did before and does now, by measure
_MOVES: dict[str, str] = {
    "angle": "it turned the stream by {:.2g} radians and now turns it by {:.2g}",
    "gradient share": "it had {:.1%} of the gradient norm and now has {:.1%}",
    "norm factor": "it multiplied the norm of the stream by {:.3g} and now by {:.3g}",
}


@dataclass(frozen=True)
class HealthySublayer:
    """What is remembered of a sublayer."""

    sublayer: int
    norm: float | None
    angle_mean: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class Healthy:
    """What the sublayers measured when the loss was last normal."""

    step: int
    sublayers: list[HealthySublayer]


@dataclass(frozen=True)
class DivergenceState:
    """What the guard remembers from step to step. `step` is the one at which the run diverged."""

    lowest: float | None
    above_since: int | None
    step: int | None
    reason: str
    healthy: Healthy | None


class Divergence:
    """Watches the training loss. The reference is the higher of two losses:

    - that of a model that knows nothing of the input, `level`: the unigram entropy, or ln(vocabulary) if the data
      gives no entropy, or the first losses of the run;
    - the lowest median of FEW losses that this run has had, so that a slow run is not called diverged.

    Args:
        level: in the unit of the losses. Nothing is judged if it is not positive, because ratios mean nothing then.
        name: what the level is, for a sentence.
        warmup: updates before which a slow rise is not judged.
        steps: those of the whole run, if they are known: patience is a share of them.
    """

    def __init__(self, level: float, name: str, warmup: int = 0, steps: int = 0) -> None:
        self._name, self._level = name, level
        self._warmup, self._steps = warmup, steps
        self._patience = max(PATIENCE, round(PATIENCE_SHARE * steps))
        self.lowest: float | None = None
        self.above_since: int | None = None
        # the step at which the run diverged
        self.step: int | None = None
        self.reason = ""
        # the last step at which the loss was normal and the sublayers were measured, with their records
        self.healthy: Healthy | None = None
        self._above = False

    def state(self) -> DivergenceState:
        return DivergenceState(
            lowest=self.lowest,
            above_since=self.above_since,
            step=self.step,
            reason=self.reason,
            healthy=self.healthy,
        )

    def restore(self, state: DivergenceState) -> None:
        self.lowest, self.above_since, self.healthy = state.lowest, state.above_since, state.healthy
        self.step, self.reason = state.step, state.reason

    def loss(self, step: int, losses: Sequence[float]) -> bool:
        """Judge the last losses, the newest last. Returns True once: at the step at which the run diverged."""
        if self._level <= 0:
            return False
        if self.lowest is None:
            self.lowest = losses[-1]
        reference = max(self._level, self.lowest)
        enough = len(losses) >= WINDOW
        median, newest = statistics.median(losses[-WINDOW:]), statistics.median(losses[-FEW:])
        threshold = (1 + MARGIN) * reference
        # where the loss falls fast, the median of many is still high
        self._above = min(median, newest) > threshold
        # of few losses, because a run may learn for a short time before it diverges
        if len(losses) >= FEW:
            self.lowest = min(self.lowest, newest)
        if not (median > threshold and enough and step > self._warmup):
            self.above_since = None
        elif self.above_since is None:
            self.above_since = step
        if self.step is not None:
            return False
        smallest = min(losses[-FEW:])
        against = f"the {self._name}, {self._level:.3f}"
        if reference > self._level:
            against = f"its lowest so far, {reference:.3f}, and {against}"
        if len(losses) >= FEW and smallest > HUGE * reference:
            self.reason = f"the loss was at least {smallest:.4g} for {FEW} updates, {HUGE:g} times {against}"
        elif self.above_since is not None and (
            step - self.above_since >= self._patience or (step == self._steps and self._above)
        ):
            lasted = f"for {step - self.above_since} updates" if step > self.above_since else "at the last update"
            self.reason = (
                f"the loss {median:.4g}, the median of {WINDOW} updates, is more than {MARGIN:.0%} above {against}; "
                f"it was so {lasted}"
            )
        else:
            return False
        self.step = step
        return True

    def remember(self, step: int, sublayers: Sequence[Measured]) -> None:
        """Keep the records of the sublayers while the loss is normal, for comparison with a later step."""
        if not self._above and self.step is None:
            self.healthy = Healthy(step=step, sublayers=[_remembered(sublayer) for sublayer in sublayers])

    def moved(self, sublayers: Sequence[Measured]) -> Finding:
        """Which sublayer moved most since the loss was last normal, and how."""
        if self.healthy is None:
            return Finding(kind="diverged")
        since = self.healthy.step
        most = max(
            _changes(self.healthy.sublayers, [_remembered(sublayer) for sublayer in sublayers]),
            key=lambda change: change.size,
        )
        if most.size < math.log(MOVED):
            return Finding(kind="diverged", since=since)
        return Finding(
            kind="diverged",
            sublayer=most.sublayer,
            measured=most.measured,
            before=most.before,
            now=most.now,
            since=since,
        )


def moved_sentence(event: Finding, name: Callable[[int], str]) -> str:
    """What `Divergence.moved` found, in words. name: what a sublayer is called."""
    if event.since is None:
        return "no earlier record of the sublayers to compare with"
    since = f"since step {event.since}"
    if event.sublayer is None or event.measured is None:
        return f"no sublayer moved by itself {since}: look at the embedding and the head"
    change = _MOVES[event.measured].format(event.before, event.now)
    return f"{name(event.sublayer)} moved most {since}: {change}"


def _remembered(sublayer: Measured) -> HealthySublayer:
    return HealthySublayer(
        sublayer=sublayer.sublayer,
        norm=sublayer.norm,
        angle_mean=sublayer.angle_mean,
        grad_norm=sublayer.grad_norm,
    )


@dataclass(frozen=True)
class _Change:
    """A measure of a sublayer before and now. size: the log of the change."""

    size: float
    sublayer: int
    measured: Moved
    before: float
    now: float


def _changes(before: Sequence[HealthySublayer], now: Sequence[HealthySublayer]) -> list[_Change]:
    """One change for every sublayer and measure.

    Each measure is the sublayer's own. The norm is divided by that of the sublayer before, because later sublayers
    inherit it. The gradient norm is divided by that of all sublayers, and only a rise counts: where one share
    rises, others fall.
    """
    changes: list[_Change] = []
    all_gradients = [math.hypot(*(_number(record.grad_norm) for record in records)) for records in (before, now)]
    for index, pair in enumerate(zip(before, now, strict=True)):
        number = pair[0].sublayer
        first, last = (_number(record.angle_mean) for record in pair)
        changes.append(_Change(abs(_log_ratio(first, last, LEAST_ANGLE)), number, "angle", first, last))
        first, last = (
            _number(record.grad_norm) / max(total, TINY) for record, total in zip(pair, all_gradients, strict=True)
        )
        changes.append(_Change(_log_ratio(first, last, LEAST_SHARE), number, "gradient share", first, last))
        if index:
            first, last = (
                _number(records[index].norm) / max(_number(records[index - 1].norm), TINY)
                for records in (before, now)
            )
            changes.append(_Change(abs(_log_ratio(first, last, TINY)), number, "norm factor", first, last))
    return changes


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _log_ratio(first: float, last: float, least: float) -> float:
    """log(last / first), with values below `least` raised to it; 0 if one is not finite."""
    if not (math.isfinite(first) and math.isfinite(last)):
        return 0.0
    return math.log(max(last, least) / max(first, least))
