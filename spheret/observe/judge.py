"""From losses and observations to events: what is wrong, where, and what helps.

`Judge` looks at the losses itself and applies the table of rules to observations. All that it remembers is a
`JudgeState`, which is part of a checkpoint: a training that continues is judged as if it had not stopped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from spheret.observe import plateau
from spheret.observe.records import Event, EventKind, Observation, SublayerObservation
from spheret.observe.rules import JUMPS, REMEDIES, RULES, SETTLED, Finding, Rule, sizes

# so many losses are remembered. One that is SPIKE_Z standard deviations above their mean counts as a spike
LOSSES, SPIKE_LEAST, SPIKE_Z = 64, 20, 5.0
# of so many, a spike is worth an alarm if it is this far above all of them on a logarithmic scale, where 1 is the
# distance of the highest from their upper quartile, and if it rises by this share of their median and of the first
JUDGED, CLEAR, SPIKE_FLOOR = 30, 0.75, 0.1
# divergence: the median of the last WINDOW losses is watched: the spike of a few batches does not change it
WINDOW = 20
# a median this share above the reference is a sign of divergence, because a collapsed model stays at the entropy
MARGIN = 0.1
# it must last this many updates, or this share of the run: a healthy run recovers from a spike
PATIENCE, PATIENCE_SHARE = 100, 0.02
# a run that explodes does not wait: FEW losses in a row, each HUGE times the reference
HUGE, FEW = 10.0, 5
# a loss that falls is compared with the losses around it: so many on either side
TREND = 5
# a loss that jumps less than JUMPS times does no harm where the gradient does not rise by this factor
RISES = 1.5
# in a spike, a place stands out if its gradient rose this many times more than most gradients
STANDS_OUT = 3.0


@dataclass(frozen=True, slots=True)
class Item:
    """A sublayer or another place with weights, in the order of the model.

    peers: the same for items of one kind in different layers; empty for one that has no others.
    modules: the names of the modules that it consists of, besides those that hold its weights.
    parameters: its weights, by name.
    runs: whether its modules are called in a forward pass.
    experts: how many experts it has.
    """

    name: str
    peers: str
    sublayer: int | None = None
    modules: tuple[str, ...] = ()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    runs: bool = True
    experts: int = 0

    @property
    def learns(self) -> bool:
        """Whether a gradient is expected in every step."""
        return self.runs and any(p.requires_grad for p in self.parameters.values())


@dataclass(slots=True)
class JudgeState:
    """What the judge remembers from step to step.

    Args:
        losses: the last LOSSES losses.
        spikes: how many spikes there were.
        first_losses: the first FEW losses.
        lowest: the lowest median of FEW losses.
        above_since: the step since which the loss is too high.
        diverged: the step at which the run diverged, and the reason.
        unsaid: whether no observation has said yet where it began.
        healthy_step: the last step at which the loss was normal and the sublayers were measured.
        healthy: what they measured there.
        entropy: the unigram entropy, given or estimated.
        suspected: whether the loss was on its plateau before the step at which that is looked at.
        plateau: the step, the mean loss and the largest cosine of the looks at the unigram entropy.
        raised: the kinds and places of the alarms so far.
        since: by kind and place, the step since which the condition of a rule has held.
        first_look: the step of the first observation.
        first_logits: the largest attention logits of the sublayers at the first look.
        updates: the relative updates of the items at the last observations.
        finite: whether the last step was.
        usual, sizes: the gradient norms of the items and the sizes of the branches when all was well.
        norms, highest_norm: the whole gradient norms at the last observations, and the highest so far.
        rate, highest_rate: the last learning rate and the highest so far, where the optimiser is known.
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
    entropy: float | None = None
    suspected: bool = False
    plateau: list[tuple[int, float, float]] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    since: dict[str, int] = field(default_factory=dict)
    first_look: int | None = None
    first_logits: list[float | None] = field(default_factory=list)
    updates: list[list[float | None]] = field(default_factory=list)
    finite: bool = True
    usual: list[float | None] = field(default_factory=list)
    sizes: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    highest_norm: float = 0.0
    rate: float | None = None
    highest_rate: float = 0.0

    @property
    def collapsed(self) -> bool:
        """Whether the alarm of a collapse was raised."""
        return any(key.startswith("collapsed") for key in self.raised)


def is_spike(losses: Sequence[float], value: float, level: float = 0.0, clear: float = CLEAR) -> bool:
    """Whether a loss is worth an alarm: far above all of the last ones on a logarithmic scale.

    The scale is asinh around their median, in units of their usual distance from it: it is linear for usual
    losses, and logarithmic in heavy tails, where one loss in many is ten times as high.

    level: a loss of the start.
    """
    if len(losses) < JUDGED:
        return False
    losses = _without_trend(losses)
    middle = statistics.median(losses)
    if value - middle < SPIKE_FLOOR * max(abs(middle), abs(level)):
        return False
    distances = [abs(each - middle) for each in losses]
    spread = max(statistics.median(distances) or statistics.fmean(distances), 1e-6 * abs(middle))
    if spread == 0:
        return False
    scaled = sorted(math.asinh((each - middle) / spread) for each in losses)
    quartile, highest = scaled[3 * len(scaled) // 4], scaled[-1]
    # the heavier the tail, the farther the next one may be
    margin = max((highest - quartile) * max(1.0, highest / 2), 0.5)
    return math.asinh((value - middle) / spread) > highest + clear * margin


def _without_trend(losses: Sequence[float]) -> list[float]:
    """The losses less the median of those around each, plus the last median. The first few have none before them."""
    level = statistics.median(losses[-2 * TREND - 1 :])
    # each without itself: where all fall, it is the median of those around it
    around = ([*losses[i - TREND : i], *losses[i + 1 : i + TREND + 1]] for i in range(TREND, len(losses)))
    return [loss - statistics.median(others) + level for loss, others in zip(losses[TREND:], around, strict=True)]


class Judge:
    """Judges what was seen. A rule speaks once per place, but what may pass is said each time.

    A loss diverges if it stays far above the higher of two references: `level`, the loss of a model that knows
    nothing of the input; and the lowest median of FEW losses so far, so that a slow run is not called diverged.

    Args:
        items: the sublayers first, in order, then the other places.
        unigram_entropy: the entropy of the token frequencies, in the unit of the loss, if it is known.
        level: the reference, and what it is; by default the unigram entropy or, if that is not known, the first
            losses. Nothing diverges if it is not positive, because ratios mean nothing then.
        warmup: updates before which a slow rise of the loss is not judged.
        steps: the steps of the whole run, if they are known: patience is a share of them.
        remedies: what helps, by kind, if it is not what the rules say.
        sensitivity: by what factor smaller deviations raise an alarm.
    """

    def __init__(
        self,
        items: Sequence[Item],
        unigram_entropy: float | None = None,
        level: tuple[float, str] | None = None,
        warmup: int = 0,
        steps: int = 0,
        remedies: Mapping[EventKind, str] | None = None,
        sensitivity: float = 1.0,
    ) -> None:
        self.items = list(items)
        self.given_entropy, self.given_level = unigram_entropy, level
        self.warmup, self.steps, self.sensitivity = warmup, steps, sensitivity
        self.remedies = {**REMEDIES, **(remedies or {})}
        self.patience = max(PATIENCE, round(PATIENCE_SHARE * steps))
        self.state = JudgeState(entropy=unigram_entropy)
        # whether the last loss was above what is normal, and whether the loss of this look is a usual one
        self._above, self.normal = False, True
        self.unmoved: Set[int] = set()

    def scaled(self, factor: float) -> float:
        """A factor that is worth an alarm, at this sensitivity."""
        return factor ** (1 / self.sensitivity)

    # losses

    def loss(self, step: int, value: float) -> bool:
        """Take one finite loss. Returns whether it is a spike that is worth an alarm."""
        state, level = self.state, self._level()
        first = statistics.median(state.first_losses) if state.first_losses else 0.0
        spike = is_spike(state.losses, value, first, CLEAR / self.sensitivity)
        if len(state.losses) >= SPIKE_LEAST:
            far = SPIKE_Z * max(statistics.pstdev(state.losses), 1e-6)
            state.spikes += value > statistics.fmean(state.losses) + far
        state.losses = [*state.losses[1 - LOSSES :], value]
        if len(state.first_losses) < FEW:
            state.first_losses.append(value)
        if level is not None and level[0] > 0 and self._diverges(step, *level):
            state.diverged, state.unsaid = step, True
        if (step + 1) % plateau.LOOK == 0:
            state.suspected = plateau.on_plateau(state.losses, state.entropy)
        return spike

    def _level(self) -> tuple[float, str] | None:
        if self.given_level is not None:
            return self.given_level
        if len(self.state.first_losses) < FEW:
            return None
        if self.given_entropy is not None:
            return self.given_entropy, "unigram entropy"
        return statistics.median(self.state.first_losses), "loss at the start"

    @property
    def is_normal(self) -> bool:
        """Whether the loss is not too high, as far as that is known."""
        return self._level() is not None and not self._above and self.state.diverged is None

    def _diverges(self, step: int, level: float, name: str) -> bool:
        """Whether the run diverges at this step. It does so once."""
        state = self.state
        losses = state.losses
        if state.lowest is None:
            state.lowest = losses[-1]
        reference = max(level, state.lowest)
        median, newest = statistics.median(losses[-WINDOW:]), statistics.median(losses[-FEW:])
        threshold = (1 + MARGIN / self.sensitivity) * reference
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
        """Whether the sublayers should be measured at this update, although it is not time."""
        state = self.state
        unknown = step == 2 and "no_gradient_at_all: the model" in state.since
        return state.unsaid or unknown or (step % plateau.LOOK == 0 and state.suspected and not state.collapsed)

    def note_plateau(self, step: int, cosine: float) -> None:
        """Remember a look at the plateau, at steps that do not depend on when else there are looks."""
        state = self.state
        if step % plateau.LOOK == 0:
            loss = statistics.fmean(state.losses[-plateau.LOOK :])
            state.plateau = plateau.remembered([*state.plateau, (step, loss, cosine)]) if state.suspected else []

    def rates(self, step: int, rate: float | None) -> list[Event]:
        """Take the largest learning rate of an update that is about to be made, if the optimiser is known."""
        if rate is None:
            return []
        state = self.state
        before, highest = state.rate, state.highest_rate
        state.rate, state.highest_rate = rate, max(highest, rate)
        if step <= SETTLED or before is None or rate <= self.scaled(JUMPS) * highest or highest == 0:
            return []
        text = f"the learning rate jumped from {before:.3g} to {rate:.3g}"
        return self._event("rate", step, "the model", text, before=before, now=rate)

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
        found = Finding(words={"detail": ""}) if observation is None else self.where_it_rose(observation)
        times, alike = value / usual if usual > 0 else 0.0, found.words.get("alike", 0.0)
        if 0 < alike < self.scaled(RISES) and times < self.scaled(JUMPS):
            # a hard batch, whose update is as long as any other
            return []
        # the gradient differs from step to step anyway, and more so on a larger scale
        same = alike > 0 and times > 1 and abs(math.log(alike / times)) < max(math.log(2), 0.15 * math.log(times))
        if times > self.scaled(JUMPS) and same:
            text = f"the loss and all gradients rose alike, {times:.3g} times: the loss scale, or the learning rate"
            return self._event("rate", step, "the model", text, before=usual, now=value)
        more: dict[str, Any] = {"measured": "loss", "before": usual, "now": value, **found.more}
        where = more.pop("where", "the model" if found.item is None else found.item.name)
        return self._event("spike", step, where, text + found.words["detail"], **more)

    def where_it_rose(self, observation: Observation) -> Finding:
        """The place that rose most since all was well, by the size of its branch or its gradient, or the batch."""
        state = self.state
        for what, now, usual in (
            ("output", sizes(observation), state.sizes),
            ("gradient", grad_norms(observation), state.usual),
        ):
            rises = {
                index: math.log(new / old)
                for index, (new, old) in enumerate(zip(now, usual, strict=False))
                # the gradient of a few scalars is noise
                if self.items[index].peers and new and old
            }
            if not rises:
                continue
            middle, most = statistics.median(rises.values()), max(rises, key=lambda index: rises[index])
            alike, times = math.exp(middle), math.exp(rises[most])
            if rises[most] > math.log(STANDS_OUT) + max(middle, 0.0):
                item = self.items[most]
                detail = f"; the {what} of {item.name} rose {times:.3g} times, at most places {alike:.3g} times"
                return Finding(item, {"detail": detail}, {"sublayer": item.sublayer})
            if what == "gradient":
                detail = f"; the gradient rose everywhere alike, {alike:.3g} times at most places: look at the batch"
                return Finding(None, {"detail": f"{detail} of this step", "alike": alike}, {"where": "the batch"})
        return Finding(words={"detail": ""})

    def not_finite(self, event: Event) -> list[Event]:
        """The event, unless the step before was not finite either."""
        was, self.state.finite = self.state.finite, False
        return [event] if was else []

    def observed(self, observation: Observation, normal: bool = True) -> list[Event]:
        """What the stream and the gradients of a step say. normal: whether the loss of this step was."""
        state, self.normal = self.state, normal
        if state.first_look is None:
            state.first_look = observation.step
        events = self._apply((rule for rule in RULES if rule.needs != "updates"), observation)
        if normal and not any(event.level == "alarm" for event in events):
            state.usual = grad_norms(observation)
            if any(size is not None for size in sizes(observation)):
                state.sizes = sizes(observation)
        return events

    def updated(self, observation: Observation, unmoved: Set[int]) -> list[Event]:
        """What the size of the updates says, after the optimiser's step. unmoved: the items that have not changed."""
        self.unmoved = unmoved
        return self._apply((rule for rule in RULES if rule.needs == "updates"), observation)

    def _apply(self, rules: Iterable[Rule], seen: Observation) -> list[Event]:
        state, events = self.state, list[Event]()
        streams = any(each.cosine is not None for each in seen.sublayers)
        for rule in rules:
            if (rule.needs == "stream" and not streams) or (rule.needs == "gradients" and seen.grad_norm is None):
                continue
            holds = set()
            for found in rule.find(self, seen):
                where = found.more.get("where") or ("the model" if found.item is None else found.item.name)
                key = f"{rule.find.__name__}: {where}"
                holds.add(key)
                since = state.since.setdefault(key, seen.step)
                if seen.step - since < rule.lasts or (rule.always and since != state.first_look):
                    continue
                name = "the model" if found.item is None else found.item.name
                sentence = rule.sentence.format(**{"name": name, "since": since, **found.words})
                more = {key: value for key, value in found.more.items() if key not in ("where", "step")}
                number = None if found.item is None else found.item.sublayer
                more = {"level": rule.level, "sublayer": number, **more}
                events += self._event(rule.kind, found.more.get("step", seen.step), where, sentence, **more)
            own = f"{rule.find.__name__}: "
            for key in [key for key in state.since if key.startswith(own) and key not in holds]:
                del state.since[key]
        return events


def grad_norms(observation: Observation) -> list[float | None]:
    """The gradient norms of the items."""
    return [each.grad_norm for each in observation.everywhere]
