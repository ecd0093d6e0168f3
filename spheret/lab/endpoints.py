"""The sizes of a part side by side, and the questions that a plan asks before its first run.

Every comparison is paired: a seed gives two contestants the same batches. A verdict needs all seeds of a rung. Until
then the numbers are there, and the verdict is that it was not run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from spheret.lab.answers import GroupAnswer
from spheret.lab.entries import Entry
from spheret.lab.plan import EndpointRecord, PartRecord
from spheret.lab.rows import Row, sound
from spheret.lab.seed_table import Pair
from spheret.lab.statistics import LEVEL, Interval, mean_and_deviation, over_seeds

ALPHA = 1 - LEVEL
# two one-sided tests at 5 % each find what an interval of 90 % leaves out
EQUIVALENCE_LEVEL = 1 - 2 * ALPHA
# the settings that are a size
SIZES = ("layers", "width", "steps")

EndpointVerdict = Literal[
    "lower", "higher", "no significant difference", "equivalent", "not shown", "failed", "not run"
]


@dataclass(frozen=True)
class PairedComparison:
    """The difference of two contestants' losses.

    where: the rung; or what the difference changes by per doubling of the size.
    interval: of 95 %, or of 90 % for an equivalence; None with fewer than two seeds.
    p: of no difference, or of a difference as large as the margin. margin: None unless it is an equivalence.
    seeds: those that both contestants have, of those that are planned.
    trouble: why there is no verdict; empty if there is one. failed: whether it is a seed that failed or a rate that
        was not found, and not a run that is still to come.
    """

    first: str
    second: str
    where: str
    interval: Interval | None
    p: float | None
    margin: float | None
    seeds: int
    planned: int
    trouble: str
    failed: bool

    @property
    def verdict(self) -> EndpointVerdict:
        if self.trouble or self.interval is None or self.p is None:
            return "failed" if self.failed else "not run"
        if self.margin is not None:
            return "equivalent" if self.p < ALPHA else "not shown"
        if self.p >= ALPHA:
            return "no significant difference"
        return "lower" if self.interval.estimate < 0 else "higher"


@dataclass(frozen=True)
class Stress:
    """The seeds of a contestant at a multiple of its best rate. trouble: why none will come; empty if they can."""

    label: str
    where: str
    runs: Mapping[int, Row]
    planned: int
    trouble: str

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.runs.values() if not sound(row)]


@dataclass(frozen=True)
class EndpointAnswer:
    """What is known about one endpoint. slope: the change per doubling of the size; None without sizes."""

    endpoint: EndpointRecord
    comparisons: tuple[PairedComparison, ...] = ()
    slope: PairedComparison | None = None
    stresses: tuple[Stress, ...] = ()
    factor: float = 0.0


def endpoint_answers(endpoints: Sequence[EndpointRecord], answers: Sequence[GroupAnswer]) -> list[EndpointAnswer]:
    """What is known about every endpoint of a plan."""
    by_part = ladders(answers)
    return [_endpoint_answer(endpoint, by_part[endpoint.part]) for endpoint in endpoints]


def _endpoint_answer(endpoint: EndpointRecord, ladder: Ladder) -> EndpointAnswer:
    rungs = ladder.rungs
    if endpoint.kind == "stress":
        labels = endpoint.contestants or [each.label for each in ladder.answers[0].group.contestants]
        stresses = tuple(_stress(answer, label, where) for where, answer in rungs.items() for label in labels)
        return EndpointAnswer(endpoint, stresses=stresses, factor=ladder.part.stress)
    margin = endpoint.margin if endpoint.kind == "equivalence" else None
    comparisons = tuple(
        comparison(answer, first, second, where, margin)
        for first, second in combinations(endpoint.contestants, 2)
        for where, answer in rungs.items()
    )
    slope = ladder.slope(*endpoint.contestants) if endpoint.kind == "gap" else None
    return EndpointAnswer(endpoint, comparisons, slope)


def comparison(
    answer: GroupAnswer, first: str, second: str, where: str, margin: float | None = None
) -> PairedComparison:
    """The paired difference of two contestants of a group, with the test of a gap or of an equivalence."""
    by_seed, planned = differences(answer, first, second), answer.group.part.compared_with
    trouble, failed = _trouble(answer, first, second), True
    if not trouble and len(by_seed) < planned:
        trouble, failed = f"{len(by_seed)} of {planned} seeds", False
    interval = p = None
    if len(by_seed) > 1:
        values = list(by_seed.values())
        interval = over_seeds(values, LEVEL if margin is None else EQUIVALENCE_LEVEL)
        p = interval.p if margin is None else two_one_sided(values, margin)
    return PairedComparison(first, second, where, interval, p, margin, len(by_seed), planned, trouble, failed)


def differences(answer: GroupAnswer, first: str, second: str) -> dict[int, float]:
    """The first loss minus the second by seed; empty if a seed of one of them failed."""
    one, other = answer.by_label[first], answer.by_label[second]
    if one.failed or other.failed:
        return {}
    return {seed: row.loss - other.finals[seed].loss for seed, row in one.finals.items() if seed in other.finals}


def _trouble(answer: GroupAnswer, *labels: str) -> str:
    """Which contestant has a failed seed at the reported learning rate, or no such rate."""
    entries = [answer.by_label[label] for label in labels]
    return "; ".join(f"{entry.label}: {entry.reason}" for entry in entries if entry.failed or _lost(entry))


def _lost(entry: Entry) -> bool:
    """Whether no seeds will come, because no best rate was found."""
    return entry.state in ("edge", "hopeless")


def two_one_sided(values: Sequence[float], margin: float) -> float:
    """The p-value of "the mean lies a margin or more from 0": the larger of two one-sided t-tests."""
    from scipy import special

    mean, deviation = mean_and_deviation(values)
    error, degrees = deviation / math.sqrt(len(values)), len(values) - 1
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    return float(special.stdtr(degrees, (abs(mean) - margin) / error))


def _slope(points: Sequence[tuple[float, float]]) -> float:
    middle = math.fsum(x for x, _ in points) / len(points)
    moment = math.fsum((x - middle) ** 2 for x, _ in points)
    return math.fsum((x - middle) * y for x, y in points) / moment


def _stress(answer: GroupAnswer, label: str, where: str) -> Stress:
    entry = answer.by_label[label]
    return Stress(label, where, entry.stressed, entry.planned, entry.reason if _lost(entry) else "")


@dataclass(frozen=True)
class Ladder:
    """The rungs of a part from the smallest to the largest; in the order of the plan if they have no size.

    key: the setting that is the size; None if the rungs differ in something else. sizes: its values.
    """

    key: str | None
    sizes: tuple[float, ...]
    answers: tuple[GroupAnswer, ...]

    @property
    def part(self) -> PartRecord:
        return self.answers[0].group.part

    @property
    def title(self) -> str:
        return self.part.title or self.part.name

    @property
    def reference(self) -> str:
        return self.answers[0].reference

    @property
    def rungs(self) -> dict[str, GroupAnswer]:
        """The rungs by what they are called: the size, or the name of the group if they have no size."""
        names = [f"{self.key} {size:g}" for size in self.sizes] or [each.group.name for each in self.answers]
        return dict(zip(names, self.answers, strict=True))

    @property
    def schemes(self) -> dict[str, str]:
        """The scheme of every contestant but the reference, by its label."""
        others = [each for each in self.answers[0].group.contestants if each.label != self.reference]
        return {each.label: each.given["model"]["scheme"] for each in others}

    def gaps(self, label: str) -> list[Pair | None]:
        """The gap of a contestant to the reference on every rung; None where it is not compared."""
        return [answer.gap(label, self.reference) for answer in self.answers]

    def slope(self, first: str, second: str) -> PairedComparison | None:
        """How the difference changes per doubling of the size: a least-squares slope for each seed, and their mean.

        Rungs that no seed has are left out, and are named. None if the rungs have no size.
        """
        if len(self.sizes) < 2:
            return None
        planned = self.part.compared_with
        gaps = [differences(answer, first, second) for answer in self.answers]
        points = list(zip(map(math.log2, self.sizes), gaps, strict=True))
        known = [(x, by_seed) for x, by_seed in points if by_seed]
        seeds = sorted(set.intersection(*(set(by_seed) for _, by_seed in known))) if len(known) > 1 else []
        slopes = [_slope([(x, by_seed[seed]) for x, by_seed in known]) for seed in seeds]
        interval = over_seeds(slopes) if len(slopes) > 1 else None
        trouble = "; ".join(filter(None, (_trouble(answer, first, second) for answer in self.answers)))
        failed = bool(trouble)
        if not failed and (len(known) < len(points) or len(seeds) < planned):
            trouble = f"{len(known)} of {len(points)} sizes, {len(seeds)} of {planned} seeds"
        p = None if interval is None else interval.p
        where = f"per doubling of {self.key}"
        return PairedComparison(first, second, where, interval, p, None, len(seeds), planned, trouble, failed)


def ladders(answers: Sequence[GroupAnswer]) -> dict[str, Ladder]:
    """The ladder of every part, by its name, in the order of the plan. One without further sizes has one rung."""
    parts: dict[str, list[GroupAnswer]] = {}
    for answer in answers:
        parts.setdefault(answer.group.part.name, []).append(answer)
    return {name: ladder_of(rungs) for name, rungs in parts.items()}


def ladder_of(rungs: Sequence[GroupAnswer]) -> Ladder:
    """The ladder of the rungs of one part. They have a size if they differ only in one of SIZES."""
    changed = {name for answer in rungs for name in answer.group.setting if name in SIZES}
    if len(changed) == 1:
        (key,) = changed
        by_size = {float(answer.group.value(key)): answer for answer in rungs}
        if len(by_size) == len(rungs):
            sizes = sorted(by_size)
            return Ladder(key, tuple(sizes), tuple(by_size[size] for size in sizes))
    return Ladder(None, (), tuple(rungs))
