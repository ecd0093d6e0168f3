"""From losses and observations to events: what is wrong, where, and what helps.

`Judge` calls pure functions over losses and records, and remembers a `JudgeState`, which is part of a checkpoint: a
training that continues is judged as if it had not stopped.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from spheret.observe.records import Event, EventKind, Measure, Observation, SublayerObservation
from spheret.observe.remedies import REMEDIES

# so many losses are remembered. A loss SPIKE_Z standard deviations above their mean counts as a spike. It is worth
# an alarm at ALARM_Z, if it is also SPIKE_CLEAR standard deviations above the highest of the last SPIKE_NEAR
LOSSES, SPIKE_LEAST, SPIKE_Z = 64, 20, 5.0
ALARM_Z, SPIKE_NEAR, SPIKE_CLEAR = 6.0, 20, 2.0

# a loss this close to the unigram entropy, as a share of it, means that the model knows only token frequencies
ENTROPY_MARGIN = 0.03
# the median of so many losses is compared, because one batch may be easier or harder than all
PLATEAU_WINDOW = 10
# a healthy run passes the unigram entropy within these updates; a collapsed one stays there. While it does, the
# sublayers are measured this often
COLLAPSE_UPDATES, COLLAPSE_LOOK = 20, 10
COLLAPSED_COSINE = 0.95
# at the start Pre-LN has 1.0, a spherical stream 2.0 at width 32 and 3.1 at width 64
HIGH_OWN_LOGIT = 1.5
# a stream of constant norm: by how much a sublayer may change it
CONSTANT = 0.02

# divergence: the median of the last WINDOW losses is watched: the spike of a few batches does not change it
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
LEAST_ANGLE, LEAST_SHARE, TINY = 0.01, 1e-3, 1e-30

# in a spike, a sublayer stands out if its gradient rose this many times more than most gradients
STANDS_OUT = 3.0
# at a watched step, a gradient norm this many times larger than the largest of the last ones is a spike, too, if
# there were enough of them
JUMPS, JUMP_LEAST = 5.0, 5
# a branch that moves no token by this share of its state does nothing, if that lasts this many updates
STILL, STILL_UPDATES = 1e-6, 20
# updates relative to the weights this many times larger than in the nearest layers, now and at this many looks
# before, explode: where a training comes to rest, the updates of single layers fall. Smaller ones do no harm
EXPLODES, REMEMBERED, HARMLESS = 10.0, 8, 3e-3
# an update is skipped if its loss or gradient norm is this many standard deviations above the mean of the last ones
LIMIT_WINDOW, LIMIT_LEAST, LIMIT_Z = 128, 32, 6.0

# what a sublayer did before and does now, by measure
_MOVES = {
    "angle": "it turned the stream by {:.2g} radians and now turns it by {:.2g}",
    "gradient share": "it had {:.1%} of the gradient norm and now has {:.1%}",
    "norm factor": "it multiplied the norm of the stream by {:.3g} and now by {:.3g}",
}


@dataclass(frozen=True, slots=True)
class Item:
    """A sublayer or another place with weights, in the order of the model.

    peers: the same for items of one kind in different layers; empty for one that has no others.
    modules: the names of the modules that it consists of, besides those that hold its weights.
    parameters: its weights, by name.
    """

    name: str
    peers: str
    sublayer: int | None = None
    modules: tuple[str, ...] = ()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class JudgeState:
    """What the judge remembers from step to step.

    Args:
        losses: the last LOSSES losses.
        spikes: how many spikes there were.
        first_losses: the first FEW losses, if they are the reference of divergence.
        lowest: the lowest median of FEW losses.
        above_since: the step since which the loss is too high.
        diverged: the step at which the run diverged, and the reason.
        unsaid: whether no observation has said yet where it began.
        healthy_step: the last step at which the loss was normal and the sublayers were measured.
        healthy: what they measured there.
        collapsed: whether a collapse was reported.
        entropy: the unigram entropy, given or estimated.
        raised: the kinds and places of the alarms so far.
        still_since: by the number of a sublayer as text, since which step its branch has moved no token.
        updates: the relative updates of the items at the last observations.
        finite: whether the last step was.
        usual: the gradient norms of the items at the last step at which all was well.
        norms: the whole gradient norms at the last observations.
        loss_limits, norm_limits: the losses and the gradient norms of the last steps, for a watch that skips updates.
    """

    losses: list[float] = field(default_factory=list)
    spikes: int = 0
    first_losses: list[float] = field(default_factory=list)
    lowest: float | None = None
    above_since: int | None = None
    diverged: int | None = None
    reason: str = ""
    unsaid: bool = False
    healthy_step: int | None = None
    healthy: list[SublayerObservation] = field(default_factory=list)
    collapsed: bool = False
    entropy: float | None = None
    raised: list[str] = field(default_factory=list)
    still_since: dict[str, int] = field(default_factory=dict)
    updates: list[list[float | None]] = field(default_factory=list)
    finite: bool = True
    usual: list[float | None] | None = None
    norms: list[float] = field(default_factory=list)
    loss_limits: list[float] = field(default_factory=list)
    norm_limits: list[float] = field(default_factory=list)


def is_outlier(values: Sequence[float], value: float, least: int, z: float, smallest: float = 0.0) -> bool:
    """Whether a value is `z` standard deviations above the mean of at least `least` values.

    smallest: a standard deviation that is smaller is taken to be this.
    """
    if len(values) < least:
        return False
    return value > statistics.fmean(values) + z * max(statistics.pstdev(values), smallest)


def is_spike(losses: Sequence[float], value: float) -> bool:
    """Whether a loss is worth an alarm: far above the mean of the last ones and above all that were near."""
    smallest = 1e-6 * abs(statistics.fmean(losses)) if losses else 0.0
    if not is_outlier(losses, value, SPIKE_LEAST, ALARM_Z, smallest):
        return False
    return value > max(losses[-SPIKE_NEAR:]) + SPIKE_CLEAR * max(statistics.pstdev(losses), smallest)


def on_plateau(losses: Sequence[float], unigram_entropy: float) -> bool:
    """Whether the median of the last PLATEAU_WINDOW losses, the newest last, lies at the unigram entropy."""
    if len(losses) < PLATEAU_WINDOW:
        return False
    return abs(statistics.median(losses[-PLATEAU_WINDOW:]) - unigram_entropy) < ENTROPY_MARGIN * unigram_entropy


def stays_on_plateau(losses: Sequence[float], unigram_entropy: float | None) -> bool:
    """Whether the loss was at the unigram entropy at each of the last COLLAPSE_UPDATES updates."""
    if unigram_entropy is None or len(losses) < COLLAPSE_UPDATES:
        return False
    return all(on_plateau(losses[: len(losses) - ago], unigram_entropy) for ago in range(COLLAPSE_UPDATES))


def most_alike(sublayers: Sequence[SublayerObservation]) -> SublayerObservation | None:
    """The sublayer behind which the tokens are most alike."""
    known = [each for each in sublayers if each.cosine is not None]
    return max(known, key=lambda each: each.cosine or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class Change:
    """A measure of a sublayer before and now. size: the logarithm of the change."""

    size: float
    sublayer: int
    measured: Measure
    before: float
    now: float


def changes(before: Sequence[SublayerObservation], now: Sequence[SublayerObservation]) -> list[Change]:
    """One change for every sublayer and measure.

    Each measure is the sublayer's own. The norm is divided by the previous sublayer's, because later sublayers
    inherit it. The gradient norm is divided by the norm over all sublayers, and only a rise counts: where one share
    rises, others fall.
    """
    found: list[Change] = []
    all_gradients = [math.hypot(*(_number(record.grad_norm) for record in records)) for records in (before, now)]
    for index, pair in enumerate(zip(before, now, strict=True)):
        number = pair[0].sublayer
        first, last = (_number(record.angle_mean) for record in pair)
        found.append(Change(abs(_log_ratio(first, last, LEAST_ANGLE)), number, "angle", first, last))
        first, last = (
            _number(record.grad_norm) / max(total, TINY) for record, total in zip(pair, all_gradients, strict=True)
        )
        found.append(Change(_log_ratio(first, last, LEAST_SHARE), number, "gradient share", first, last))
        if index:
            first, last = (
                _number(records[index].norm) / max(_number(records[index - 1].norm), TINY)
                for records in (before, now)
            )
            found.append(Change(abs(_log_ratio(first, last, TINY)), number, "norm factor", first, last))
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _log_ratio(first: float, last: float, least: float) -> float:
    """log(last / first), with values below `least` raised to it; 0 if one is not finite."""
    if not (math.isfinite(first) and math.isfinite(last)):
        return 0.0
    return math.log(max(last, least) / max(first, least))


def outgrown(updates: Sequence[Sequence[float | None]], indices: Sequence[int]) -> list[tuple[int, float, float]]:
    """Which of the items of one kind have updates far beyond the two nearest: index, usual update, update.

    updates: of all items, at the last observations, the newest last.
    """
    found = []
    for place, index in enumerate(indices):
        near = sorted((i for i in range(len(indices)) if i != place), key=lambda i: abs(i - place))[:2]
        now = updates[-1][index]
        if len(near) < 2 or now is None:
            continue
        usual = max(past[indices[i]] or 0.0 for past in updates for i in near)
        if now > max(EXPLODES * usual, HARMLESS) and usual > 0:
            found.append((index, usual, now))
    return found


def grad_norms(observation: Observation) -> list[float | None]:
    """The gradient norms of the items."""
    return [each.grad_norm for each in observation.everywhere]


class Judge:
    """Judges what was seen. Every kind of alarm is raised once per place, but what may pass is raised each time.

    A loss diverges if it stays far above the higher of two references: `level`, the loss of a model that knows
    nothing of the input; and the lowest median of FEW losses so far, so that a slow run is not called diverged.

    Args:
        items: the sublayers first, in order, then the other places.
        unigram_entropy: the entropy of the token frequencies, in the unit of the loss, if it is known.
        level: the reference, and what it is; by default the unigram entropy or, if that is not known, the first
            losses. Nothing diverges if it is not positive, because ratios mean nothing then.
        warmup: updates before which a slow rise of the loss is not judged.
        steps: the steps of the whole run, if they are known: patience is a share of them.
        remedies: what helps, by kind.
    """

    def __init__(
        self,
        items: Sequence[Item],
        unigram_entropy: float | None = None,
        level: tuple[float, str] | None = None,
        warmup: int = 0,
        steps: int = 0,
        remedies: Mapping[EventKind, str] = REMEDIES,
    ) -> None:
        self.items = list(items)
        self.given_entropy, self.given_level = unigram_entropy, level
        self.warmup, self.steps, self.remedies = warmup, steps, remedies
        self.patience = max(PATIENCE, round(PATIENCE_SHARE * steps))
        self.state = JudgeState(entropy=unigram_entropy)
        # whether the last loss was above what is normal
        self._above = False

    def name(self, sublayer: int) -> str:
        return self.items[sublayer - 1].name

    # losses

    def loss(self, step: int, value: float) -> bool:
        """Take one finite loss. Returns whether it is a spike that is worth an alarm."""
        state = self.state
        spike = is_spike(state.losses, value)
        state.spikes += is_outlier(state.losses, value, SPIKE_LEAST, SPIKE_Z, 1e-6)
        state.losses = [*state.losses[1 - LOSSES :], value]
        level = self._level()
        if level is None:
            state.first_losses.append(value)
        elif level[0] > 0 and self._diverges(step, *level):
            state.diverged, state.unsaid = step, True
        return spike

    def _level(self) -> tuple[float, str] | None:
        if self.given_level is not None:
            return self.given_level
        if len(self.state.first_losses) < FEW:
            return None
        if self.given_entropy is not None:
            return self.given_entropy, "unigram entropy"
        return statistics.median(self.state.first_losses), "loss at the start"

    def _diverges(self, step: int, level: float, name: str) -> bool:
        """Whether the run diverges at this step. It does so once."""
        state = self.state
        losses = state.losses
        if state.lowest is None:
            state.lowest = losses[-1]
        reference = max(level, state.lowest)
        median, newest = statistics.median(losses[-WINDOW:]), statistics.median(losses[-FEW:])
        threshold = (1 + MARGIN) * reference
        # where the loss falls fast, the median of many is still high
        self._above = min(median, newest) > threshold
        # of few losses, because a run may learn for a short time before it diverges
        if len(losses) >= FEW:
            state.lowest = min(state.lowest, newest)
        if not (median > threshold and len(losses) >= WINDOW and step > self.warmup):
            state.above_since = None
        elif state.above_since is None:
            state.above_since = step
        if state.diverged is not None:
            return False
        against = f"the {name}, {level:.3f}"
        if reference > level:
            against = f"its lowest so far, {reference:.3f}, and {against}"
        smallest, since = min(losses[-FEW:]), state.above_since
        if len(losses) >= FEW and smallest > HUGE * reference:
            state.reason = f"the loss was at least {smallest:.4g} for {FEW} updates, {HUGE:g} times {against}"
        elif since is not None and (step - since >= self.patience or (step == self.steps and self._above)):
            lasted = f"for {step - since} updates" if step > since else "at the last update"
            state.reason = (
                f"the loss {median:.4g}, the median of {WINDOW} updates, is more than {MARGIN:.0%} above {against}; "
                f"it was so {lasted}"
            )
        else:
            return False
        return True

    def wants_a_look(self, step: int) -> bool:
        """Whether the sublayers should be measured after this update or at the next one, although it is not time."""
        suspects = not self.state.collapsed and step % COLLAPSE_LOOK == 0
        return self.state.unsaid or (suspects and stays_on_plateau(self.state.losses, self.state.entropy))

    def beyond_limits(self, loss: float, grad_norm: float) -> bool:
        """Take the loss and the gradient norm of a step, and say whether an update should be skipped for one."""
        state, beyond = self.state, False
        for values, value in ((state.loss_limits, loss), (state.norm_limits, grad_norm)):
            beyond |= not math.isfinite(value) or is_outlier(values, value, LIMIT_LEAST, LIMIT_Z)
            if math.isfinite(value):
                values[:] = [*values[1 - LIMIT_WINDOW :], value]
        return beyond

    # events

    def _event(self, kind: EventKind, step: int, where: str, sentence: str, **more: Any) -> list[Event]:
        """The event, unless its kind was raised there before. more: fields of `Event`."""
        key = f"{kind}: {where}"
        if kind not in ("spike", "not finite"):
            if key in self.state.raised:
                return []
            self.state.raised.append(key)
        return [Event(kind, step, where, sentence, self.remedies[kind], **more)]

    def spike(self, step: int, value: float, observation: Observation | None) -> list[Event]:
        """A spike of the loss, and where its gradient rose most. observation: of the same step, if there is one."""
        usual = statistics.median(self.state.losses)
        text = f"the loss jumped to {value:.4g}, where {usual:.4g} is usual"
        where, sublayer, detail = self._where_it_rose(observation)
        more = {"sublayer": sublayer, "measured": "loss", "before": usual, "now": value}
        return self._event("spike", step, where, text + detail, **more)

    def _where_it_rose(self, observation: Observation | None) -> tuple[str, int | None, str]:
        """The place whose gradient rose most, or the batch if all rose alike; its number; and this in words."""
        rises = {} if observation is None else self._rises(observation)
        if not rises:
            return "the model", None, ""
        middle = statistics.median(rises.values())
        most = max(rises, key=lambda index: rises[index])
        if rises[most] > math.log(STANDS_OUT) + max(middle, 0.0):
            item = self.items[most]
            usual = f"at most places {math.exp(middle):.3g} times"
            detail = f"; the gradient of {item.name} rose {math.exp(rises[most]):.3g} times, {usual}"
            return item.name, item.sublayer, detail
        alike = f"; the gradient rose everywhere alike, {math.exp(middle):.3g} times at most places"
        return "the batch", None, f"{alike}: look at the batch of this step"

    def _rises(self, observation: Observation) -> dict[int, float]:
        """By how much, in logarithms, the gradient norm of each item rose since all was well."""
        usual = self.state.usual or [None] * len(self.items)
        return {
            index: math.log(now / before)
            for index, (now, before) in enumerate(zip(grad_norms(observation), usual, strict=True))
            # the gradient of a few scalars is noise
            if self.items[index].peers and now and before
        }

    def finite(self) -> None:
        """The loss and the gradient of a step were finite."""
        self.state.finite = True

    def not_finite(self, event: Event) -> list[Event]:
        """The event, unless the step before was not finite either."""
        was, self.state.finite = self.state.finite, False
        return [event] if was else []

    def observed(self, observation: Observation, entropy: float | None = None, normal: bool = True) -> list[Event]:
        """What the stream and the gradients of a step say.

        entropy: the entropy of the tokens seen so far, if none was given. normal: whether the loss of this step was.
        """
        state = self.state
        if self.given_entropy is None:
            state.entropy = entropy
        events = self._head(observation) + self._dead(observation)
        # the spike of a loss is said already
        events += self._gradient(observation) if normal else []
        if any(each.cosine is not None for each in observation.sublayers):
            events += self._collapse(observation)
            events += self._divergence(observation)
        elif state.unsaid:
            state.unsaid = False
            events += self._event("diverged", state.diverged or observation.step, "the model", state.reason)
        if normal and not events:
            state.usual = grad_norms(observation)
        return events

    def _head(self, observation: Observation) -> list[Event]:
        own = observation.own_logit
        growth = [each.growth for each in observation.sublayers]
        constant = bool(growth) and all(each is not None and abs(each - 1) < CONSTANT for each in growth)
        if own is None or own < HIGH_OWN_LOGIT or not constant:
            return []
        sentence = (
            "the head is the transposed embedding, and the stream keeps its norm: the model starts by predicting the "
            f"current token, whose logit is {own:.2f} above the mean. Training may collapse"
        )
        return self._event("head", observation.step, "the head", sentence, level="warning", now=own)

    def _dead(self, observation: Observation) -> list[Event]:
        events, still = [], self.state.still_since
        for each in observation.sublayers:
            if each.moved_max is None or each.moved_max >= STILL:
                still.pop(str(each.sublayer), None)
                continue
            since = still.setdefault(str(each.sublayer), observation.step)
            if observation.step - since >= STILL_UPDATES:
                name = self.name(each.sublayer)
                sentence = f"{name} does nothing: since step {since} its branch has moved no token of the stream"
                more = {"sublayer": each.sublayer, "now": each.moved_max}
                events += self._event("dead", observation.step, name, sentence, **more)
        return events

    def _gradient(self, observation: Observation) -> list[Event]:
        """A gradient norm far beyond the last looks."""
        now, last = observation.grad_norm, self.state.norms
        if now is None or not math.isfinite(now):
            return []
        self.state.norms = [*last[1 - REMEMBERED :], now]
        if len(last) < JUMP_LEAST or now <= JUMPS * max(last):
            return []
        where, sublayer, detail = self._where_it_rose(observation)
        text = f"the gradient norm jumped to {now:.3g}, where at most {max(last):.3g} was seen lately{detail}"
        more = {"sublayer": sublayer, "measured": "gradient", "before": max(last), "now": now}
        return self._event("spike", observation.step, where, text, **more)

    def _collapse(self, observation: Observation) -> list[Event]:
        """The alarm, once: all states share one direction and the loss stays at the unigram entropy."""
        state, worst = self.state, most_alike(observation.sublayers)
        stays = stays_on_plateau(state.losses, state.entropy)
        if worst is None or worst.cosine is None or worst.cosine < COLLAPSED_COSINE or state.collapsed or not stays:
            return []
        state.collapsed = True
        where, recent = self.name(worst.sublayer), statistics.fmean(state.losses[-COLLAPSE_UPDATES:])
        sentence = (
            f"token collapse: after {where} the states of different tokens have a mean cosine of "
            f"{worst.cosine:.3f}, and the loss {recent:.3f} stays at the unigram entropy {state.entropy:.3f}"
        )
        more = {"sublayer": worst.sublayer, "measured": "cosine", "now": worst.cosine}
        return self._event("collapsed", observation.step, where, sentence, **more)

    def _divergence(self, observation: Observation) -> list[Event]:
        """Where a divergence began. While there is none, the sublayers are remembered for comparison."""
        state, sublayers = self.state, observation.sublayers
        if not state.unsaid:
            if self._level() is not None and not self._above and state.diverged is None:
                state.healthy = [
                    SublayerObservation(
                        each.sublayer, norm=each.norm, angle_mean=each.angle_mean, grad_norm=each.grad_norm
                    )
                    for each in sublayers
                ]
                state.healthy_step = observation.step
            return []
        state.unsaid = False
        where, more, since = "the model", dict[str, Any](), state.healthy_step
        if since is None:
            detail = "no earlier record of the sublayers to compare with"
        else:
            most = max(changes(state.healthy, sublayers), key=lambda change: change.size)
            more = {"since": since}
            detail = f"no sublayer moved by itself since step {since}: look at the embedding and the head"
            if most.size >= math.log(MOVED):
                where = self.name(most.sublayer)
                more |= {key: getattr(most, key) for key in ("sublayer", "measured", "before", "now")}
                change = _MOVES[most.measured].format(most.before, most.now)
                detail = f"{where} moved most since step {since}: {change}"
        step = state.diverged or observation.step
        return self._event("diverged", step, where, f"{state.reason}; {detail}", **more)

    def updated(self, observation: Observation) -> list[Event]:
        """What the size of the updates says, after the optimiser's step."""
        updates = [each.update for each in observation.everywhere]
        events: list[Event] = []
        self.state.updates = [*self.state.updates[1 - REMEMBERED :], updates]
        kinds: dict[str, list[int]] = defaultdict(list)
        for index, item in enumerate(self.items):
            if item.peers and updates[index] is not None:
                kinds[item.peers].append(index)
        for indices in kinds.values():
            for index, usual, now in outgrown(self.state.updates, indices):
                item = self.items[index]
                sentence = (
                    f"the update of {item.name} is {now:.2g} of its weights, {now / usual:.3g} times the update "
                    "of the same place in the layers beside it"
                )
                more = {"sublayer": item.sublayer, "measured": "update", "before": usual, "now": now}
                events += self._event("exploding", observation.step, item.name, sentence, **more)
        return events
