"""Allocates host memory for the columns that readers receive, and views tensors as bytes.

Memory is reused once its last tensor is gone. New memory from the system costs a page fault per 4 KiB, which takes
several times as long as the copy into it. A reader of many batches of about the same size pays this cost only once.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from .integers import ALIGN, round_up

POOLED_FROM_BYTES = 64 << 10
"""Smallest number of bytes for which an allocation is pooled. Smaller allocations are not pooled, because the C library
recycles them itself."""
KEPT_BYTES = 256 << 20
"""Largest number of bytes of idle buffers that the pool keeps. Further buffers go back to the system."""
HUGE_PAGE = 2 << 20
_STEPS = 4
"""Number of size classes between two powers of two, so that at most a quarter of a buffer is unused."""


class Pool:
    """Pool of idle memory buffers, by size class. Thread-safe; it takes no lock, because the garbage collector may
    return a buffer at any point in any thread."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._free: dict[int, deque[np.ndarray]] = {}
        self._kept_bytes = kept_bytes
        self.idle_bytes = 0
        """Number of bytes of idle buffers. A race between threads can make the number slightly wrong, which only shifts
        the limit."""

    def take(self, nbytes: int) -> np.ndarray:
        """Return an uninitialised uint8 array `[nbytes]`, aligned to 64 bytes. Its memory returns to the pool once the
        array and all its views have been garbage-collected."""
        size = _size_class(nbytes)
        try:
            buffer = self._free[size].pop()
            self.idle_bytes -= size
        except (KeyError, IndexError):
            buffer = _allocate(size)
        # The array is made from a memoryview. Views of a numpy slice would keep `buffer` alive instead of the slice,
        # and the slice's memory would be reused too early.
        array = np.frombuffer(buffer.data[:nbytes], np.uint8)
        weakref.finalize(array, self._give, size, buffer).atexit = False
        return array

    def _give(self, size: int, buffer: np.ndarray) -> None:
        if self.idle_bytes + size <= self._kept_bytes:
            self.idle_bytes += size
            self._free.setdefault(size, deque()).append(buffer)


def _size_class(nbytes: int) -> int:
    step = max(1 << max(nbytes - 1, 1).bit_length() - 1, ALIGN * _STEPS) // _STEPS
    return round_up(nbytes, step)


def _allocate(size: int) -> np.ndarray:
    # numpy requests huge pages for large arrays (torch does not). Only memory that is aligned to a huge page uses them.
    align = HUGE_PAGE if size >= HUGE_PAGE else ALIGN
    memory = np.empty(size + align, dtype=np.uint8)
    begin = -memory.ctypes.data % align
    return memory[begin : begin + size]


_POOL = Pool()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, on any device, as a uint8 1-D view. Raises RuntimeError if the tensor
    is not contiguous."""
    flat = tensor.detach().view(-1)
    # A tensor of at most one element is contiguous at any stride, but torch can view it as bytes only at stride 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def as_bytes(values: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous CPU tensor as a uint8 1-D view. Raises RuntimeError if the tensor is not
    contiguous."""
    return flat_bytes(values).numpy()


def fresh(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return an uninitialised contiguous CPU tensor for the caller to fill. Large tensors use pooled memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < POOLED_FROM_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(_POOL.take(nbytes)).view(dtype).reshape(tuple(shape))
