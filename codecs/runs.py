"""Runs: rows that are neighbours both where they are read and where they are wanted, copied in one piece.

The byte-moving core under reading blocks and selecting rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

GATHER_BYTES = 256
"""Rows of one size up to this are moved by an indexed copy instead of one by one when they are scattered."""


@dataclass(frozen=True, slots=True)
class Runs:
    """N wanted rows as R maximal runs."""

    first: np.ndarray
    """int64 `[R]`: position of each run's first row among the wanted rows."""
    source: np.ndarray
    """`[R]`: which source the run is read from."""
    num_rows: int
    """N."""

    def totals(self, per_row: np.ndarray) -> np.ndarray:
        """int64 `[R]`: sum of int64 `per_row` `[N]` over each run."""
        if not len(self.first):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(per_row, self.first, dtype=np.int64)


def find_runs(source: np.ndarray, row: np.ndarray) -> Runs:
    """Runs of rows `row` `[N]` of sources `source` `[N]`, in the order wanted."""
    num_rows = len(row)
    if not num_rows:
        return Runs(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
    breaks = np.empty(num_rows, dtype=bool)
    breaks[0] = True
    np.not_equal(row[1:], row[:-1] + 1, out=breaks[1:])
    breaks[1:] |= source[1:] != source[:-1]
    first = np.flatnonzero(breaks)
    return Runs(first, source[first], num_rows)


def copy_runs(
    out: np.ndarray, sources: Mapping[int, np.ndarray], source: np.ndarray, start: np.ndarray, nbytes: np.ndarray
) -> None:
    """Fill `out` with R pieces one after another.

    out: uint8 `[sum(nbytes)]`. sources: number -> uint8 1-D. source, start, nbytes: `[R]`, int64 bytes.
    Raises ValueError when a piece reaches beyond its source.
    """
    stop = start + nbytes
    memory = {number: array.data for number, array in sources.items()}
    numbers = source.tolist()
    for number, end in zip(numbers, stop.tolist(), strict=True):
        if end > memory[number].nbytes:
            raise ValueError(f"rows reach to byte {end} of {memory[number].nbytes} in source {number}")
    out_stop = np.cumsum(nbytes)
    target = out.data
    # memoryview slices cost a third of numpy's: with thousands of short rows that is what this loop takes.
    for number, a, b, c, d in zip(
        numbers, start.tolist(), stop.tolist(), (out_stop - nbytes).tolist(), out_stop.tolist(), strict=True
    ):
        target[c:d] = memory[number][a:b]


def copy_rows(
    out: np.ndarray,
    sources: Mapping[int, np.ndarray],
    source: np.ndarray,
    row: np.ndarray,
    item_bytes: int,
    runs: Runs,
) -> None:
    """Fill `out` with N rows of `item_bytes` each: `row` `[N]` of `source` `[N]`; `runs` are those of the two."""
    if item_bytes == 0 or not len(row):
        return
    if item_bytes > GATHER_BYTES or len(runs.first) * 4 < len(row):
        counts = np.diff(runs.first, append=len(row))
        start = row[runs.first].astype(np.int64) * item_bytes
        copy_runs(out, sources, runs.source, start, counts * item_bytes)
        return
    item = np.dtype((np.void, item_bytes))
    target = out.view(item)
    for number, positions in by_source(source):
        target[positions] = sources[number].view(item)[row[positions]]


def by_source(source: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(source number, positions of its rows among the wanted rows), each source once."""
    order = np.argsort(source, kind="stable")
    ordered = source[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for positions in np.split(order, cuts):
        if len(positions):
            yield int(source[positions[0]]), positions


def as_bytes(values: torch.Tensor) -> np.ndarray:
    """uint8 1-D view of a contiguous CPU tensor's memory."""
    if not values.numel():
        return np.empty(0, dtype=np.uint8)  # torch cannot view an empty tensor that came from numpy: its stride is 0
    return values.reshape(-1).view(torch.uint8).numpy()


def exclusive_cumsum(counts: np.ndarray) -> np.ndarray:
    """int64 `[N]`: sum of all entries before each."""
    ends = np.cumsum(counts, dtype=np.int64)
    return ends - counts
