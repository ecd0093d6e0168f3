"""How every comparison of times is made: all contestants in one process, interleaved, medians."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from spheret.support.meter import Meter

# rounds before the first one that counts
WARM_UP = 2


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = WARM_UP,
) -> dict[str, float]:
    """The median seconds of each contestant, after the warm-up rounds.

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


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size, by least squares: 1 is linear growth."""
    x, y = ([math.log(value) for value in values] for values in (sizes, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show progress on stderr. Call the result once per finished part, `total` times."""
    done = 0
    with Meter(title) as meter:

        def tick() -> None:
            nonlocal done
            done += 1
            meter.show(f"{done} of {total}", done / total)

        meter.show(f"0 of {total}", 0.0)
        yield tick
