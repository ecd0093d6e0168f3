"""Paired comparisons: an interval over validation documents, one over seeds, and many of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean difference with its confidence interval of Student's t, and the p-value of there being none."""

    estimate: float
    low: float
    high: float
    # degrees of freedom; 0 where a single observation leaves no error to estimate
    degrees: int
    p: float


def within(t: float, degrees: int) -> float:
    """P(|T| <= t) of Student's t by finite sums, for whole degrees of freedom (Abramowitz and Stegun 26.7.3-4)."""
    angle = math.atan2(abs(t), math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for power in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@lru_cache(maxsize=1024)
def quantile(level: float, degrees: int) -> float:
    """The t with P(|T| <= t) = level, by bisection."""
    low, high = 0.0, 1.0
    while within(high, degrees) < level:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if within(middle, degrees) < level else (low, middle)
    return high


def _interval(estimate: float, error: float, degrees: int, level: float) -> Interval:
    if degrees < 1:
        return Interval(estimate, -math.inf, math.inf, 0, 1.0)
    reach = quantile(level, degrees) * error
    # two identical runs: no difference and no error
    p = (0.0 if estimate else 1.0) if error == 0 else 1 - within(estimate / error, degrees)
    return Interval(estimate, estimate - reach, estimate + reach, degrees, p)


def over_documents(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], level: float = LEVEL
) -> Interval:
    """The mean loss of ours minus theirs over the same validation documents, each [number, tokens, summed loss].

    Tokens of one document are not independent, so documents are what was sampled: the estimate is the ratio
    sum(differences)/sum(tokens), its error the delete-one-document jackknife, and the degrees of freedom those of
    the effective number of documents, (sum n)^2/sum n^2 (Kish), because a few long ones may hold most of the tokens.
    """
    if [tuple(d[:2]) for d in ours] != [tuple(d[:2]) for d in theirs]:
        raise ValueError(
            "the two runs were not evaluated on the same validation documents: evaluate both on the same data with "
            "the same block and eval_windows."
        )
    tokens = [int(d[1]) for d in ours]
    differences = [a[2] - b[2] for a, b in zip(ours, theirs, strict=True)]
    total, count, size = math.fsum(differences), sum(tokens), len(tokens)
    if size < 2:
        return _interval(total / count, 0.0, 0, level)
    estimate = total / count
    without = [(total - d) / (count - n) for d, n in zip(differences, tokens, strict=True)]
    error = math.sqrt((size - 1) / size * math.fsum((x - estimate) ** 2 for x in without))
    degrees = max(1, count * count // sum(n * n for n in tokens) - 1)
    return _interval(estimate, error, degrees, level)


def over_seeds(differences: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean of one paired difference a seed: what another seed would change is in the interval."""
    mean, deviation = mean_and_deviation(differences)
    return _interval(mean, deviation / math.sqrt(len(differences)), len(differences) - 1, level)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the sample standard deviation (0 for a single value)."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted so that below 0.05 any false find among all has a chance of at most 0.05 (Holm 1979)."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - rank)))
        adjusted[index] = largest
    return adjusted
