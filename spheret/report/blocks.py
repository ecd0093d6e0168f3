"""The statistics of a study: contestants x seeds with pooled noise, learning-rate bowls, trends over size, compute.

Plain numbers go in and small records come out. Nothing here reads a run or prints. Every loss must be finite: the
caller leaves out contestants that diverged. Only `bowl` takes diverged runs, as None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Literal

from spheret.report.statistics import LEVEL, Interval, holm, mean_and_deviation, quantile, student_interval


@dataclass(frozen=True)
class Layout:
    """A two-way layout: contestants x seeds (blocks), residual variance pooled over contestants.

    A seed fixes the batches and the initial weights, so it moves all contestants together. The model of one run is
    loss = contestant + seed + noise, and the noise has one standard deviation for all contestants. That deviation is
    estimated from all runs. Nine contestants and three seeds give it 16 degrees of freedom. A paired t-test has 2.
    """

    contestants: tuple[str, ...]
    seeds: tuple[int, ...]
    means: dict[str, float]
    # residual standard deviation of one run, after taking out contestant and seed, pooled over contestants
    deviation: float
    # (contestants - 1)(seeds - 1)
    degrees: int
    # standard deviation between seeds of a contestant's loss as such (not paired), pooled over contestants
    seed_deviation: float
    # largest over smallest of `deviations`: a hint that pooling is not innocent. `unusual_spread` says what is large.
    spread: float
    # the residual standard deviation of each contestant, scaled to estimate `deviation` if all are equally noisy
    deviations: dict[str, float]


def layout(losses: Mapping[str, Mapping[int, float]]) -> Layout:
    """The layout of the losses by contestant and seed.

    Only complete blocks count: the seeds that every contestant has. With two contestants the residuals of one mirror
    those of the other, so their spread is 1 and says nothing.
    """
    contestants = tuple(losses)
    if len(contestants) < 2:
        raise ValueError(f"a comparison needs two or more contestants, not {len(contestants)}.")
    for contestant, by_seed in losses.items():
        for seed, loss in by_seed.items():
            _check_finite(loss, f"the loss of {contestant} at seed {seed}")
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in losses.values()))))
    if len(seeds) < 2:
        raise ValueError(
            f"{len(contestants)} contestants have {len(seeds)} seeds in common, and an estimate of the noise needs "
            "two or more: train every contestant with the same seeds."
        )
    columns = {contestant: [losses[contestant][seed] for seed in seeds] for contestant in contestants}
    summaries = {contestant: mean_and_deviation(column) for contestant, column in columns.items()}
    squares = _residual_squares(list(columns.values()))
    count, repeats = len(contestants), len(seeds) - 1
    share = (count - 1) * repeats / count
    deviations = {name: math.sqrt(square / share) for name, square in zip(contestants, squares, strict=True)}
    return Layout(
        contestants=contestants,
        seeds=seeds,
        means={contestant: mean for contestant, (mean, _) in summaries.items()},
        deviation=math.sqrt(math.fsum(squares) / ((count - 1) * repeats)),
        degrees=(count - 1) * repeats,
        seed_deviation=math.sqrt(math.fsum(deviation**2 for _, deviation in summaries.values()) / count),
        spread=_ratio(max(deviations.values()), min(deviations.values())) if count > 2 else 1.0,
        deviations=deviations,
    )


def _check_finite(value: float | None, what: str) -> None:
    if value is None or not math.isfinite(value):
        raise ValueError(
            f"{what} is {value}, and these statistics need finite numbers: leave out what diverged or is unfinished."
        )


def _ratio(largest: float, smallest: float) -> float:
    if largest == smallest:
        return 1.0
    return largest / smallest if smallest else math.inf


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


def unusual_spread(layout: Layout, level: float = 0.05) -> float:
    """The spread that contestants of equal noise exceed with this probability, by a seeded simulation.

    Few seeds give a large spread by chance: with nine contestants of equal noise, one study in twenty exceeds 22 with
    three seeds and 6 with five seeds. A spread above this number says that the noise differs. A spread below it does
    not prove that the noise is the same.
    """
    return _unusual_spread(len(layout.contestants), len(layout.seeds), level)


@lru_cache(maxsize=64)
def _unusual_spread(contestants: int, seeds: int, level: float) -> float:
    import numpy as np

    if contestants == 2:
        return 1.0
    rng, ratios = np.random.default_rng(0), []
    # in parts, to bound the memory of a large study
    for _ in range(8):
        noise = rng.standard_normal((500, contestants, seeds))
        noise -= noise.mean(1, keepdims=True)
        deviations = noise.std(2)
        ratios.append(deviations.max(1) / deviations.min(1))
    return float(np.quantile(np.concatenate(ratios), 1 - level))


@dataclass(frozen=True)
class Pair:
    """The mean loss of the first contestant minus that of the second, over the seeds of a layout.

    `low` and `high` bound the confidence interval of this pair alone. `adjusted` is the p-value after Holm's
    correction over all pairs of the layout, and `verdict` names the better contestant by it: "first", "second" or
    "none". So an interval may exclude 0 where the verdict is "none".
    """

    first: str
    second: str
    estimate: float
    low: float
    high: float
    p: float
    adjusted: float
    verdict: Literal["first", "second", "none"]
    # standard error of the estimate and its degrees of freedom
    error: float
    degrees: int


def pairs(layout: Layout, level: float = LEVEL) -> list[Pair]:
    """All pairs of the layout's contestants, in their order.

    If the noise is the same for all contestants, the intervals have their stated coverage, and the probability of one
    or more false verdicts is at most 1 - level. With two contestants this is the paired t-test. This holds
    for any seed effect.

    If some contestants are noisier than others, comparisons of the noisy ones are too bold and comparisons of the
    quiet ones too cautious. Simulations bound the damage for nine contestants with three and five seeds, some of them
    three times as noisy as the rest. One or more false verdicts then have a probability of at most 0.13 instead of
    0.05. The 95% interval covers the true difference in at least 92% of cases on average over the pairs, but in only
    71% for the worst pair. If `spread` is above `unusual_spread`, check a verdict with `statistics.over_seeds` on the
    pair's differences. That pools nothing and needs more seeds.
    """
    error = layout.deviation * math.sqrt(2 / len(layout.seeds))
    intervals = {
        (first, second): student_interval(layout.means[first] - layout.means[second], error, layout.degrees, level)
        for first, second in combinations(layout.contestants, 2)
    }
    adjusted = holm([interval.p for interval in intervals.values()])
    return [
        Pair(
            first=first,
            second=second,
            estimate=interval.estimate,
            low=interval.low,
            high=interval.high,
            p=interval.p,
            adjusted=p,
            verdict=("first" if interval.estimate < 0 else "second") if p < 1 - level else "none",
            error=error,
            degrees=layout.degrees,
        )
        for ((first, second), interval), p in zip(intervals.items(), adjusted, strict=True)
    ]


def mean_interval(layout: Layout, contestant: str, level: float = LEVEL) -> tuple[float, float]:
    """The contestant's mean loss -/+ t * deviation/sqrt(seeds): an interval to compare contestants by eye.

    It holds the paired noise only. It is the interval of the mean for these very seeds, so it does not include that
    other seeds move all contestants together (`seed_deviation`). If the intervals of two contestants do not overlap,
    the interval of their difference excludes 0. The reverse is not true, and the verdicts of `pairs` are stricter
    because they correct for the number of pairs.
    """
    if contestant not in layout.means:
        raise ValueError(f"{contestant!r} is not in the layout. Its contestants: {', '.join(layout.contestants)}.")
    half_width = quantile(level, layout.degrees) * layout.deviation / math.sqrt(len(layout.seeds))
    return layout.means[contestant] - half_width, layout.means[contestant] + half_width


def smallest_seen(layout: Layout, power: float = 0.8, level: float = 0.05) -> float:
    """The smallest true difference of one pair whose better contestant would be named with this probability.

    The p-value must fall below level/number of pairs, the first and strictest of Holm's steps. So the true power is
    at least `power`. The distribution is the noncentral t, taken exactly. The layout's deviation is taken for the
    true one.
    """
    from scipy import optimize, stats

    count = len(layout.contestants)
    strictest = level / (count * (count - 1) / 2)
    if not strictest / 2 < power < 1:
        raise ValueError(f"power is {power}: it must lie between {strictest / 2:.3g}, which chance gives, and 1.")
    threshold = quantile(1 - strictest, layout.degrees)

    def excess(shift: float) -> float:
        return float(stats.nct.sf(threshold, layout.degrees, shift)) - power

    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    shift = float(optimize.brentq(excess, 0.0, upper, xtol=1e-12))
    return shift * layout.deviation * math.sqrt(2 / len(layout.seeds))


def noise_floor(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Interval:
    """The same contestant on two sets of seeds: the difference of the mean losses with Welch's interval.

    The true difference is 0, so the estimate shows what chance alone does between sets of seeds. Nothing is paired. A
    set with a single seed leaves the interval unbounded.
    """
    for losses in (first, second):
        if not losses:
            raise ValueError("a set of seeds is empty: the noise floor needs losses from two sets of seeds.")
        for loss in losses:
            _check_finite(loss, "a loss of the noise floor")
    estimate = mean_and_deviation(first)[0] - mean_and_deviation(second)[0]
    if min(len(first), len(second)) < 2:
        return student_interval(estimate, 0.0, 0, level)
    variances = [mean_and_deviation(losses)[1] ** 2 / len(losses) for losses in (first, second)]
    degrees = _satterthwaite(variances, [len(first) - 1, len(second) - 1])
    return student_interval(estimate, math.sqrt(sum(variances)), degrees, level)


def _satterthwaite(variances: Sequence[float], degrees: Sequence[float]) -> float:
    """The degrees of freedom of a sum of independent estimated variances (Welch-Satterthwaite)."""
    total = math.fsum(variances)
    if total == 0:
        return float(sum(degrees))
    return 1 / math.fsum((variance / total) ** 2 / d for variance, d in zip(variances, degrees, strict=True))


@dataclass(frozen=True)
class Bowl:
    """How much the loss depends on the learning rate.

    `low` and `high` are the ends of the range of rates around the best one in which the loss is at most the best loss
    plus the tolerance. An end is None if the range reaches that end of the grid (`open_low`, `open_high`): where the
    bowl ends is then unknown. `factor` is high/low, None if an end is open.
    """

    # the rate of the grid with the lowest loss, and that loss
    best: float
    loss: float
    low: float | None
    high: float | None
    # the grid has a worse rate on either side of the best one; a diverged run counts as worse
    bracketed: bool
    factor: float | None
    open_low: bool
    open_high: bool
    # highest over lowest rate of the range inside the grid: `factor`, or a lower bound of it if an end is open
    at_least: float


def bowl(losses: Mapping[float, float | None], tolerance: float = 0.05) -> Bowl:
    """The width of the bowl of losses by learning rate, where None is a run that diverged.

    Between two rates of the grid the loss is interpolated linearly in log(rate). A diverged run counts as infinitely
    bad, so the range ends at the last rate before it. The range is the connected one around the best rate: a second
    dip beyond a ridge does not count. Of two equally good rates the lower one is the best.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}: it must be 0 or more.")
    for rate, loss in losses.items():
        if not 0 < rate < math.inf:
            raise ValueError(f"a learning rate is {rate}: it must be a positive number.")
        if loss is not None and not math.isfinite(loss):
            raise ValueError(f"the loss at learning rate {rate} is {loss}: give None for a run that diverged.")
    grid = sorted((rate, loss) for rate, loss in losses.items() if loss is not None)
    if not grid:
        raise ValueError(f"none of the {len(losses)} learning rates has a finite loss: there is no best rate.")
    best, lowest = min(grid, key=lambda point: (point[1], point[0]))
    limit = lowest + tolerance
    rates = sorted(losses)
    position = rates.index(best)
    low, open_low = _crossing(losses, rates[position::-1], limit)
    high, open_high = _crossing(losses, rates[position:], limit)
    return Bowl(
        best=best,
        loss=lowest,
        low=None if open_low else low,
        high=None if open_high else high,
        bracketed=0 < position < len(rates) - 1,
        factor=None if open_low or open_high else high / low,
        open_low=open_low,
        open_high=open_high,
        at_least=high / low,
    )


def _crossing(losses: Mapping[float, float | None], rates: Sequence[float], limit: float) -> tuple[float, bool]:
    """Where the loss first exceeds the limit, walking from the best rate; (the last rate, True) if it never does."""
    for inside, outside in pairwise(rates):
        near, far = losses[inside], losses[outside]
        assert near is not None
        if far is None:
            return inside, False
        if far > limit:
            return inside * (outside / inside) ** ((limit - near) / (far - near)), False
    return rates[-1], True


@dataclass(frozen=True)
class Trend:
    """The change of a gap per doubling of a size, its interval, and the p-value of the hypothesis "no change"."""

    slope: float
    low: float
    high: float
    p: float
    rungs: int
    # standard error of the slope and its degrees of freedom
    error: float
    degrees: float
    # how far the rungs lie off the line, relative to their errors: about 1 if the line holds. None with two rungs.
    scatter: float | None


def gap_by_size(rungs: Sequence[tuple[float, Pair | tuple[float, float, int]]], level: float = LEVEL) -> Trend:
    """The slope of the gap per doubling of the size (depth or width), by weighted least squares over log2(size).

    Args:
        rungs: (size, gap) with the gap as a Pair or as (estimate, standard error, degrees of freedom of the error).
        level: confidence level of the interval.

    The weights are 1/error^2. The error of the slope is propagated from the errors of the rungs, which are taken as
    independent, with the degrees of freedom of Welch and Satterthwaite. Two rungs have no other source of error. From
    three rungs on, if they lie farther off the line than their errors explain (`scatter` above 1), the error is
    multiplied by the scatter, as Birge (1932) does. A scatter far above 1 says that the gap is no straight line in
    log2(size), and that the slope alone does not describe it. If a rung has no error at all, all weigh the same. In
    simulations with a true line and two to four rungs, the 95% interval covers the slope in 92% to 98% of cases.
    """
    sizes = [size for size, _ in rungs]
    gaps = [(gap.estimate, gap.error, gap.degrees) if isinstance(gap, Pair) else gap for _, gap in rungs]
    if len(rungs) < 2 or len(set(sizes)) < len(sizes):
        raise ValueError(f"the sizes are {sizes}: a trend needs two or more rungs, each of another size.")
    for size, (estimate, error, degrees) in zip(sizes, gaps, strict=True):
        _check_finite(estimate, f"the gap at size {size}")
        _check_finite(error, f"the error at size {size}")
        if not 0 < size < math.inf or error < 0 or degrees < 1:
            raise ValueError(
                f"a rung has size {size}, error {error} and {degrees} degrees of freedom: the size must be positive, "
                "the error 0 or more, and the degrees of freedom 1 or more."
            )
    estimates, errors, degrees_each = zip(*gaps, strict=True)
    weighted = min(errors) > 0
    # relative to the smallest error, so that no square underflows
    weights = [(min(errors) / error) ** 2 if weighted else 1.0 for error in errors]
    doublings = [math.log2(size) for size in sizes]
    middle = _mean(doublings, weights)
    moment = math.fsum(w * (x - middle) ** 2 for w, x in zip(weights, doublings, strict=True))
    shares = [w * (x - middle) / moment for w, x in zip(weights, doublings, strict=True)]
    slope = math.fsum(share * estimate for share, estimate in zip(shares, estimates, strict=True))
    variances = [(share * error) ** 2 for share, error in zip(shares, errors, strict=True)]
    error, scatter = math.sqrt(math.fsum(variances)), None
    if weighted and len(rungs) > 2:
        centre = _mean(estimates, weights)
        distances = [
            (estimate - centre - slope * (x - middle)) / e
            for estimate, x, e in zip(estimates, doublings, errors, strict=True)
        ]
        scatter = math.sqrt(math.fsum(d**2 for d in distances) / (len(rungs) - 2))
        error *= max(1.0, scatter)
    interval = student_interval(slope, error, _satterthwaite(variances, degrees_each), level)
    return Trend(
        slope=slope,
        low=interval.low,
        high=interval.high,
        p=interval.p,
        rungs=len(rungs),
        error=error,
        degrees=interval.degrees,
        scatter=scatter,
    )


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(w * x for w, x in zip(weights, values, strict=True)) / math.fsum(weights)


@dataclass(frozen=True)
class ComputeGain:
    """How many times a run's compute the reference would need for the run's loss.

    `factor` is above 1 if the run is better than the reference. It is None where the reference gives no answer.
    `beyond` then says why: "below" if the loss lies below all losses of the reference, "above" if it lies above all,
    None if the reference's loss does not fall with compute there.
    """

    factor: float | None
    beyond: Literal["below", "above"] | None = None


def compute_gain(reference: Sequence[tuple[float, float]], compute: float, loss: float) -> ComputeGain:
    """The compute-equivalent gain of a run over a reference that was trained with several amounts of compute.

    Args:
        reference: (compute, loss) of each run of the reference, in any order.
        compute: the compute of the run, in the same unit.
        loss: the loss of the run.

    Between two runs of the reference, its loss is interpolated linearly in log(compute). Beyond them nothing is
    extrapolated. If the reference has this loss where its loss rises or stays the same, several amounts of compute
    would fit, and there is no number.
    """
    ladder = sorted(reference)
    if not ladder or len({c for c, _ in ladder}) < len(ladder):
        raise ValueError(f"the reference's compute is {[c for c, _ in ladder]}: give one loss per amount of compute.")
    for amount, value in [*ladder, (compute, loss)]:
        _check_finite(value, f"the loss at compute {amount}")
        if not 0 < amount < math.inf:
            raise ValueError(f"an amount of compute is {amount}: it must be a positive number.")
    if loss < min(value for _, value in ladder):
        return ComputeGain(None, "below")
    if loss > max(value for _, value in ladder):
        return ComputeGain(None, "above")
    if any(before <= loss <= after for (_, before), (_, after) in pairwise(ladder)):
        return ComputeGain(None)
    # every other stretch falls, and the losses are continuous: exactly one stretch holds this loss
    for (less, before), (more, after) in pairwise(ladder):
        if before >= loss >= after:
            return ComputeGain(less * (more / less) ** ((before - loss) / (before - after)) / compute)
    # a reference of one run, with this very loss
    return ComputeGain(ladder[0][0] / compute)
