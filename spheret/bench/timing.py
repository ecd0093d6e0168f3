"""How every benchmark here measures: one process, contestants interleaved, medians."""

from __future__ import annotations

import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spheret.version import __version__


def keep_freed_memory() -> bool:
    """Let the C library reuse large blocks instead of asking the system for fresh pages each time.

    The page faults of fresh memory cost as much as the kernels measured, and hit contestants at random. Where there
    is no mallopt (not glibc) nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3
    return bool(mallopt(m_mmap_threshold, 1 << 30) and mallopt(m_trim_threshold, (1 << 31) - 1))


def interleaved(
    contestants: dict[str, Callable[[], object]], repeats: int, tick: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """The median seconds of each, after two warm-up rounds; every round runs all, each time from another one on."""
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, repeats):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            _synchronize()
            start = time.perf_counter()
            contestants[name]()
            _synchronize()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
            tick()
    return {name: statistics.median(values) for name, values in times.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "spheret": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": model,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"command": " ".join(["spheret", *sys.argv[1:]]), **machine(), **result}, indent=1) + "\n"
        )
