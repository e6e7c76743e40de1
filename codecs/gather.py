"""Copies the wanted rows of one field out of blocks into new memory.

Common arguments: `block` and `row` `[N]` give the block number of each wanted row and its position in that block;
`runs` says which of these rows are adjacent (see `find_runs`). `values` and `index` map each block number to the uint8
bytes of the field's values and of its index (row shapes or end offsets) in that block. If a row extends beyond these
bytes, the functions raise ValueError, or IndexError where they select rows by number. `sums` has the checksums of all
that is copied, with which it is checked on the way, so that the functions raise ChecksumMismatch; None checks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import objects
from .batch import Jagged, Ragged
from .checksums import Sums
from .memory import flat_bytes, fresh
from .schema import Field

# ---------------- Runs are rows that are neighbours both where they are read and where they are wanted, so that they
# are copied in one piece. Reading blocks and selecting rows both rest on these functions.

GATHER_BYTES = 256
"""Largest size of a row, in bytes, at which scattered rows of one size are moved by an indexed copy instead of one by
one."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Division of N wanted rows into R runs. A run is a longest possible sequence of rows that are adjacent both in the
    request and in their source (such as a block)."""

    first: np.ndarray
    """Position of each run's first row among the wanted rows, int64 `[R]`."""
    source: np.ndarray
    """Number of the source (such as a block) from which each run is read, `[R]`."""
    num_rows: int
    """Number N of wanted rows."""

    def totals(self, per_row: np.ndarray) -> np.ndarray:
        """Return the sum of `per_row` (int64 `[N]`) over each run, int64 `[R]`."""
        if not len(self.first):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(per_row, self.first, dtype=np.int64)


def find_runs(source: np.ndarray, row: np.ndarray) -> Runs:
    """Divide the wanted rows into runs. source, row: number of each row's source and its position there, `[N]`, in the
    order wanted."""
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
    out: np.ndarray,
    sources: Mapping[int, np.ndarray],
    source: np.ndarray,
    start: np.ndarray,
    nbytes: np.ndarray,
    sums: Sums | None = None,
) -> None:
    """Copy R pieces of bytes into `out`, one after another.

    out: uint8 `[sum(nbytes)]`. sources: source number -> its bytes, uint8 1-D. source, start, nbytes: source number,
    first byte and number of bytes of each piece, int64 `[R]`. Raises ValueError when a piece reaches beyond its source.
    """
    stop = start + nbytes
    memory = {number: array.data for number, array in sources.items()}
    numbers = source.tolist()
    for number, end in zip(numbers, stop.tolist(), strict=True):
        if end > memory[number].nbytes:
            raise ValueError(f"rows reach to byte {end} of {memory[number].nbytes} in source {number}")
    out_stop = np.cumsum(nbytes)
    target = out.data
    runs = zip(numbers, start.tolist(), stop.tolist(), (out_stop - nbytes).tolist(), out_stop.tolist(), strict=True)
    # memoryview slices cost a third of numpy's: with thousands of short rows that is what these loops take.
    if sums is None:
        for number, a, b, c, d in runs:
            target[c:d] = memory[number][a:b]
    else:
        for number, a, b, c, d in runs:
            sums[number].copy(target[c:d], a, b)


def copy_rows(
    out: np.ndarray,
    sources: Mapping[int, np.ndarray],
    source: np.ndarray,
    row: np.ndarray,
    item_bytes: int,
    runs: Runs,
    sums: Sums | None = None,
) -> None:
    """Copy N rows of `item_bytes` bytes each into `out`. source, row: number of each row's source and its position
    there, `[N]`. runs: the runs of these rows."""
    if item_bytes == 0 or not len(row):
        return
    if item_bytes > GATHER_BYTES or len(runs.first) * 4 < len(row):
        counts = np.diff(runs.first, append=len(row))
        start = row[runs.first].astype(np.int64) * item_bytes
        copy_runs(out, sources, runs.source, start, counts * item_bytes, sums)
        return
    item = np.dtype((np.void, item_bytes))
    target = out.view(item)
    for number, positions in by_source(source):
        if sums is not None:
            sums[number].check_rows(row[positions])
        target[positions] = sources[number].view(item)[row[positions]]


def by_source(source: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each source once, as (source number, positions of its rows among the wanted rows)."""
    order = np.argsort(source, kind="stable")
    ordered = source[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for positions in np.split(order, cuts):
        if len(positions):
            yield int(source[positions[0]]), positions


def as_bytes(values: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous CPU tensor as a uint8 1-D view. Raises RuntimeError if the tensor is not
    contiguous."""
    return flat_bytes(values).numpy()


def exclusive_cumsum(counts: np.ndarray) -> np.ndarray:
    """Return, for each entry of `counts`, the sum of all entries before it, int64 `[N]`."""
    ends = np.cumsum(counts, dtype=np.int64)
    return ends - counts


Parts = Mapping[int, np.ndarray]


def gather_jagged(
    field: Field, lengths: np.ndarray, start: np.ndarray, runs: Runs, values: Parts, sums: Sums | None = None
) -> Jagged:
    """Gather the wanted rows of a PER_TOKEN field. lengths: number of tokens of each row, int64 `[N]`. start: position
    of each row's first token within its block, int64 `[N]`."""
    tokens = runs.totals(lengths)
    assert field.dtype is not None
    out = fresh(field.dtype, (int(tokens.sum()), *field.trailing))
    size = field.item_bytes
    copy_runs(as_bytes(out), values, runs.source, start[runs.first] * size, tokens * size, sums)
    return Jagged(out, lengths)


def gather_dense(
    field: Field, block: np.ndarray, row: np.ndarray, runs: Runs, values: Parts, sums: Sums | None = None
) -> torch.Tensor:
    """Gather the wanted rows of a PER_SAMPLE field from the values parts of their blocks."""
    assert field.dtype is not None
    out = fresh(field.dtype, (len(row), *field.trailing))
    copy_rows(as_bytes(out), values, block, row, field.item_bytes, runs, sums)
    return out


def gather_ragged(
    field: Field,
    block: np.ndarray,
    row: np.ndarray,
    runs: Runs,
    values: Parts,
    index: Parts,
    sums: Sums | None = None,
) -> Ragged:
    """Gather the wanted rows of a RAGGED field. index: block number -> bytes of the shapes of all rows of the block,
    int64 `[rows of the block, ndim]`. Raises ValueError when the shapes do not fit the values part."""
    sizes = {number: part.nbytes for number, part in values.items()}
    shapes, start, counts = locate_ragged(field, block, row, sizes, index)
    elements = runs.totals(counts)
    assert field.dtype is not None
    out = fresh(field.dtype, (int(elements.sum()),))
    size = field.item_bytes
    copy_runs(as_bytes(out), values, runs.source, start[runs.first] * size, elements * size, sums)
    return Ragged(out, shapes)


def locate_ragged(
    field: Field, block: np.ndarray, row: np.ndarray, sizes: Mapping[int, int], index: Parts
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the wanted rows of a RAGGED field in the values parts of their blocks. sizes: number of bytes of the values
    part of each block.

    Returns the rows' shapes, int64 `[N, ndim]`, and for each row the position of its first element in the values part
    and its number of elements, int64 `[N]`. Raises ValueError when the shapes do not fit the values part.
    """
    shapes = np.empty((len(row), field.ndim), dtype=np.int64)
    start = np.empty(len(row), dtype=np.int64)
    counts = np.empty(len(row), dtype=np.int64)
    for number, positions in by_source(block):
        # A copy, because a store can overwrite the bytes that it lent.
        of_block = index[number].view("<i8").reshape(-1, field.ndim).copy()
        of_row = _elements(field, of_block, sizes[number])
        rows = row[positions]
        shapes[positions] = of_block[rows]
        counts[positions] = of_row[rows]
        start[positions] = exclusive_cumsum(of_row)[rows]
    return shapes, start, counts


def locate_objects(block: np.ndarray, row: np.ndarray, index: Parts) -> tuple[np.ndarray, np.ndarray]:
    """Find the wanted rows of an OBJECT field in the values parts of their blocks. Returns the first byte of each row
    and its number of bytes, int64 `[N]`."""
    start = np.empty(len(row), dtype=np.int64)
    nbytes = np.empty(len(row), dtype=np.int64)
    for number, positions in by_source(block):
        ends = index[number].view("<i8")
        begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        rows = row[positions]
        start[positions] = begins[rows]
        nbytes[positions] = ends[rows] - begins[rows]
    return start, nbytes


def _elements(field: Field, shapes: np.ndarray, nbytes: int) -> np.ndarray:
    """Return the number of elements of each row of a block, int64 `[rows of the block]`.

    Raises ValueError unless the shapes describe exactly the `nbytes` bytes of the values part, so that overwritten or
    damaged shapes cannot make a reader allocate wrong amounts of memory.
    """
    whole = nbytes // field.item_bytes
    # As floats the products do not overflow. They are exact up to 2^53, which is more than a part can hold.
    described = shapes.astype(np.float64).prod(axis=1).sum()
    if (shapes < 0).any() or described != whole:
        raise ValueError(f"field {field.name!r}: its shapes describe {described:.0f} elements, but {whole} are there")
    return shapes.prod(axis=1)


def gather_objects(
    block: np.ndarray, row: np.ndarray, values: Parts, index: Parts, sums: Sums | None = None
) -> list[Any]:
    """Gather the wanted rows of an OBJECT field. index: block number -> bytes of the rows' end offsets, int64 `[rows of
    the block]`. A row wanted twice is decoded twice."""
    if sums is not None:
        for number, positions in by_source(block):
            sums[number].check_rows(row[positions])
    ends = {number: index[number].view("<i8").tolist() for number in values}
    memory = {number: part.data for number, part in values.items()}
    out = []
    for number, at in zip(block.tolist(), row.tolist(), strict=True):
        begin = ends[number][at - 1] if at else 0
        out.append(objects.decode(memory[number][begin : ends[number][at]]))
    return out
