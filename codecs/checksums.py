"""Computes and checks the checksums of a block right behind the copy of its bytes, while the cache has them.

A checksum is the xxh3 of CHECKSUM_ROWS rows of a field (a row block). Reading memory once more would take longer than
the xxh3 itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from .integers import distinct

xxh3 = xxhash.xxh3_64_intdigest

COPY_BYTES = 2 << 20
"""Largest number of bytes that are copied before their checksums are computed, so that the cache still has them. From 1
MiB on, a copy does not read first what it overwrites, which made it up to 1.6 times as fast where it was measured."""

CHECKSUM_ROWS = 256
"""Number of rows of a block that share one xxh3 checksum per field (a row block). A reader of a few rows verifies only
the row blocks that contain these rows. As many rows as a block has by default: with a quarter of them, the calls for
each checksum took as long as the xxh3 itself."""


class ChecksumMismatch(ValueError):
    """Bytes of a block differ from what was written. The message names the field, its rows, and the expected and found
    xxh3."""

    def __init__(self, message: str, block: int) -> None:
        """block: number of the block, by which the caller knows it."""
        super().__init__(message)
        self.block = block


def mismatch(field: str, block: int, what: str, expected: int, found: int) -> ChecksumMismatch:
    """Return the error for a part of a field (`what`) that has another xxh3 than expected."""
    return ChecksumMismatch(
        f"field {field!r}, {what}: xxh3 of the bytes read is {found:016x}, but {expected:016x} was written", block
    )


def row_block_ends(ends: np.ndarray) -> list[int]:
    """Return the end offsets of every CHECKSUM_ROWS-th row and of the last row, given those of all rows."""
    return [*ends[CHECKSUM_ROWS - 1 : -1 : CHECKSUM_ROWS].tolist(), *ends[-1:].tolist()]


class RunningSums:
    """Computes the xxh3 of row blocks, or of other ranges of bytes that follow one another, from pieces of any size."""

    def __init__(self, ends: Sequence[int]) -> None:
        """ends: byte offset at which each range ends."""
        self.sums: list[int] = []
        """Checksums of the ranges of which all bytes have been fed."""
        self._ends = ends
        self._fed_bytes = 0
        self._digest = xxhash.xxh3_64()

    def feed(self, data: memoryview) -> None:
        """Take the bytes that follow those of the calls before."""
        digest, base, begin = self._digest, self._fed_bytes, 0
        self._fed_bytes += len(data)
        for end in self._ends[len(self.sums) :]:
            if end > self._fed_bytes:
                break
            digest.update(data[begin : end - base])
            self.sums.append(digest.intdigest())
            digest.reset()
            begin = end - base
        digest.update(data[begin:])


class FieldSums:
    """Checks the row blocks of one field of a block that is being read, each once its first byte was copied."""

    def __init__(
        self, field: str, block: int, num_rows: int, values: np.ndarray, ends: Sequence[int], sums: Sequence[int]
    ) -> None:
        """Raise ValueError if the row blocks are not all of the values part.

        field: name, for error messages. block: number by which the caller knows the block. values: the values part,
        uint8 1-D. ends, sums: byte offset at which each row block ends, and its checksum.
        """
        self._bounds = [0, *ends]
        if self._bounds[-1] != len(values):
            raise ValueError(f"field {field!r}: {len(values)} bytes, but its rows have {self._bounds[-1]}")
        self._field = field
        self._block = block
        self._num_rows = num_rows
        self._values = values.data
        self._expected: list[int | None] = [*sums]
        """Checksum of each row block; None once it has been checked."""
        self._unchecked = len(self._expected)

    def copy(self, target: memoryview, begin: int, end: int) -> None:
        """Copy the bytes `begin:end` of the values part into `target`, and check the row blocks that they belong to.
        Raises ChecksumMismatch."""
        if end - begin > COPY_BYTES:
            for start in range(begin, end, COPY_BYTES):
                stop = min(start + COPY_BYTES, end)
                self.copy(target[start - begin : stop - begin], start, stop)
            return
        target[:] = self._values[begin:end]
        if self._unchecked:
            number = bisect_right(self._bounds, begin) - 1
            while self._bounds[number] < end:
                self._check(number)
                number += 1

    def check_rows(self, rows: np.ndarray) -> None:
        """Check the row blocks that hold these rows. rows: positions of rows in the block, `[N]`. Raises
        ChecksumMismatch."""
        for number in distinct(rows // CHECKSUM_ROWS).tolist():
            self._check(number)

    def _check(self, number: int) -> None:
        expected = self._expected[number]
        if expected is None:
            return
        self._expected[number] = None
        self._unchecked -= 1
        found = xxh3(self._values[self._bounds[number] : self._bounds[number + 1]])
        if found != expected:
            first, behind = number * CHECKSUM_ROWS, min((number + 1) * CHECKSUM_ROWS, self._num_rows)
            raise mismatch(self._field, self._block, f"rows {first} to {behind - 1}", expected, found)


Sums = Mapping[int, FieldSums]
"""For each block number, the checksums of the field that is read."""
