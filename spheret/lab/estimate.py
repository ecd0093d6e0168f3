"""How long the rest of a race or a study will take, said before it starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch

from spheret.lab.laboratory import Laboratory
from spheret.lab.plan import Group
from spheret.lab.rows import Row
from spheret.lab.stages import expected
from spheret.plan.cost import optimizer_flops, step_flops

# of a process, before its first step
START_SECONDS = 3.0
# of a training step to that of its matrix products alone, for small models on one core
OVERHEAD = 3.0


def seconds_left(laboratory: Laboratory, jobs: int, others: Iterable[Row] = ()) -> float:
    """About how long the runs take that are still to come, so many at a time.

    others: rows of this machine. The speed is theirs, or that of a product of two matrices if there are none.
    """
    plan, rows = laboratory.plan, laboratory.rows()
    known = [row.seconds / row.flops for row in (*rows.values(), *others) if row.seconds > 0]
    each = statistics.median(known) if known else OVERHEAD * _seconds_per_flop()
    total = 0.0
    for group in plan.groups:
        ended = sum(key.group == group.name for key in rows)
        total += max(0, expected(plan, rows, group) - ended) * (START_SECONDS + each * _flops(laboratory, group))
    return total / jobs


def _flops(laboratory: Laboratory, group: Group) -> float:
    config = laboratory.config(group, group.contestants[0])
    tokens, train = config.train.tokens_per_update, config.train
    return train.steps * (step_flops(config.model, tokens) + optimizer_flops(config.model, train.optimizer))


def _seconds_per_flop() -> float:
    size, before = 512, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix, times = torch.ones(size, size), []
        for _ in range(5):
            start = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return min(times) / (2 * size**3)


def duration_words(seconds: float) -> str:
    """A time that is not known well: about 40 seconds, about 12 minutes, about 3.5 hours."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} seconds"
    return f"about {round(seconds / 60)} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"
