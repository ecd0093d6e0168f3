"""The comparisons of a study: contestants x seeds with pooled noise, pairs and power.

Plain numbers go in and small records come out. Nothing here reads a run or prints. Every loss must be finite: the
caller leaves out contestants that diverged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Literal

from spheret.lab.statistics import LEVEL, Interval, holm, mean_and_deviation, quantile, student_interval


@dataclass(frozen=True)
class SeedTable:
    """A two-way layout: contestants x seeds (blocks), residual variance pooled over contestants.

    A seed fixes the batches and the initial weights, so it moves all contestants together. The model of one run is
    loss = contestant + seed + noise, and the noise has one standard deviation for all contestants. That deviation is
    estimated from all runs. Nine contestants and three seeds give it 16 degrees of freedom. A paired t-test has 2.

    A contestant that is much noisier than the others, such as one of whose seeds nearly diverged, would hide the
    differences of all others. It is left out of the pool, and its own pairs are compared by paired t-tests.
    """

    contestants: tuple[str, ...]
    seeds: tuple[int, ...]
    means: dict[str, float]
    # residual standard deviation of one run, after taking out contestant and seed, pooled over contestants
    deviation: float
    # (contestants - 1)(seeds - 1), of the contestants in the pool
    degrees: int
    # the residual standard deviation of each contestant, scaled to estimate `deviation` if all are equally noisy
    deviations: dict[str, float]
    # the losses of each contestant, by seed in the order of `seeds`
    losses: dict[str, tuple[float, ...]]
    # contestants that are too noisy for the pool
    noisy: tuple[str, ...]


def seed_table(losses: Mapping[str, Mapping[int, float]]) -> SeedTable:
    """The table of the losses by contestant and seed.

    Only complete blocks count: the seeds that every contestant has.
    """
    contestants = tuple(losses)
    if len(contestants) < 2:
        raise ValueError(f"a comparison needs two or more contestants, not {len(contestants)}.")
    for contestant, by_seed in losses.items():
        for seed, loss in by_seed.items():
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss of {contestant} at seed {seed} is {loss}: leave out what diverged or is unfinished."
                )
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in losses.values()))))
    if len(seeds) < 2:
        raise ValueError(
            f"{len(contestants)} contestants have {len(seeds)} seeds in common, and an estimate of the noise needs "
            "two or more: train every contestant with the same seeds."
        )
    columns = {contestant: [losses[contestant][seed] for seed in seeds] for contestant in contestants}
    squares = dict(zip(contestants, _residual_squares(list(columns.values())), strict=True))
    count, repeats = len(contestants), len(seeds) - 1
    share = (count - 1) * repeats / count
    deviations = {name: math.sqrt(square / share) for name, square in squares.items()}
    noisy: list[str] = []
    while noisiest := _too_noisy(squares, len(seeds)):
        noisy.append(noisiest)
        pool = [name for name in squares if name != noisiest]
        squares = dict(zip(pool, _residual_squares([columns[name] for name in pool]), strict=True))
    degrees = (len(squares) - 1) * repeats
    return SeedTable(
        contestants=contestants,
        seeds=seeds,
        means={contestant: mean_and_deviation(column)[0] for contestant, column in columns.items()},
        deviation=math.sqrt(math.fsum(squares.values()) / degrees),
        degrees=degrees,
        deviations=deviations,
        losses={contestant: tuple(column) for contestant, column in columns.items()},
        noisy=tuple(noisy),
    )


def _too_noisy(squares: Mapping[str, float], seeds: int, level: float = 0.01) -> str | None:
    """The contestant that has more of the squares than chance gives to any of equally noisy ones (Cochran's C).

    None if there is none, and with two contestants, whose residuals mirror each other.
    """
    total, noisiest = math.fsum(squares.values()), max(squares, key=lambda name: squares[name])
    if len(squares) < 3 or not total or squares[noisiest] / total <= _largest_share(len(squares), seeds, level):
        return None
    return noisiest


@lru_cache(maxsize=1024)
def _largest_share(contestants: int, seeds: int, level: float) -> float:
    """The share of the squares that the noisiest of equally noisy contestants exceeds with this probability.

    Of 4,000 studies of equal noise, the same at every call.
    """
    import numpy as np

    noise = np.random.default_rng(0).standard_normal((4000, contestants, seeds))
    squares = seeds * (noise - noise.mean(1, keepdims=True)).var(2)
    return float(np.quantile(squares.max(1) / squares.sum(1), 1 - level))


def _residual_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """The sum of squared residuals of each row, after taking out the means of rows and columns."""
    # the first row is taken out before any mean, so that identical rows leave exactly 0
    rows = [[a - b for a, b in zip(row, rows[0], strict=True)] for row in rows]
    column_means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    squares = []
    for row in rows:
        centred = [a - b for a, b in zip(row, column_means, strict=True)]
        mean = math.fsum(centred) / len(centred)
        squares.append(math.fsum((x - mean) ** 2 for x in centred))
    return squares


@dataclass(frozen=True)
class Pair(Interval):
    """The first contestant's mean loss minus the second's, over the seeds of a table.

    `low` and `high` bound the confidence interval of only this pair. `adjusted` is the p-value after Holm's
    correction over all pairs of the table, and `verdict` names the better contestant by it. So an interval may
    exclude 0 where the verdict is "none". `error` is the standard error of the estimate.
    """

    first: str
    second: str
    adjusted: float
    error: float

    @property
    def significant(self) -> bool:
        return self.adjusted < 1 - LEVEL

    @property
    def verdict(self) -> Literal["first", "second", "none"]:
        if not self.significant:
            return "none"
        return "first" if self.estimate < 0 else "second"

    @property
    def mirrored(self) -> Pair:
        """The same pair in the other order."""
        numbers = {"estimate": -self.estimate, "low": -self.high, "high": -self.low}
        return replace(self, first=self.second, second=self.first, **numbers)


def pairs(table: SeedTable) -> list[Pair]:
    """All pairs of the table's contestants, in their order.

    If the noise is the same for all contestants, the intervals have their stated coverage, and the probability of one
    or more false verdicts is at most 0.05. With two contestants this is the paired t-test. This holds
    for any seed effect.

    If some contestants are noisier than others, comparisons of the noisy ones are too bold and comparisons of the
    quiet ones too cautious. A contestant that is noisier than chance explains is in `table.noisy`: its pairs pool
    nothing, and need more seeds.
    """
    errors = {(a, b): _error(table, a, b) for a, b in combinations(table.contestants, 2)}
    intervals = [
        student_interval(table.means[first] - table.means[second], error, degrees)
        for (first, second), (error, degrees) in errors.items()
    ]
    adjusted = holm([interval.p for interval in intervals])
    return [
        Pair(**vars(interval), first=first, second=second, adjusted=p, error=error)
        for ((first, second), (error, _)), interval, p in zip(errors.items(), intervals, adjusted, strict=True)
    ]


def _error(table: SeedTable, first: str, second: str) -> tuple[float, int]:
    """The standard error of a difference and its degrees of freedom: pooled, or only of a noisy pair."""
    seeds = len(table.seeds)
    if first not in table.noisy and second not in table.noisy:
        return table.deviation * math.sqrt(2 / seeds), table.degrees
    differences = [a - b for a, b in zip(table.losses[first], table.losses[second], strict=True)]
    return mean_and_deviation(differences)[1] / math.sqrt(seeds), seeds - 1


def mean_interval(table: SeedTable, contestant: str) -> tuple[float, float]:
    """The contestant's mean loss -/+ t * deviation/sqrt(seeds): an interval to compare contestants by eye.

    It holds the paired noise only. It is the interval of the mean for these very seeds, so it does not include that
    other seeds move all contestants together. If the intervals of two contestants do not overlap,
    the interval of their difference excludes 0. The reverse is not true, and the verdicts of `pairs` are stricter
    because they correct for the number of pairs.
    """
    deviation, degrees = table.deviation, table.degrees
    if contestant in table.noisy:
        deviation, degrees = table.deviations[contestant], len(table.seeds) - 1
    half_width = quantile(LEVEL, degrees) * deviation / math.sqrt(len(table.seeds))
    return table.means[contestant] - half_width, table.means[contestant] + half_width


def smallest_seen(table: SeedTable, power: float = 0.8, level: float = 0.05) -> float:
    """The smallest true difference of one pair whose better contestant would be named with this probability.

    The table's deviation is taken for the true one.
    """
    count = len(table.contestants)
    error = table.deviation * math.sqrt(2 / len(table.seeds))
    return detectable(table.degrees, count * (count - 1) // 2, power, level) * error


@lru_cache(maxsize=64)
def detectable(degrees: float, pairs: int, power: float = 0.8, level: float = 0.05) -> float:
    """The smallest true difference of a pair that its t-test finds with this probability, in standard errors.

    pairs: how many are tested together. The p-value must fall below level/pairs, the first and strictest of Holm's
    steps. So the true power is at least `power`. The distribution is the noncentral t, taken exactly.
    """
    from scipy import optimize, stats

    strictest = level / pairs
    threshold = quantile(1 - strictest, degrees)

    def excess(shift: float) -> float:
        return float(stats.nct.sf(threshold, degrees, shift)) - power

    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    return float(optimize.brentq(excess, 0.0, upper, xtol=1e-12))
