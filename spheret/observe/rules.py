"""The alarms, as one table: the kind, the condition at a watched step, the sentence, what helps."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from spheret.observe.plateau import ALIKE, STUCK_COSINE, is_stuck, lately
from spheret.observe.records import (
    EventKind,
    Level,
    Measure,
    Observation,
    PlaceObservation,
    SublayerObservation,
)  # fmt: skip

if TYPE_CHECKING:
    from spheret.observe.judge import Item, Judge

# at the start Pre-LN has 1.0, a spherical stream 2.0 at width 32 and 3.1 at width 64
HIGH_OWN_LOGIT = 1.5
# what token frequencies that the stream has to carry are worth, in nats; of bytes of English it is 2.5
HIGH_FREQUENCIES = 0.5
# a stream of constant norm: by how much a sublayer may change it
CONSTANT = 0.02
# a sublayer stands out in a divergence if one of its measures changed by this factor
MOVED = 2.0
# a branch that moves no token by this share of its state does nothing
STILL = 1e-6
# outputs with a common part this many times larger than their differences are the same for all tokens
SAME = 1e3
# at the start a branch's output may be this many times as long as at the same place in the layers beside it
GROWS = 8.0
# largest logits of attention that harm no training, and by what factor they must have risen
LOGIT, LOGIT_RISES = 100.0, 4.0
# updates relative to the weights this many times larger than in the nearest layers, now and at this many looks
# before, explode: where a training comes to rest, the updates of single layers fall. Smaller ones do no harm
EXPLODES, REMEMBERED, HARMLESS = 10.0, 8, 3e-3
# all updates at once become larger by this factor, after so many updates
JUMPS, SETTLED = 5.0, 20
# an update of this size relative to its weights leaves nothing of them
HUGE = 3.0
# an item with a smaller share of the gradient may be left where it is by rounding
SEEN = 1e-4
# an update that shortens most weights by this share halves them within 175 updates
SHRINKS = 4e-3
# at a watched step, a gradient norm this many times larger than the largest of so many others is a spike, too
GRADIENT_JUMPS, JUMP_LEAST = 5.0, 5
# updates for which what may pass must last, and what may be so by chance
LASTS, HOLDS = 20, 9
# smaller angles and shares of the gradient are noise
LEAST_ANGLE, LEAST_SHARE, TINY = 0.01, 1e-3, 1e-30
# what a sublayer did before and does now, by measure
_SENTENCES = {
    "angle": "it turned the stream by {:.2g} radians and now turns it by {:.2g}",
    "gradient share": "it had {:.1%} of the gradient norm and now has {:.1%}",
    "norm factor": "it multiplied the norm of the stream by {:.3g} and now by {:.3g}",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition holds at an item, or in the model as a whole.

    words: what the sentence says. more: fields of `Event`.
    """

    item: Item | None = None
    words: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


Condition = Callable[["Judge", Observation], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of alarm.

    Args:
        kind: its kind.
        find: where it holds at a watched step.
        sentence: what is said, with {name} and {since} and the words of the finding.
        remedy: what helps.
        needs: what must have been measured: the stream, the gradients or the updates.
        lasts: it must hold at every look for so many updates.
        always: it must have held since the first look.
    """

    kind: EventKind
    find: Condition
    sentence: str
    remedy: str
    needs: Literal["stream", "gradients", "updates", ""] = ""
    lasts: int = 0
    always: bool = False
    level: Level = "alarm"


def _pairs(judge: Judge, seen: Observation) -> Iterator[tuple[Item, SublayerObservation | PlaceObservation]]:
    return zip(judge.items, seen.everywhere, strict=True)


def _sublayers(judge: Judge, seen: Observation) -> Iterator[tuple[Item, SublayerObservation]]:
    return zip(judge.items, seen.sublayers, strict=False)


def _nearest(judge: Judge, values: Sequence[float | None]) -> Iterator[tuple[int, float, float]]:
    """Of every item with peers: its index, the larger value of the two nearest peers, and its own."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(judge.items[: len(values)]):
        if item.peers and values[index] is not None:
            kinds[item.peers].append(index)
    for indices in kinds.values():
        for place, index in enumerate(indices):
            near = sorted((i for i in range(len(indices)) if i != place), key=lambda i: abs(i - place))[:2]
            if len(near) == 2:
                yield index, max(values[indices[i]] or 0.0 for i in near), values[index] or 0.0


def start_warning(own_logit: float | None, frequencies: float = 0.0) -> str | None:
    """Why a stream of constant norm may collapse, as it is known before the first update; None if it need not.

    own_logit: the logit of the current token above the mean, if the head is the transposed embedding.
    frequencies: what the token frequencies are worth, in nats, if the head does not know them.
    """
    reasons = []
    if own_logit is not None and own_logit >= HIGH_OWN_LOGIT:
        reasons.append(
            "the model starts by predicting the current token, because its head is the transposed embedding: the "
            f"token's own logit is {own_logit:.1f} above the mean"
        )
    if frequencies >= HIGH_FREQUENCIES:
        reasons.append(
            f"the stream has to carry the token frequencies, which are worth {frequencies:.2f} nats, because the "
            "head has no bias that starts at them"
        )
    if not reasons:
        return None
    return (
        f"{'; and '.join(reasons)}. Training then moves all tokens in one direction first, and a stream of constant "
        "norm may stay collapsed there"
    )


def copying_head(judge: Judge, seen: Observation) -> Iterator[Finding]:
    growth = [each.growth for each in seen.sublayers]
    constant = bool(growth) and all(each is not None and abs(each - 1) < CONSTANT for each in growth)
    if constant and (text := start_warning(seen.own_logit)) is not None:
        yield Finding(words={"text": text}, more={"where": "the head", "now": seen.own_logit})


def not_zeroed(judge: Judge, seen: Observation) -> Iterator[Finding]:
    if not seen.zeroed:
        yield Finding()


def no_gradient_at_all(judge: Judge, seen: Observation) -> Iterator[Finding]:
    if seen.grad_norm == 0:
        yield Finding()


def no_gradient(judge: Judge, seen: Observation) -> Iterator[Finding]:
    if seen.grad_norm and math.isfinite(seen.grad_norm):
        for item, each in _pairs(judge, seen):
            if item.learns and not each.grad_norm:
                yield Finding(item)


def growth(judge: Judge, seen: Observation) -> Iterator[Finding]:
    """A branch whose output is far longer than those beside it, at the start or all at once."""
    before, factor = judge.state.sizes, judge.scaled(GROWS)
    # the place that stands out most is said first: what it does to the stream may show in others
    for index, usual, now in sorted(_nearest(judge, sizes(seen)), key=lambda each: -each[2] / (each[1] or 1.0)):
        jumped = bool(before) and now > factor * (before[index] or math.inf)
        if now > factor * usual > 0 and (seen.step == 1 or jumped):
            more = {"measured": "size", "before": usual, "now": now}
            yield Finding(judge.items[index], {"times": now / usual}, more)


def still(judge: Judge, seen: Observation) -> Iterator[Finding]:
    for item, each in _sublayers(judge, seen):
        if each.moved_max is not None and each.moved_max < STILL:
            yield Finding(item, more={"now": each.moved_max})


def same_for_all(judge: Judge, seen: Observation) -> Iterator[Finding]:
    """The output of a branch is one vector, though the tokens differ."""
    for item, each in _sublayers(judge, seen):
        common, stream = each.common_output, each.common_stream
        if common is not None and common > SAME and stream is not None and stream < SAME / 10:
            yield Finding(item)


def attention_logits(judge: Judge, seen: Observation) -> Iterator[Finding]:
    logits = [each.attention_logit for each in seen.sublayers]
    first = judge.state.first_logits
    if not first:
        first[:] = logits
    for (item, each), start in zip(_sublayers(judge, seen), first, strict=True):
        now, before = each.attention_logit, max(start or 0.0, 1.0)
        if now is not None and now > max(judge.scaled(LOGIT), LOGIT_RISES * before):
            more = {"measured": "attention logit", "before": before, "now": now}
            yield Finding(item, {"now": now, "before": before}, more)


def few_experts(judge: Judge, seen: Observation) -> Iterator[Finding]:
    for item, each in _pairs(judge, seen):
        if each.experts and item.experts > 2 and each.experts <= max(1, item.experts // 4):
            yield Finding(item, {"few": each.experts, "all": item.experts})


@dataclass(frozen=True, slots=True)
class Change:
    """A measure of a sublayer before and now. size: the logarithm of the change."""

    size: float
    sublayer: int
    measured: Measure
    before: float
    now: float

    @property
    def sentence(self) -> str:
        return _SENTENCES[self.measured].format(self.before, self.now)


def changes(before: Sequence[SublayerObservation], now: Sequence[SublayerObservation]) -> list[Change]:
    """One change for every sublayer and measure.

    Each measure is the sublayer's own. The norm is divided by that of the sublayer before, because later sublayers
    inherit it. The gradient norm is divided by that of all sublayers, and only a rise counts: where one share
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


def diverged(judge: Judge, seen: Observation) -> Iterator[Finding]:
    """The loss has diverged: where that began. While it has not, the sublayers are remembered for comparison."""
    state, sublayers = judge.state, seen.sublayers
    measured = any(each.cosine is not None for each in sublayers)
    if not state.unsaid:
        if measured and judge.is_normal:
            state.healthy = [
                SublayerObservation(s.sublayer, norm=s.norm, angle_mean=s.angle_mean, grad_norm=s.grad_norm)
                for s in sublayers
            ]
            state.healthy_step = seen.step
        return
    state.unsaid = False
    item, more, since = None, dict[str, Any](), state.healthy_step
    if not measured or since is None:
        detail = "no earlier record of the sublayers to compare with"
    else:
        most = max(changes(state.healthy, sublayers), key=lambda change: change.size)
        more = {"since": since}
        detail = f"no sublayer moved by itself since step {since}: look at the embedding and the head"
        if most.size >= math.log(MOVED):
            item = judge.items[most.sublayer - 1]
            more |= {key: getattr(most, key) for key in ("measured", "before", "now")}
            detail = f"{item.name} moved most since step {since}: {most.sentence}"
    yield Finding(item, {"reason": state.reason, "detail": detail}, {**more, "step": state.diverged or seen.step})


def _most_alike(seen: Observation) -> SublayerObservation | None:
    """The sublayer behind which the tokens are most alike."""
    known = [each for each in seen.sublayers if each.cosine is not None]
    return max(known, key=lambda each: each.cosine or 0.0, default=None)


def collapsed(judge: Judge, seen: Observation) -> Iterator[Finding]:
    """All states share one direction, and neither they nor the loss at the unigram entropy have moved for long."""
    worst = _most_alike(seen)
    if worst is None or worst.cosine is None:
        return
    if worst.cosine >= STUCK_COSINE and is_stuck(judge.state.plateau):
        words = {"cosine": worst.cosine, "loss": judge.state.plateau[-1][1], "entropy": judge.state.entropy}
        more = {"measured": "cosine", "now": worst.cosine}
        yield Finding(judge.items[worst.sublayer - 1], {**words, "first": int(judge.state.plateau[0][0])}, more)


def on_the_plateau(judge: Judge, seen: Observation) -> Iterator[Finding]:
    """As long as for an alarm, but something still moves."""
    worst = _most_alike(seen)
    if worst is not None and worst.cosine is not None:
        judge.note_plateau(seen.step, worst.cosine)
        looks = judge.state.plateau
        if worst.cosine >= ALIKE and lately(looks) and not is_stuck(looks):
            yield Finding(words={"cosine": worst.cosine, "entropy": judge.state.entropy})


def gradient_jump(judge: Judge, seen: Observation) -> Iterator[Finding]:
    """A gradient norm far beyond its values at the last looks, and above all before."""
    now, last, state = seen.grad_norm, judge.state.norms, judge.state
    if now is None or not math.isfinite(now):
        return
    state.norms = [*last[1 - REMEMBERED :], now]
    highest, state.highest_norm = state.highest_norm, max(state.highest_norm, now)
    if judge.normal and len(last) >= JUMP_LEAST and now > highest:
        usual = max(last)
        # gradients that differ by orders of magnitude anyway may differ by one more
        spread = usual / max(statistics.median(last), 1e-30)
        if now > usual * max(judge.scaled(GRADIENT_JUMPS), spread**2):
            found = judge.where_it_rose(seen)
            words = {"now": now, "usual": usual, "detail": found.words["detail"]}
            yield Finding(found.item, words, {"measured": "gradient", "before": usual, "now": now, **found.more})


def outgrown(judge: Judge, seen: Observation) -> Iterator[Finding]:
    """The update of an item is far beyond the updates of the two nearest of its kind, now and at the looks before."""
    past = judge.state.updates
    past[:] = [*past[1 - REMEMBERED :], [each.update for each in seen.everywhere]]
    highest = [max((look[index] or 0.0 for look in past), default=0.0) for index in range(len(judge.items))]
    for index, _, _ in _nearest(judge, past[-1]):
        now = past[-1][index] or 0.0
        usual = next(most for place, most, _ in _nearest(judge, highest) if place == index)
        if now > max(judge.scaled(EXPLODES) * usual, HARMLESS) and usual > 0:
            more = {"measured": "update", "before": usual, "now": now}
            yield Finding(judge.items[index], {"now": now, "times": now / usual}, more)


def all_updates_jump(judge: Judge, seen: Observation) -> Iterator[Finding]:
    """Every update is far beyond those at the looks before, where no optimiser says its learning rate."""
    *past, last = judge.state.updates
    rises = [
        now / max(look[index] or 0.0 for look in past)
        for index, now in enumerate(last)
        if now and len(past) > 1 and any(look[index] for look in past)
    ]
    if seen.rate is None and seen.step > SETTLED and rises and min(rises) > judge.scaled(JUMPS):
        yield Finding(words={"times": statistics.median(rises)})


def huge_updates(judge: Judge, seen: Observation) -> Iterator[Finding]:
    updates = [each.update for each in seen.everywhere if each.update is not None]
    if updates and statistics.median(updates) > judge.scaled(HUGE):
        yield Finding(words={"size": statistics.median(updates)})


def _without_update(judge: Judge, seen: Observation) -> tuple[list[Item], int]:
    """The items with a gradient that no update has changed, and how many have a gradient."""
    least, held = SEEN * (seen.grad_norm or 0.0), set(seen.on_bound)
    learning = [
        index
        for index, (item, each) in enumerate(_pairs(judge, seen))
        if item.learns
        and each.grad_norm is not None
        and each.grad_norm > least
        # a scalar that is kept on its bound cannot move beyond it
        and not item.parameters.keys() <= held
    ]
    return [judge.items[index] for index in learning if index in judge.unmoved], len(learning)


def no_update(judge: Judge, seen: Observation) -> Iterator[Finding]:
    items, learning = _without_update(judge, seen)
    # who fine-tunes only a head leaves out the rest on purpose
    if 2 * len(items) <= learning:
        yield from map(Finding, items)


def no_update_at_all(judge: Judge, seen: Observation) -> Iterator[Finding]:
    items, learning = _without_update(judge, seen)
    if items and len(items) == learning:
        yield Finding()


def decays(judge: Judge, seen: Observation) -> Iterator[Finding]:
    shares = [each.shrunk for each in seen.everywhere if each.shrunk is not None]
    if shares and statistics.median(shares) > judge.scaled(SHRINKS):
        yield Finding(words={"share": statistics.median(shares)})


def sizes(seen: Observation) -> list[float | None]:
    """How long the output of each branch is."""
    return [each.size for each in seen.sublayers]


def collapse_remedy(tied: bool) -> str:
    """What helps against a collapse, the most promising first. tied: whether the head is the transposed embedding."""
    head = "spheret.Shift before the tied head, or a head of its own; " if tied else ""
    return (
        f"a head bias that starts at the logarithms of the token frequencies (spheret.Head); {head}branches that "
        "start smaller; a longer warm-up; a lower learning rate"
    )


RULES = (
    Rule(
        "head", copying_head, "{text}",
        "give the head a bias that starts at the logarithms of the token frequencies (spheret.Head), and put "
        "spheret.Shift between the last norm and the head, or give the head a weight of its own",
        level="warning",
    ),
    Rule(
        "no gradient", no_gradient_at_all,
        "no weight had a gradient at any step: watch.step belongs after loss.backward() and before zero_grad()",
        "call loss.backward(), watch.step(loss), optimizer.step() and optimizer.zero_grad() in this order",
        needs="gradients", lasts=1, always=True,
    ),
    Rule(
        "not zeroed", not_zeroed,
        "the gradients of the step before were not set to zero, so that all gradients add up",
        "call optimizer.zero_grad() once per update, and watch.step once per update", lasts=HOLDS,
    ),
    Rule(
        "growth", growth,
        "the output of {name} is {times:.3g} times as long as at the same place in the layers beside it",
        "look at its weights: how they start, and what has changed them", needs="stream",
    ),
    Rule(
        "dead", still, "{name} does nothing: since step {since} its branch has moved no token of the stream",
        "look whether its output is multiplied by zero, its gate is closed or its weights are frozen at zero",
        needs="stream", lasts=LASTS,
    ),
    Rule(
        "constant", same_for_all, "since step {since} the output of {name} has been the same for every token",
        "look at the gain of the norm before it, whether its activations are all zero, and what it attends to",
        needs="stream", lasts=LASTS,
    ),
    Rule(
        "no gradient", no_gradient, "{name} has had no gradient since step {since}, though its weights are to learn",
        "look for detach(), no_grad() or a product with zero behind it; if it is not to learn, set requires_grad to "
        "False",
        needs="gradients", lasts=LASTS, always=True,
    ),
    Rule(
        "expert", few_experts, "since step {since} only {few} of the {all} experts of {name} have got tokens",
        "balance the experts: an auxiliary loss, a bias of the router, noise, or a lower learning rate of the router",
        needs="gradients", lasts=LASTS,
    ),
    Rule(
        "attention", attention_logits,
        "an attention logit of {name} has reached {now:.3g}, where {before:.3g} was the largest at the start",
        "norms on queries and keys, clipping their weights, or a lower learning rate of theirs",
        needs="stream", lasts=1,
    ),
    Rule(
        "spike", gradient_jump,
        "the gradient norm jumped to {now:.3g}, where at most {usual:.3g} was seen lately{detail}",
        "if it does not recover: go back to a checkpoint before it, leave out these batches, clip the "
        "gradient, or lower beta2 of Adam",
        needs="gradients",
    ),
    Rule(
        "plateau", on_the_plateau,
        "the loss stays near the unigram entropy {entropy:.3f}, and the states of different tokens have a mean "
        "cosine of {cosine:.3f}, but they still move, as in a model that is about to learn more",
        "wait", needs="stream", level="warning",
    ),
    Rule(
        "collapsed", collapsed,
        "token collapse: after {name} the states of different tokens have a mean cosine of {cosine:.3f}, and the "
        "loss {loss:.3f} stays at the unigram entropy {entropy:.3f}; neither has moved since step {first}",
        collapse_remedy(tied=True), needs="stream",
    ),
    Rule(
        "diverged", diverged, "{reason}; {detail}",
        "go back to a checkpoint before it, and train on with a third of the learning rate or a longer warm-up",
    ),
    Rule(
        "decay", decays, "the last updates shortened most weights by {share:.1%} each",
        "lower the weight decay: it is multiplied by the learning rate",
        needs="updates", lasts=1,
    ),
    Rule(
        "exploding", outgrown,
        "the update of {name} is {now:.2g} of its weights, {times:.3g} times as much as at the same place "
        "in the layers beside it",
        "lower the learning rate of these weights, and look at their parameter group", needs="updates",
    ),
    Rule(
        "rate", all_updates_jump, "all updates rose alike, {times:.3g} times: the learning rate or the loss scale",
        "look at the schedule of the learning rate, at what the loss is multiplied by, and at its reduction",
        needs="updates",
    ),
    Rule(
        "rate", huge_updates, "the last updates were {size:.3g} times as large as the weights, at most places",
        "lower the learning rate, or begin with a warm-up", needs="updates",
    ),
    Rule(
        "no update", no_update_at_all, "no update has changed any weight since step {since}",
        "give the optimiser the parameters of this model, and a learning rate that is not lost in rounding",
        needs="updates", lasts=HOLDS, always=True,
    ),
    Rule(
        "no update", no_update, "{name} has a gradient, but no update has changed its weights since step {since}",
        "give its parameters to the optimiser, or set requires_grad to False",
        needs="updates", lasts=LASTS, always=True,
    ),
)  # fmt: skip

REMEDIES: dict[EventKind, str] = {
    "not finite": "go back to the last checkpoint, look at the batch and at this place, and train on with a lower "
    "learning rate or with clipped gradients",
    **{rule.kind: rule.remedy for rule in RULES[::-1]},
}
