"""How many threads torch uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spheret.support.machine import cores


def most_threads() -> int:
    """The most threads that a command may have: eight per core."""
    return 8 * cores()


def check_threads(flag: str, threads: int) -> int:
    """Return a number of threads, or raise if it is not between one and eight per core."""
    most = most_threads()
    if not 1 <= threads <= most:
        raise ValueError(f"{flag} must lie between 1 and {most}, eight per core, got {threads}.")
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
