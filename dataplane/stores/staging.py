"""Pools registered buffers that a transfer library reads and writes, and reuses each once its last view is gone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from ...codecs.integers import ALIGN, round_up

MIN_BYTES = 1 << 20
KEEP_BYTES = 256 << 20
"""Limit on the bytes in idle buffers. When a new buffer has to be made, idle ones beyond this limit are freed."""


class _Memory:
    """Holds one buffer of the pool: the raw array, and the aligned range within it."""

    __slots__ = ("raw", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.raw = np.empty(nbytes + ALIGN, np.uint8)
        self.address = round_up(self.raw.ctypes.data, ALIGN)
        self.nbytes = nbytes


class _Loan:
    """Base object of all arrays that share one lent buffer. When the last of them is gone, it is garbage-collected and
    returns the buffer to the pool."""

    __slots__ = ("_pool", "_memory", "__array_interface__")

    def __init__(self, pool: StagingPool, memory: _Memory, nbytes: int) -> None:
        self._pool = pool
        self._memory = memory
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}

    def __del__(self) -> None:
        self._pool._give(self._memory)


class StagingPool:
    """Lends buffers in a few sizes, at most a quarter (or 1 MiB) larger than requested.

    It is thread-safe through deques instead of locks, because the garbage collector may return a buffer at any time,
    even in a thread that holds a lock.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """Keep the library's functions. register, unregister: functions of the transfer library, `register(address,
        nbytes)` and `unregister(address)`."""
        self._register = register
        self._unregister = unregister
        self._idle: defaultdict[int, deque[_Memory]] = defaultdict(deque)

    def take(self, nbytes: int) -> np.ndarray:
        """Lend an uninitialised uint8 array `[nbytes]` at a multiple of ALIGN. The buffer returns to the pool when the
        last view of it is gone."""
        step = max(MIN_BYTES, (1 << nbytes.bit_length()) // 8)
        size = max(step, round_up(nbytes, step))
        try:
            memory = self._idle[size].pop()
        except IndexError:
            self._trim()
            memory = _Memory(size)
            self._register(memory.address, memory.nbytes)
        return np.asarray(_Loan(self, memory, nbytes))

    def idle_bytes(self) -> int:
        """Return the number of bytes in unused buffers."""
        return sum(size * len(idle) for size, idle in list(self._idle.items()))

    def _give(self, memory: _Memory) -> None:
        self._idle[memory.nbytes].append(memory)

    def _trim(self) -> None:
        for size in sorted(self._idle, reverse=True):
            while self.idle_bytes() > KEEP_BYTES and self._idle[size]:
                self._unregister(self._idle[size].popleft().address)
