"""Tracks the free ranges of one memory segment, first fit, with neighbours merged."""

from __future__ import annotations

from bisect import bisect_left


class FreeRanges:
    """Hands out and takes back byte ranges of `[0, size_bytes)`. Pure bookkeeping, not thread-safe.

    It is first fit over a sorted list. With blocks of one batch shape (the usual case) it does not fragment; a
    worst-case mix of sizes can leave holes, for which a pool has some slack over its capacity.
    """

    __slots__ = ("size_bytes", "free_bytes", "_offsets", "_sizes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._offsets = [0]
        self._sizes = [size_bytes]

    @property
    def unused(self) -> bool:
        """Whether nothing is handed out."""
        return self.free_bytes == self.size_bytes

    def holds(self, nbytes: int) -> bool:
        """Return whether `take` would find so many bytes."""
        return nbytes <= self.free_bytes and max(self._sizes, default=0) >= nbytes

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` (> 0) that now belong to the caller, or None when no hole is large enough."""
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
        """Take back a range that `take` handed out."""
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
