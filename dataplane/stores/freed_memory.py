"""A process setting for stores that receive through the C library's heap: freed memory is kept, not returned."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc refuses more."""
_TRIM_FROM_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Have glibc keep up to a GiB that was freed for what is allocated next. Whether the C library could be told.

    A frame that ZeroMQ receives is allocated from the heap. Left to itself, glibc maps and unmaps large ones each time,
    and the page faults, one for every 4 KiB, take as long as the transfer: a get of 8 MiB needs 5 ms so, else 10.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _TRIM_FROM_BYTES))
