"""Whether the best learning rate of a small model is that of a large one: the rungs of a map of rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spheret.lab.answers import GroupAnswer
from spheret.lab.entries import Entry, sound
from spheret.lab.rows import Row
from spheret.lab.rungs import by_part, size_of
from spheret.lab.stages import NEAR
from spheret.optim.coordinates import power


@dataclass(frozen=True)
class BestRate:
    """One contestant at one size.

    vertex: where a parabola through the best rate and its neighbours is lowest; None without both.
    kept: what the best rate of the first size costs here, per tuning seed; None if a run failed at it, empty if it
        was not run.
    """

    entry: Entry
    vertex: float | None
    kept: tuple[float, ...] | None

    @property
    def rate(self) -> float | None:
        """The best rate of the grid; None if none was found."""
        return self.entry.search.best

    @property
    def cost(self) -> float | None:
        """The mean over the seeds; infinity if a run failed, None if it was not run."""
        if self.kept is None:
            return math.inf
        return math.fsum(self.kept) / len(self.kept) if self.kept else None


@dataclass(frozen=True)
class RateBySize:
    """One contestant over all sizes. power: the best rate goes as size to this power; None with fewer than three."""

    label: str
    rates: tuple[BestRate, ...]
    power: float | None

    @property
    def fitted(self) -> int:
        """The number of sizes that the power rests on."""
        return sum(each.vertex is not None for each in self.rates)


@dataclass(frozen=True)
class Transfer:
    """A part that is a map of rates, at several sizes. key: the setting that is the size."""

    part: str
    title: str
    key: str
    sizes: tuple[float, ...]
    contestants: tuple[RateBySize, ...]


def transfers(answers: Sequence[GroupAnswer]) -> list[Transfer]:
    """Every part without fresh seeds whose rungs differ in one size, once two of them have runs."""
    made = []
    for same in by_part(answers):
        key, sizes = size_of(same)
        part = same[0].group.part
        if key is not None and not part.compared_with and sum(bool(answer.rows) for answer in same) > 1:
            contestants = tuple(
                _rate_by_size(same, sizes, contestant.label) for contestant in same[0].group.contestants
            )
            made.append(Transfer(part.name, part.title or part.name, key, sizes, contestants))
    return made


def _rate_by_size(answers: Sequence[GroupAnswer], sizes: Sequence[float], label: str) -> RateBySize:
    entries = [answer.by_label[label] for answer in answers]
    base = entries[0].search.best
    found = tuple(_best_rate(entry, base) for entry in entries)
    known = [(size, each.vertex) for size, each in zip(sizes, found, strict=True) if each.vertex is not None]
    slope = power(*zip(*known, strict=True)) if len(known) > 2 else None
    return RateBySize(label, found, slope)


def _best_rate(entry: Entry, base: float | None) -> BestRate:
    search = entry.search
    if search.best is None:
        return BestRate(entry, None, ())
    vertex = _vertex(search.losses, search.best) if search.bracketed else None
    return BestRate(entry, vertex, _kept(entry, search.best, base))


def tries_at(entry: Entry, rate: float) -> list[Row]:
    """The runs of the search at a rate of the grid."""
    return [row for row in entry.tries if rate / NEAR < row.rate < rate * NEAR]


def _kept(entry: Entry, best: float, base: float | None) -> tuple[float, ...] | None:
    """The losses at the rate of the first size minus those at the best rate, seed by seed."""
    if base is None:
        return ()
    there, here = ({row.seed: row for row in tries_at(entry, rate)} for rate in (base, best))
    if any(not sound(row) for row in there.values()):
        return None
    return tuple(there[seed].loss - row.loss for seed, row in here.items() if seed in there and sound(row))


def _vertex(losses: dict[float, float], best: float) -> float | None:
    """The lowest point of the parabola in log(rate) through three neighbours of the grid."""
    rates = list(losses)
    place = rates.index(best)
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(rate), losses[rate]) for rate in rates[place - 1 : place + 2])
    if not math.isfinite(y0 + y2):
        return None
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    # the slopes at the middles of both sides: where the line through them is zero
    if right <= left:
        return best
    return math.exp((x0 + x1) / 2 - left * (x2 - x0) / 2 / (right - left))
