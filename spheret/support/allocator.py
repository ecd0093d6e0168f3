"""The memory allocator of the C library. On CPUs it matters more for the time of a step than most kernels."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> bool:
    """Let the C library reuse large blocks instead of asking the system for fresh pages each time.

    The page faults of fresh memory cost as much as the kernels themselves, and come at random. Returns whether it
    worked: only glibc has mallopt.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3
    return bool(mallopt(m_mmap_threshold, 1 << 30) and mallopt(m_trim_threshold, (1 << 31) - 1))
