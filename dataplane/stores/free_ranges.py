"""Tracks the free ranges of a growing pool of memory: allocates first fit, and merges neighbouring free ranges."""

from __future__ import annotations

from bisect import bisect_left


class FreeRanges:
    """Allocates and frees byte ranges of `[0, size_bytes)`, which may grow. Pure bookkeeping, not thread-safe.

    Allocation is first fit over a sorted list. When the blocks come from batches of one shape (the usual case), the
    pool does not fragment. A bad mix of sizes can leave holes, so a pool is made somewhat larger than its capacity.
    """

    __slots__ = ("size_bytes", "free_bytes", "_offsets", "_sizes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._offsets = [0] if size_bytes else []
        self._sizes = [size_bytes] if size_bytes else []

    @property
    def unused(self) -> bool:
        """True when no range is allocated."""
        return self.free_bytes == self.size_bytes

    @property
    def tail_bytes(self) -> int:
        """Number of free bytes at the very end of the pool, to which `grow` adds."""
        if not self._offsets or self._offsets[-1] + self._sizes[-1] != self.size_bytes:
            return 0
        return self._sizes[-1]

    @property
    def largest_bytes(self) -> int:
        """Size in bytes of the largest free range."""
        return max(self._sizes, default=0)

    def grow(self, nbytes: int) -> None:
        """Extend the pool by `nbytes` free bytes at its end."""
        self.size_bytes += nbytes
        self.give(self.size_bytes - nbytes, nbytes)

    def holds(self, nbytes: int) -> bool:
        """Return whether `take(nbytes)` would succeed."""
        return nbytes <= self.free_bytes and self.largest_bytes >= nbytes

    def take(self, nbytes: int) -> int | None:
        """Allocate `nbytes` (> 0) and return their offset, or None when no free range is large enough."""
        if nbytes > self.free_bytes:
            return None
        for position, size in enumerate(self._sizes):
            if size >= nbytes:
                offset = self._offsets[position]
                if size == nbytes:
                    del self._offsets[position], self._sizes[position]
                else:
                    self._offsets[position] = offset + nbytes
                    self._sizes[position] = size - nbytes
                self.free_bytes -= nbytes
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range that `take` allocated."""
        position = bisect_left(self._offsets, offset)
        before = position > 0 and self._offsets[position - 1] + self._sizes[position - 1] == offset
        after = position < len(self._offsets) and offset + nbytes == self._offsets[position]
        if before and after:
            self._sizes[position - 1] += nbytes + self._sizes[position]
            del self._offsets[position], self._sizes[position]
        elif before:
            self._sizes[position - 1] += nbytes
        elif after:
            self._offsets[position] = offset
            self._sizes[position] += nbytes
        else:
            self._offsets.insert(position, offset)
            self._sizes.insert(position, nbytes)
        self.free_bytes += nbytes
