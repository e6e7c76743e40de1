"""Counts the rows that refer to each blob, and names the partition that holds the blobs of a field.

The blobs of the field `images` of the partition `train` are the rows of the partition `train#images`, with their
digests as keys. It belongs to `train`, so that only puts and clears of rows of `train` create and remove blobs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_SEPARATOR = "#"


def holder_of_blobs(partition: str, field: str) -> str:
    """Return the name of the partition that holds the blobs of a field of another partition."""
    return f"{partition}{_SEPARATOR}{field}"


def holds_blobs(partition: str) -> bool:
    """Return whether a partition of this name can only be one that holds the blobs of another."""
    return _SEPARATOR in partition


def with_its_rows(partition: str) -> str:
    """Return the name of the partition whose rows refer to the blobs of a partition.

    It is the partition itself if that holds no blobs. Both are served by the same directory.
    """
    return partition.partition(_SEPARATOR)[0]


class RowReferences:
    """The references of the rows of a partition to the blobs of one field.

    Rows and blobs are given by their numbers in their partitions.
    """

    def __init__(self) -> None:
        self.of_row: dict[int, np.ndarray] = {}
        """Distinct blobs of each row that refers to any, int64."""
        self._num_rows: dict[int, int] = {}
        """Number of rows that refer to each blob."""

    def set(self, rows: np.ndarray, counts: np.ndarray, blobs: np.ndarray) -> np.ndarray:
        """Make rows refer to blobs, in place of those to which they referred before. counts: number of references of
        each row. blobs: the blobs, row after row. Returns the blobs to which no row refers any more."""
        before = {row: self.of_row.pop(row) for row in rows.tolist() if row in self.of_row}
        ends = np.cumsum(counts).tolist()
        for row, start, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
            if start < end:
                distinct = self.of_row[row] = np.unique(blobs[start:end])
                for blob in distinct.tolist():
                    self._num_rows[blob] = self._num_rows.get(blob, 0) + 1
        return self._forget(before.values())

    def drop(self, rows: Iterable[int]) -> np.ndarray:
        """Forget the references of rows, which may have none. Returns the blobs to which no row refers any more."""
        return self._forget([self.of_row.pop(row) for row in rows if row in self.of_row])

    def referrers(self, blobs: np.ndarray) -> np.ndarray:
        """Return the rows that refer to at least one of `blobs`, int64."""
        return np.array([row for row, listed in self.of_row.items() if np.isin(listed, blobs).any()], dtype=np.int64)

    def _forget(self, dropped: Iterable[np.ndarray]) -> np.ndarray:
        free: list[int] = []
        for listed in dropped:
            for blob in listed.tolist():
                self._num_rows[blob] -= 1
                if not self._num_rows[blob]:
                    del self._num_rows[blob]
                    free.append(blob)
        return np.array(free, dtype=np.int64)
