"""Process-wide settings, applied only in actors that have a process of their own."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of the two settings of glibc's allocator in its `malloc.h`."""
KEPT_BYTES = 128 << 20
"""Largest number of freed bytes at the top of the heap that a process keeps."""
HEAP_BYTES = 32 << 20
"""Smallest block that gets pages of its own, which go back when it is freed: the largest value that glibc accepts."""


def keep_freed_memory() -> bool:
    """Let the allocator keep up to KEPT_BYTES of freed memory instead of returning it to the operating system. Returns
    whether this process has an allocator with that setting, which is glibc's.

    A step on a CPU frees its tensors and needs as many in the next microbatch or token. With glibc's own limits the
    system took their pages away each time and cleared others for them, thousands a step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES))


def settle() -> None:
    """Take all objects that exist now, most of them imported modules, out of the garbage collector's sight. It first
    removes the garbage among them. Otherwise each full collection looks at all of them, which stops the process for a
    tenth of a second."""
    gc.collect()
    gc.freeze()
