"""The plateau: updates at which a run knew the token frequencies and no more."""

from __future__ import annotations

from collections.abc import Iterable

from spheret.runs.metrics import MetricsRecord
from spheret.watching.losses import PLATEAU_WINDOW, on_plateau

# a run that spent this share of its updates there did not simply pass
LONG = 0.2


def plateau_updates(lines: Iterable[MetricsRecord], unigram_entropy: float) -> int:
    """How many updates of a run lie on the plateau. lines: those of metrics.jsonl, in order."""
    losses: list[float] = []
    count = 0
    for line in lines:
        if line.loss is not None:
            losses = [*losses[1 - PLATEAU_WINDOW :], line.loss]
            count += on_plateau(losses, unigram_entropy)
    return count
