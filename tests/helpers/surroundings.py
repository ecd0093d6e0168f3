"""Surroundings of tests that run many commands or models in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch


@contextmanager
def surroundings(cache: Path) -> Iterator[None]:
    """A cache of their own, no network, and one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, {"SPHERET_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}):
        yield
    torch.set_num_threads(threads)
