"""Memory of the C library, which on CPUs decides more of a step's time than most kernels."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> bool:
    """Let the C library reuse large blocks instead of asking the system for fresh pages each time.

    The page faults of fresh memory cost as much as the kernels themselves, and hit at random. Where there is no
    mallopt (not glibc) nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3
    return bool(mallopt(m_mmap_threshold, 1 << 30) and mallopt(m_trim_threshold, (1 << 31) - 1))
