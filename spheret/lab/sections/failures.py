"""What went wrong in runs that diverged or collapsed, and what to try, in words."""

from __future__ import annotations

from collections.abc import Sequence

from spheret.analysis.failure import failure_of
from spheret.lab.runs import Result

# a page explains so many runs in words; the table has them all
MOST = 6


def advice_words(results: Sequence[Result]) -> list[str]:
    """Where the failure of each of the first runs began and what to try; empty if no run failed."""
    found = [(result, failure) for result in results if (failure := failure_of(result.run, result.lines)) is not None]
    texts = [
        f"{result.label}, learning rate {result.rate:g}, seed {result.seed}. {failure.sentence} {failure.what_to_try}"
        for result, failure in found[:MOST]
    ]
    if len(found) > MOST:
        texts.append(f"The table has the other {len(found) - MOST} runs that failed.")
    if texts:
        texts.append(
            "The flags are for a new run. A resumed run would compute the same values again. --init-from starts from "
            "the weights of a checkpoint that was saved before the step. spheret inspect shows every sublayer of one."
        )
    return texts
