"""How many threads small matrices are worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def few_threads(width: int) -> Iterator[None]:
    """One thread for narrow models: decompositions of small matrices only wait for each other on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if width <= 256 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
