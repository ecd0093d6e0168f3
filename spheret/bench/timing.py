"""How every benchmark here measures: one process, contestants interleaved, medians."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The median seconds of each, after two warm-up rounds; every round runs all, each time from another one on."""
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, repeats):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            _synchronize()
            start = clock()
            contestants[name]()
            _synchronize()
            if turn >= 0:
                times[name].append(clock() - start)
            tick()
    return {name: statistics.median(values) for name, values in times.items()}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size, by least squares: 1 is linear growth."""
    x, y = ([math.log(value) for value in values] for values in (sizes, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
