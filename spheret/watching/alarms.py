"""From losses and observations to events: what is wrong, where, and what helps."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spheret.model.monitor import HIGH_OWN_LOGIT
from spheret.watching.divergence import FEW, Divergence, moved_sentence
from spheret.watching.losses import LossGuard
from spheret.watching.observations import Event, EventKind, Observation

# a spike is a loss this many standard deviations above the mean of the last ones, and as far above the highest of the
# last SPIKE_NEAR as SPIKE_CLEAR standard deviations
SPIKE_LEAST, SPIKE_Z, SPIKE_NEAR, SPIKE_CLEAR = 20, 6.0, 20, 2.0
# in a spike, a sublayer stands out if its gradient rose this many times more than that of most
STANDS_OUT = 3.0
# at a watched step, a gradient norm or an update this many times larger than the largest of the last ones is a spike,
# too, if there were enough of them
JUMPS, JUMP_LEAST = 5.0, 5
# a branch that moves no token by this share of its state does nothing, if that lasts this many updates
STILL, STILL_UPDATES = 1e-6, 20
# updates relative to the weights this many times larger than those of the nearest layers, now and at this many looks
# before, explode: where a training comes to rest, the updates of single layers fall. Smaller ones do no harm
EXPLODES, REMEMBERED, HARMLESS = 10.0, 8, 3e-3
# a stream of constant norm: by how much a sublayer may change it
CONSTANT = 0.02
# tokens per kind of token from which on their frequencies are known well enough
TOKENS_PER_KIND = 20

REMEDIES: dict[EventKind, str] = {
    "not finite": "go back to the last checkpoint, look at the batch and at this place, and train on with a lower "
    'learning rate, or with policy="skip"',
    "spike": "if it does not recover: go back to a checkpoint before it, skip these batches "
    '(policy="skip"), clip the gradient, or lower beta2 of Adam',
    "diverged": "go back to a checkpoint before it, and train on with a third of the learning rate or a longer "
    "warm-up",
    "collapsed": "spheret.Shift before a tied head, or a head of its own; a head bias that starts at the logarithms "
    "of the token frequencies; a longer warm-up; a lower learning rate",
    "dead": "look whether its output is multiplied by zero, its gate is closed or its weights are frozen at zero",
    "exploding": "lower the learning rate of these weights, and look at their parameter group",
    "head": "put spheret.Shift between the last norm and the head, or give the head a weight of its own",
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A sublayer or another place with weights, in the order of the model.

    peers: the same for items of one kind in different layers; empty for one that has no others.
    """

    name: str
    peers: str
    sublayer: int | None = None


class TokenCounts:
    """How often each token was seen, on the device. `entropy` is None until there are enough."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.counts: Tensor | None = None

    def see(self, ids: Tensor) -> None:
        if self.counts is None:
            self.counts = torch.zeros(self.vocab, dtype=torch.long, device=ids.device)
        flat = ids.detach().flatten().long().clamp(0, self.vocab - 1)
        self.counts.index_add_(0, flat, torch.ones_like(flat))

    def entropy(self) -> float | None:
        """That of the frequencies, in nats, with Miller's and Madow's correction for its bias."""
        if self.counts is None:
            return None
        counts = self.counts.cpu().numpy()
        seen = counts[counts > 0]
        total, kinds = int(seen.sum()), len(seen)
        if kinds < 2 or total < TOKENS_PER_KIND * kinds:
            return None
        shares = seen / total
        return float(-(shares * np.log(shares)).sum()) + (kinds - 1) / (2 * total)


class Alarms:
    """Judges what was seen. Every kind of alarm is raised once per place, but what may pass is raised each time.

    Args:
        items: the sublayers first, in order, then the other places.
        unigram_entropy: that of the token frequencies, if it is known.
    """

    def __init__(self, items: Sequence[Item], unigram_entropy: float | None = None) -> None:
        self.items = list(items)
        self.given_entropy = unigram_entropy
        self.losses = LossGuard(unigram_entropy)
        self.divergence: Divergence | None = None
        self._first_losses: list[float] = []
        # the step at which the run diverged, until an observation says where
        self.diverged_at: int | None = None
        self._raised: set[tuple[str, str]] = set()
        self._still_since: dict[int, int] = {}
        # of the last observations, by item
        self._updates: list[list[float | None]] = []
        self._was_finite = True
        # gradient norms of the items at the last step at which all was well, and of all together at the last looks
        self._usual: list[float | None] | None = None
        self._totals: list[float] = []

    def name(self, sublayer: int) -> str:
        return self.items[sublayer - 1].name

    def loss(self, step: int, value: float) -> bool:
        """Take one loss. Returns whether it is a spike."""
        recent = list(self.losses.losses)
        spike = False
        if len(recent) >= SPIKE_LEAST:
            deviation = max(statistics.pstdev(recent), 1e-6 * abs(statistics.fmean(recent)))
            high = max(recent[-SPIKE_NEAR:])
            spike = value > statistics.fmean(recent) + SPIKE_Z * deviation and value > high + SPIKE_CLEAR * deviation
        self.losses.loss(value)
        if self.divergence is None:
            self._first_losses.append(value)
            if len(self._first_losses) == FEW:
                level, name = statistics.median(self._first_losses), "loss at the start"
                if self.given_entropy is not None:
                    level, name = self.given_entropy, "unigram entropy"
                self.divergence = Divergence(level, name)
        elif self.divergence.loss(step, list(self.losses.losses)):
            self.diverged_at = step
        return spike

    def wants_a_look(self, step: int) -> bool:
        """Whether the stream should be seen at the next step, although it is not time."""
        return self.diverged_at is not None or self.losses.suspects_collapse(step)

    def _event(self, kind: EventKind, step: int, where: str, sentence: str, **more: object) -> list[Event]:
        if kind not in ("spike", "not finite") and (kind, where) in self._raised:
            return []
        self._raised.add((kind, where))
        return [Event(kind, step, where, sentence, REMEDIES[kind], **more)]  # type: ignore[arg-type]

    def spike(self, step: int, value: float, observation: Observation | None) -> list[Event]:
        """A spike of the loss, and where its gradient rose most. observation: of the same step, if there is one."""
        usual = statistics.median(self.losses.losses)
        text = f"the loss jumped to {value:.4g}, where {usual:.4g} is usual"
        where, sublayer, detail = self._where_it_rose(observation)
        more = {"measured": "loss", "before": usual, "now": value}
        return self._event("spike", step, where, text + detail, sublayer=sublayer, **more)

    def _where_it_rose(self, observation: Observation | None) -> tuple[str, int | None, str]:
        """The place whose gradient rose most, or the batch if all rose alike; its number; and this in words."""
        rises = {} if observation is None or self._usual is None else self._rises(observation)
        if not rises:
            return "the model", None, ""
        middle = statistics.median(rises.values())
        most = max(rises, key=lambda index: rises[index])
        if rises[most] > math.log(STANDS_OUT) + max(middle, 0.0):
            item = self.items[most]
            usual = f"that of most places {math.exp(middle):.3g} times"
            return (
                item.name,
                item.sublayer,
                f"; the gradient of {item.name} rose {math.exp(rises[most]):.3g} times, {usual}",
            )
        alike = f"; the gradient rose everywhere alike, {math.exp(middle):.3g} times at most places"
        return "the batch", None, f"{alike}: look at the batch of this step"

    def _gradient(self, observation: Observation) -> list[Event]:
        """A gradient norm far beyond those of the last looks."""
        now, last = observation.grad_norm, self._totals
        if now is None or not math.isfinite(now):
            return []
        self._totals = [*last[1 - REMEMBERED :], now]
        if len(last) < JUMP_LEAST or now <= JUMPS * max(last):
            return []
        where, sublayer, detail = self._where_it_rose(observation)
        text = f"the gradient norm jumped to {now:.3g}, where at most {max(last):.3g} was seen lately{detail}"
        more = {"measured": "gradient", "before": max(last), "now": now}
        return self._event("spike", observation.step, where, text, sublayer=sublayer, **more)

    def _rises(self, observation: Observation) -> dict[int, float]:
        """By how much, in logarithms, the gradient norm of each item rose since all was well."""
        assert self._usual is not None
        found = {}
        for index, (now, before) in enumerate(zip(_gradients(observation), self._usual, strict=True)):
            # that of a few scalars is noise
            if self.items[index].peers and now and before:
                found[index] = math.log(now / before)
        return found

    def finite(self) -> None:
        """The loss and the gradient of a step were finite."""
        self._was_finite = True

    def not_finite(self, step: int, where: str, sentence: str, sublayer: int | None = None) -> list[Event]:
        """An event, unless the step before was not finite either."""
        was, self._was_finite = self._was_finite, False
        return self._event("not finite", step, where, sentence, sublayer=sublayer) if was else []

    def observed(self, observation: Observation, entropy: float | None, normal: bool) -> list[Event]:
        """What the stream and the gradients of a step say.

        entropy: that of the tokens seen so far, if nobody has given one. normal: whether the loss of this step was.
        """
        step, sublayers = observation.step, observation.sublayers
        if self.given_entropy is None:
            self.losses.unigram_entropy = entropy
        events = self._head(observation) + self._dead(observation)
        # the spike of a loss is said already
        events += self._gradient(observation) if normal else []
        seen = any(each.cosine is not None for each in sublayers)
        collapse = self.losses.collapse(sublayers) if seen else None
        if collapse is not None and collapse.sublayer is not None:
            where = self.name(collapse.sublayer)
            sentence = self.losses.collapse_sentence(collapse, self.name)
            events += self._event("collapsed", step, where, sentence, sublayer=collapse.sublayer, now=collapse.now)
        if self.divergence is not None and self.diverged_at is not None:
            sentence, where, sublayer = f"{self.divergence.reason}", "the model", None
            if seen:
                moved = self.divergence.moved(sublayers)
                sentence += f"; {moved_sentence(moved, self.name)}"
                if moved.sublayer is not None:
                    where, sublayer = self.name(moved.sublayer), moved.sublayer
            events += self._event("diverged", self.diverged_at, where, sentence, sublayer=sublayer)
            self.diverged_at = None
        elif self.divergence is not None and seen:
            self.divergence.remember(step, sublayers)
        if normal and not events:
            self._usual = _gradients(observation)
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
        events = []
        for each in observation.sublayers:
            if each.moved_max is None or each.moved_max >= STILL:
                self._still_since.pop(each.sublayer, None)
                continue
            since = self._still_since.setdefault(each.sublayer, observation.step)
            if observation.step - since >= STILL_UPDATES:
                name = self.name(each.sublayer)
                sentence = f"{name} does nothing: since step {since} its branch has moved no token of the stream"
                events += self._event(
                    "dead", observation.step, name, sentence, sublayer=each.sublayer, now=each.moved_max
                )
        return events

    def _jumps(self, step: int, updates: list[float | None]) -> list[Event]:
        """The place whose update grew most, if it is far beyond its own last ones."""
        most: tuple[float, int, float, float] | None = None
        for index, now in enumerate(updates):
            last = [past[index] or 0.0 for past in self._updates]
            if not self.items[index].peers or now is None or len(last) < JUMP_LEAST or not max(last) > 0:
                continue
            if now > max(JUMPS * max(last), HARMLESS) and (most is None or now / max(last) > most[0]):
                most = now / max(last), index, max(last), now
        if most is None:
            return []
        factor, index, before, now = most
        item = self.items[index]
        text = f"the update of {item.name} jumped to {now:.2g} of its weights, {factor:.3g} times its last ones"
        more = {"measured": "update", "before": before, "now": now}
        return self._event("spike", step, item.name, text, sublayer=item.sublayer, **more)

    def updated(self, observation: Observation) -> list[Event]:
        """What the size of the updates says, after the optimiser's step."""
        updates = [each.update for each in observation.everywhere]
        events = self._jumps(observation.step, updates)
        self._updates = [*self._updates[1 - REMEMBERED :], updates]
        kinds: dict[str, list[int]] = defaultdict(list)
        for index, item in enumerate(self.items):
            if item.peers and updates[index] is not None:
                kinds[item.peers].append(index)
        for indices in kinds.values():
            for place, index in enumerate(indices):
                near = sorted((i for i in range(len(indices)) if i != place), key=lambda i: abs(i - place))[:2]
                now = updates[index]
                if len(near) < 2 or now is None:
                    continue
                usual = max(past[indices[i]] or 0.0 for past in self._updates for i in near)
                if now > max(EXPLODES * usual, HARMLESS) and usual > 0:
                    item = self.items[index]
                    sentence = (
                        f"the update of {item.name} is {now:.2g} of its weights, {now / usual:.3g} times that of the "
                        "same place in the layers beside it"
                    )
                    events += self._event(
                        "exploding", observation.step, item.name, sentence,
                        sublayer=item.sublayer, measured="update", before=usual, now=now,
                    )  # fmt: skip
        return events


def _gradients(observation: Observation) -> list[float | None]:
    return [each.grad_norm for each in observation.everywhere]


class RobustLimit:
    """A limit for the next value: the mean of the last WINDOW values plus LIMIT_Z standard deviations."""

    WINDOW, LEAST, Z = 128, 32, 6.0

    def __init__(self) -> None:
        self.values: list[float] = []

    def exceeded(self, value: float) -> bool:
        """Take a value, and say whether it was beyond the limit."""
        beyond = not math.isfinite(value)
        if not beyond and len(self.values) >= self.LEAST:
            mean, deviation = statistics.fmean(self.values), statistics.pstdev(self.values)
            beyond = value > mean + self.Z * deviation
        if math.isfinite(value):
            self.values = [*self.values[1 - self.WINDOW :], value]
        return beyond
