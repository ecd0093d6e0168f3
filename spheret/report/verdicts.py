"""A verdict for each pair of contestants, from paired differences: never a bare ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from spheret.report.results import Result, Study
from spheret.report.statistics import Interval, holm, over_documents, over_seeds

EVALUATION_NOISE = "evaluation noise only"
# the chance of any false winner among all pairs
FALSE_WINNER = 0.05


@dataclass(frozen=True)
class Pair:
    """Validation loss of the first minus the second; without an interval the verdict says why."""

    first: str
    second: str
    verdict: str
    interval: Interval | None = None
    # what the interval holds the noise of
    noise: str = ""
    source: str = ""


def pairs(study: Study) -> list[Pair]:
    """Every pair of contestants, in the order of the tables."""
    found = [compare(a, b) for a, b in combinations(study.contestants.values(), 2)]
    over = [index for index, pair in enumerate(found) if pair.interval is not None and pair.noise != EVALUATION_NOISE]
    adjusted = holm([found[index].interval.p for index in over])  # type: ignore[union-attr]
    for index, p in zip(over, adjusted, strict=True):
        found[index] = replace(found[index], verdict=_verdict(found[index], p))
    return found


def _verdict(pair: Pair, p: float) -> str:
    assert pair.interval is not None
    if p >= FALSE_WINNER:
        return "no difference at all" if pair.interval.estimate == pair.interval.low == 0 else "no winner"
    return f"{pair.first if pair.interval.estimate < 0 else pair.second} is better"


def compare(ours: Sequence[Result], theirs: Sequence[Result]) -> Pair:
    """One pair; the winner among several seeds is decided later, when all pairs are known."""
    first, second = ours[0].label, theirs[0].label
    said = []
    for results in (ours, theirs):
        diverged = [result for result in results if result.stopped is not None]
        if diverged:
            where = f" in {len(diverged)} of {len(results)} seeds" if len(results) > 1 else ""
            said.append(f"{diverged[0].label} diverged{where}")
    if said:
        return Pair(first, second, ", ".join(said))
    for result in (*ours, *theirs):
        if not result.finished:
            return Pair(first, second, f"not compared: {result.label} is not finished")
    by_seed = {result.seed: result for result in theirs}
    shared = [(result, by_seed[result.seed]) for result in ours if result.seed in by_seed]
    if not shared:
        return Pair(first, second, "not compared: no seed in common")
    if len(shared) > 1:
        return _over_seeds(first, second, shared)
    a, b = shared[0]
    documents = [(result.validation or {}).get("val_documents") for result in (a, b)]
    if not documents[0] or not documents[1]:
        return Pair(first, second, "not compared: no validation documents")
    interval = over_documents(documents[0], documents[1])
    same = interval.estimate == interval.low == interval.high == 0
    sources = [f"{result.name}[{result.step}].val_documents" for result in (a, b)]
    return Pair(
        first,
        second,
        "no difference at all" if same else "no winner: one seed",
        interval,
        EVALUATION_NOISE,
        f"over_documents({', '.join(sources)})",
    )


def _over_seeds(first: str, second: str, shared: Sequence[tuple[Result, Result]]) -> Pair:
    losses = [(a.val_loss, b.val_loss) for a, b in shared]
    differences = [a.value - b.value for a, b in losses if a is not None and b is not None]
    terms = ", ".join(f"{a.source} - {b.source}" for a, b in losses if a is not None and b is not None)
    return Pair(first, second, "", over_seeds(differences), f"{len(shared)} seeds", f"over_seeds({terms})")
