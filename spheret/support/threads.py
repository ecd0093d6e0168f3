"""How many threads torch uses for small matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def few_threads(width: int) -> Iterator[None]:
    """Within the block torch uses one thread for widths up to 256: small decompositions are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if width <= 256 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
