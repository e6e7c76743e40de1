"""Pools registered buffers that a transfer library reads and writes; a buffer is used again when its last view is
gone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from ...codecs.integers import round_up
from ...codecs.memory import ALIGN

MIN_BYTES = 1 << 20
KEEP_BYTES = 256 << 20
"""Number of idle bytes above which buffers are freed when one of another size is made."""


class _Memory:
    """Holds one buffer: the raw array and its aligned range."""

    __slots__ = ("raw", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.raw = np.empty(nbytes + ALIGN, np.uint8)
        self.address = round_up(self.raw.ctypes.data, ALIGN)
        self.nbytes = nbytes


class _Loan:
    """Serves as the base of the arrays that were handed out. It is collected with the last of them, and gives the
    buffer back."""

    __slots__ = ("_pool", "_memory", "__array_interface__")

    def __init__(self, pool: StagingPool, memory: _Memory, nbytes: int) -> None:
        self._pool = pool
        self._memory = memory
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}

    def __del__(self) -> None:
        self._pool._give(self._memory)


class StagingPool:
    """Lends buffers in a few sizes, at most a quarter (or 1 MiB) larger than asked.

    It is thread-safe by deques, because a collected array that gives its buffer back may interrupt whoever holds a
    lock.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """register, unregister: the library's functions `register(address, nbytes)` and `unregister(address)`."""
        self._register = register
        self._unregister = unregister
        self._idle: defaultdict[int, deque[_Memory]] = defaultdict(deque)

    def take(self, nbytes: int) -> np.ndarray:
        """Lend uint8 `[nbytes]` at a multiple of ALIGN, with anything in it. It returns to the pool when its last
        view is gone."""
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
        """Number of bytes of the buffers that nobody uses."""
        return sum(size * len(idle) for size, idle in list(self._idle.items()))

    def _give(self, memory: _Memory) -> None:
        self._idle[memory.nbytes].append(memory)

    def _trim(self) -> None:
        for size in sorted(self._idle, reverse=True):
            while self.idle_bytes() > KEEP_BYTES and self._idle[size]:
                self._unregister(self._idle[size].popleft().address)
