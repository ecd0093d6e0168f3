"""The memory allocator of the C library. On CPUs it matters more for the time of a step than most kernels."""

from __future__ import annotations

import ctypes
import mmap
import sys

# blocks below this size come from the heap; that heap is set up for huge pages in one piece of just under this size
HEAP_BLOCK = 1 << 30
HUGE_PAGE = 2 << 20


def keep_freed_memory() -> bool:
    """Let the C library reuse large blocks instead of asking the system for fresh pages each time.

    The page faults of fresh memory cost as much as the kernels themselves, and come at random. Returns whether it
    worked: only glibc has mallopt. The heap is then asked to lie in huge pages.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt = library.mallopt
    # Windows has no name for the program itself
    except (OSError, AttributeError, TypeError):
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3
    kept = bool(mallopt(m_mmap_threshold, HEAP_BLOCK) and mallopt(m_trim_threshold, (1 << 31) - 1))
    if kept:
        _use_huge_pages(library)
    return kept


def _use_huge_pages(library: ctypes.CDLL) -> None:
    """Ask for huge pages for the next GB of the heap, where the system gives them on request.

    The activations of a small model fill tens of MB. In pages of 4 KB they are more pages than a processor's table of
    addresses holds, and every kernel waits for the addresses. The memory is reserved, not used: a page is taken when
    something is written to it.
    """
    if not sys.platform.startswith("linux") or _address_space_is_limited():
        return
    malloc, free, madvise = library.malloc, library.free, library.madvise
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    size = HEAP_BLOCK - HUGE_PAGE
    start = malloc(size)
    if not start:
        return
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    # a kernel without huge pages refuses, and all is as before
    madvise(first, (start + size - first) // HUGE_PAGE * HUGE_PAGE, mmap.MADV_HUGEPAGE)
    # the block becomes the unused top of the heap, from which later blocks are cut
    free(start)


def _address_space_is_limited() -> bool:
    """Whether this process may reserve only so much memory, used or not: then none is reserved here."""
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)
