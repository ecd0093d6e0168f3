"""One verdict per pair of contestants, from paired differences. A report never gives a bare ranking."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations

from spheret.report.blocks import detectable
from spheret.report.results import Result, RunGroup
from spheret.report.statistics import LEVEL, Interval, holm, over_documents, over_seeds, quantile

EVALUATION_NOISE = "evaluation noise only"
# the largest probability of one or more false winners in a report
FALSE_WINNER = 0.05


@dataclass(frozen=True)
class Comparison:
    """Validation loss of the first contestant minus that of the second.

    If there is no interval, `verdict` gives the reason.
    p: the p-value after Holm's correction over all pairs; None with one seed.
    smallest: the smallest true difference that would have been seen with a probability of 80%; None with one seed.
    """

    first: str
    second: str
    verdict: str
    interval: Interval | None = None
    # the source of noise that the interval covers
    noise: str = ""
    source: str = ""
    # of the difference the other way round
    reversed_source: str = ""
    p: float | None = None
    smallest: float | None = None


def comparisons(group: RunGroup) -> list[Comparison]:
    """One comparison per pair of contestants, in the order of the tables."""
    compared = [compare(first, second) for first, second in combinations(group.contestants.values(), 2)]
    over_several_seeds = {
        index: comparison.interval.p
        for index, comparison in enumerate(compared)
        if comparison.interval is not None and comparison.noise != EVALUATION_NOISE
    }
    adjusted = holm(list(over_several_seeds.values()))
    at_an_edge = set(group.edge_contestants)
    for index, p in zip(over_several_seeds, adjusted, strict=True):
        verdict = _verdict(compared[index], p, at_an_edge)
        smallest = _smallest(compared[index].interval, len(over_several_seeds))
        compared[index] = replace(compared[index], verdict=verdict, p=p, smallest=smallest)
    return compared


def _smallest(interval: Interval | None, pairs: int) -> float | None:
    """The smallest true difference of a pair that its paired t-test would have shown with a probability of 80%."""
    if interval is None or interval.degrees < 1:
        return None
    error = (interval.high - interval.estimate) / quantile(LEVEL, interval.degrees)
    return detectable(interval.degrees, pairs) * error


def between(compared: Sequence[Comparison], first: str, second: str) -> Comparison | None:
    """The comparison of two contestants, as the loss of the first minus that of the second."""
    for comparison in compared:
        if (comparison.first, comparison.second) == (first, second):
            return comparison
        if (comparison.second, comparison.first) == (first, second):
            interval = comparison.interval
            return replace(
                comparison,
                first=first,
                second=second,
                interval=None if interval is None else interval.mirrored,
                source=comparison.reversed_source,
                reversed_source=comparison.source,
            )
    return None


def _verdict(comparison: Comparison, p: float, at_an_edge: Set[str]) -> str:
    assert comparison.interval is not None
    interval = comparison.interval
    untuned = [label for label in (comparison.first, comparison.second) if label in at_an_edge]
    if untuned:
        return f"no verdict: the best rate of {' and of '.join(untuned)} is at the edge of the grid"
    if p >= FALSE_WINNER:
        return "no difference at all" if interval.estimate == interval.low == 0 else "no winner"
    return f"{comparison.first if interval.estimate < 0 else comparison.second} is better"


def compare(first_runs: Sequence[Result], second_runs: Sequence[Result]) -> Comparison:
    """Compare the runs of two contestants.

    With several seeds the verdict is left empty: `comparisons` fills it in, because Holm's correction needs the
    p-values of all pairs.
    """
    first, second = first_runs[0].label, second_runs[0].label
    divergences = []
    for runs in (first_runs, second_runs):
        diverged = [run for run in runs if run.diverged is not None]
        if diverged:
            share = f" in {len(diverged)} of {len(runs)} seeds" if len(runs) > 1 else ""
            divergences.append(f"{diverged[0].label} diverged{share}")
    if divergences:
        return Comparison(first, second, ", ".join(divergences))
    for run in (*first_runs, *second_runs):
        if not run.finished:
            return Comparison(first, second, f"not compared: {run.label} is not finished")
    second_by_seed = {run.seed: run for run in second_runs}
    shared = [(run, second_by_seed[run.seed]) for run in first_runs if run.seed in second_by_seed]
    if not shared:
        return Comparison(first, second, "not compared: no seed in common")
    if len(shared) > 1:
        return _compare_over_seeds(first, second, shared)
    documents = [None if run.validation is None else run.validation.val_documents for run in shared[0]]
    if not documents[0] or not documents[1]:
        return Comparison(first, second, "not compared: no validation documents")
    interval = over_documents(documents[0], documents[1])
    identical = interval.estimate == interval.low == interval.high == 0
    sources = [f"{run.name}[{run.step}].val_documents" for run in shared[0]]
    return Comparison(
        first,
        second,
        "no difference at all" if identical else "no winner: one seed",
        interval,
        EVALUATION_NOISE,
        f"over_documents({', '.join(sources)})",
        f"over_documents({', '.join(reversed(sources))})",
    )


def _compare_over_seeds(first: str, second: str, shared: Sequence[tuple[Result, Result]]) -> Comparison:
    losses = [(a.val_loss, b.val_loss) for a, b in shared]
    known = [(a, b) for a, b in losses if a is not None and b is not None]
    terms = ", ".join(f"{a.source} - {b.source}" for a, b in known)
    reversed_terms = ", ".join(f"{b.source} - {a.source}" for a, b in known)
    return Comparison(
        first,
        second,
        "",
        over_seeds([a.value - b.value for a, b in known]),
        f"{len(shared)} seeds",
        f"over_seeds({terms})",
        f"over_seeds({reversed_terms})",
    )
