"""How many threads torch uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spheret.support.machine import cores

# a checkpoint of a larger machine may ask for more threads than eight per core here, within reason
MOST_THREADS = 1024


def check_threads(flag: str, threads: int) -> int:
    """Return a number of threads, or raise if it is not between one and eight per core."""
    most = 8 * cores()
    if not 1 <= threads <= most:
        raise ValueError(f"{flag} must lie between 1 and {most}, eight per core, got {threads}.")
    return threads


def saved_threads(threads: Any, path: object) -> int:
    """Return the number of threads in a checkpoint, or raise if no machine has so many."""
    if type(threads) is not int or not 1 <= threads <= max(MOST_THREADS, 8 * cores()):
        raise ValueError(
            f"{path} asks for {threads!r} threads, and between 1 and {MOST_THREADS} are usual: give --threads."
        )
    return threads


@contextmanager
def few_threads(width: int) -> Iterator[None]:
    """Within the block torch uses one thread for widths up to 256: small decompositions are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if width <= 256 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
