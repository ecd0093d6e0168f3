"""How every comparison of times is made: all contestants in one process, interleaved, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

# rounds before the first one that counts
WARM_UP = 2


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = WARM_UP,
) -> dict[str, float]:
    """The median seconds of each contestant over the rounds after the warm-up.

    Every round runs all contestants once. Each round starts with the next one, so that none is always first.

    tick: called after each run of a contestant: (repeats + warm_up) times per contestant.
    """
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, repeats):
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


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
