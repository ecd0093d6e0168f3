"""What the contestants of a group cost, and their losses where all have spent the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spheret.lab.answers import GroupAnswer
from spheret.lab.rows import Row


@dataclass(frozen=True)
class Cost:
    """What a contestant costs, relative to another one, and its loss where all have spent the same.

    A loss at an equal budget is read from the curve of the run; None if the run was not evaluated so early.
    """

    label: str
    flops: float
    seconds: float | None
    loss: float
    at_equal_flops: float | None
    at_equal_seconds: float | None


def costs(answer: GroupAnswer) -> tuple[str, list[Cost]]:
    """What each compared contestant costs, relative to the one whose label comes first in the answer."""
    if answer.seed_table is None:
        return "", []
    compared, seeds = answer.compared, answer.seed_table.seeds
    first = {entry.label: entry.finals[seeds[0]] for entry in compared}
    base = answer.reference if answer.reference in first else compared[0].label
    flops = {label: float(row.flops) for label, row in first.items()}
    seconds = {label: row.steps * row.step_seconds for label, row in first.items() if row.step_seconds is not None}
    timed = len(seconds) == len(first)
    found = []
    for entry in compared:
        label, runs = entry.label, [entry.finals[seed] for seed in seeds]
        found.append(
            Cost(
                label=label,
                flops=flops[label] / flops[base],
                seconds=seconds[label] / seconds[base] if timed else None,
                loss=answer.seed_table.means[label],
                at_equal_flops=_early_loss(runs, min(flops.values()) / flops[label]),
                at_equal_seconds=_early_loss(runs, min(seconds.values()) / seconds[label]) if timed else None,
            )
        )
    return base, found


def _early_loss(runs: Sequence[Row], share: float) -> float | None:
    """The mean loss of some runs after a share of their steps, linear between evaluations."""
    losses = [_on_curve(row.curve, share * row.steps) for row in runs]
    known = [loss for loss in losses if loss is not None]
    return math.fsum(known) / len(known) if len(known) == len(losses) else None


def _on_curve(curve: Sequence[tuple[int, float | None]], step: float) -> float | None:
    for (before, first), (after, second) in pairwise(curve):
        if before <= step <= after and first is not None and second is not None:
            return first + (second - first) * (step - before) / (after - before)
    return next((loss for at, loss in curve if at == step), None)
