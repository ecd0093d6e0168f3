"""Intervals, p-values and a correction for many comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean difference, its Student's t confidence interval, and the p-value of the hypothesis "no difference"."""

    estimate: float
    low: float
    high: float
    # degrees of freedom, whole but for Welch's; 0 if there is a single observation, which leaves no error to estimate
    degrees: float
    p: float


@lru_cache(maxsize=1024)
def quantile(level: float, degrees: float) -> float:
    """The t with P(|T| <= t) = level."""
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, degrees))


def p_value(t: float, degrees: float) -> float:
    """The two-sided p-value of Student's t: P(|T| > |t|)."""
    # scipy.stats.t.sf calls this function too, after checks that take 50 times as long
    from scipy import special

    return float(2 * special.stdtr(degrees, -abs(t)))


def student_interval(estimate: float, error: float, degrees: float, level: float = LEVEL) -> Interval:
    """The interval and p-value of an estimate with this standard error, which was itself estimated.

    Args:
        estimate: the estimated difference.
        error: its standard error.
        degrees: the degrees of freedom of the error. Below 1 the interval is unbounded.
        level: confidence level of the interval.
    """
    if degrees < 1:
        return Interval(estimate, -math.inf, math.inf, 0, 1.0)
    half_width = quantile(level, degrees) * error
    # two identical runs have no difference and no error
    p = (0.0 if estimate else 1.0) if error == 0 else p_value(estimate / error, degrees)
    return Interval(estimate, estimate - half_width, estimate + half_width, degrees, p)


def over_seeds(differences: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean of one paired difference per seed. The interval includes what a different seed would change."""
    mean, deviation = mean_and_deviation(differences)
    return student_interval(mean, deviation / math.sqrt(len(differences)), len(differences) - 1, level)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the sample standard deviation (0 for a single value)."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values after Holm's correction (1979), which scipy does not have.

    If every adjusted p-value below 0.05 is called a difference, the probability of one or more false differences is
    at most 0.05.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def ends(low: float, high: float) -> str:
    """The ends of an interval of a difference, for a table."""
    return f"{low:+.4f} to {high:+.4f}" if math.isfinite(high - low) else "none"
