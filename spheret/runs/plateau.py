"""The plateau: updates at which a run knew the token frequencies and no more."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from spheret.model.monitor import ENTROPY_MARGIN
from spheret.runs.metrics import MetricsRecord

# the median of so many losses is compared, because one batch may be easier or harder than all
WINDOW = 10
# a run that spent this share of its updates there did not simply pass
LONG = 0.2


def on_plateau(losses: Sequence[float], unigram_entropy: float) -> bool:
    """Whether the median of the last WINDOW losses, the newest last, lies at the unigram entropy."""
    if len(losses) < WINDOW:
        return False
    return abs(statistics.median(losses[-WINDOW:]) - unigram_entropy) < ENTROPY_MARGIN * unigram_entropy


def plateau_updates(lines: Iterable[MetricsRecord], unigram_entropy: float) -> int:
    """How many updates of a run lie on the plateau. lines: those of metrics.jsonl, in order."""
    losses: list[float] = []
    count = 0
    for line in lines:
        if line.loss is not None:
            losses = [*losses[1 - WINDOW :], line.loss]
            count += on_plateau(losses, unigram_entropy)
    return count
