"""Gathers wanted rows out of blocks: plans once where the rows of each field lie, then copies them into new memory.

    source     rows of fields that were written together: the block of each row, and its position there
    run        wanted rows that are adjacent both in the request and in their block, so that they move in one piece
    pieces     where the runs lie in the values parts of one field; one after another, they are the field's column

A `ReadPlan` is made without any bytes, and both ways to read use it. `assemble` copies the rows out of parts in memory;
`dataplane/client/ranged_read.py` receives the pieces straight into the column.

`block` and `row` `[N]` are the block number of each wanted row and its position in that block. `values` and `index` map
each block number to the uint8 bytes of the field's values and of its index (row shapes or end offsets) in that block.
If a row extends beyond these bytes, the functions raise ValueError, or IndexError where they select rows by number.
`sums` holds the checksums of the blocks. With them the functions check the bytes that they copy, and raise
ChecksumMismatch; with None they check nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import objects
from .batch import Batch, Column, Jagged, Ragged
from .block_header import Sums
from .blocks import BlockLayout, BlockSums
from .integers import distinct
from .memory import as_bytes, fresh
from .schema import Field, Kind, Schema
from .shared_rows import stored_pieces

# ---------------- Each run is copied in one piece, both to read blocks and to select rows.

GATHER_BYTES = 256
"""Largest size in bytes of scattered rows of one size that are copied together by index instead of one by one."""

Parts = Mapping[int, np.ndarray]
"""Bytes (uint8 1-D) of one part of each block, by block number."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Locations in values parts of the P pieces of a column, in the order of the column. Items are tokens (PER_TOKEN),
    rows (PER_SAMPLE), elements (RAGGED) or bytes (OBJECT)."""

    block: np.ndarray
    """Block number of each piece, `[P]`."""
    first: np.ndarray
    """Position of each piece's first item in its values part, int64 `[P]`."""
    count: np.ndarray
    """Number of items of each piece, int64 `[P]`."""

    @property
    def num_items(self) -> int:
        """Number of items of all pieces together."""
        return int(self.count.sum())


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

    def pieces(self, first: np.ndarray, count: np.ndarray) -> Pieces:
        """Return the pieces of the runs. first, count: first item of each row in its source, and number of its items,
        int64 `[N]`."""
        return Pieces(self.source, first[self.first].astype(np.int64), self.totals(count))


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
            raise ValueError(f"source {number}: rows end at byte {end}, but it has {memory[number].nbytes} bytes")
    out_stop = np.cumsum(nbytes)
    target = out.data
    runs = zip(numbers, start.tolist(), stop.tolist(), (out_stop - nbytes).tolist(), out_stop.tolist(), strict=True)
    # A memoryview slice takes a third of the time of a numpy slice. With thousands of short rows, slicing dominates
    # these loops.
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


# ---------------- Each kind of field has its own copy functions.


def new_values(field: Field, num_items: int) -> torch.Tensor:
    """Return uninitialised memory for the values of a column, `[num_items, *trailing]`. Items are as in `Pieces`."""
    assert field.dtype is not None
    return fresh(field.dtype, (num_items, *field.trailing))


def gather_pieces(field: Field, pieces: Pieces, values: Parts, sums: Sums | None = None) -> torch.Tensor:
    """Gather the values of a PER_TOKEN or RAGGED field."""
    out = new_values(field, pieces.num_items)
    size = field.item_bytes
    copy_runs(as_bytes(out), values, pieces.block, pieces.first * size, pieces.count * size, sums)
    return out


def gather_dense(
    field: Field, block: np.ndarray, row: np.ndarray, runs: Runs, values: Parts, sums: Sums | None = None
) -> torch.Tensor:
    """Gather the wanted rows of a PER_SAMPLE field from the values parts of their blocks."""
    out = new_values(field, len(row))
    copy_rows(as_bytes(out), values, block, row, field.item_bytes, runs, sums)
    return out


def locate_ragged(
    field: Field, block: np.ndarray, row: np.ndarray, runs: Runs, sizes: Mapping[int, int], index: Parts
) -> tuple[np.ndarray, Pieces]:
    """Find the wanted rows of a RAGGED field in the values parts of their blocks. sizes: number of bytes of the values
    part of each block.

    Returns the rows' shapes, int64 `[N, ndim]`, and the pieces of `runs` that hold the rows' elements. Raises
    ValueError when the shapes do not fit the values part.
    """
    shapes = np.empty((len(row), field.ndim), dtype=np.int64)
    start = np.empty(len(row), dtype=np.int64)
    counts = np.empty(len(row), dtype=np.int64)
    for number, positions in by_source(block):
        # The shapes are copied, because a store can overwrite the bytes that it lends to readers.
        of_block = index[number].view("<i8").reshape(-1, field.ndim).copy()
        of_row = _elements(field, of_block, sizes[number])
        rows = row[positions]
        shapes[positions] = of_block[rows]
        counts[positions] = of_row[rows]
        start[positions] = (np.cumsum(of_row) - of_row)[rows]
    return shapes, runs.pieces(start, counts)


def _elements(field: Field, shapes: np.ndarray, nbytes: int) -> np.ndarray:
    """Return the number of elements of each row of a block, int64 `[rows of the block]`.

    Raises ValueError unless the shapes describe exactly the `nbytes` bytes of the values part, so that overwritten or
    damaged shapes cannot make a reader allocate wrong amounts of memory.
    """
    whole = nbytes // field.item_bytes
    # Products of floats do not overflow. They are exact up to 2^53, which is more elements than a part can hold.
    described = shapes.astype(np.float64).prod(axis=1).sum()
    if (shapes < 0).any() or described != whole:
        raise ValueError(f"field {field.name!r}: shapes describe {described:.0f} elements, but the block has {whole}")
    return shapes.prod(axis=1)


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


# ---------------- These classes and functions plan a read.


@dataclass(frozen=True, slots=True)
class RowSource:
    """Locations of the requested rows in blocks, for one set of fields that were written together."""

    fields: tuple[str, ...]
    block: np.ndarray
    """Position of each row's block in the list of blocks given to `assemble`, int32 `[N]`."""
    row: np.ndarray
    """Position of each row within its block, int32 `[N]`."""
    start: np.ndarray
    """Position within the block of each row's first token, int64 `[N]`; 0 when none of `fields` is PER_TOKEN."""


class SourceRows:
    """Wanted rows of one source. Their runs are found once for all fields of the source."""

    def __init__(
        self, source: RowSource, lengths: np.ndarray, fields: Sequence[Field], layouts: Sequence[BlockLayout]
    ) -> None:
        """lengths: number of tokens of each row, int64 `[N]`. Raises ValueError as `BlockLayout.field_parts` does."""
        self.source = source
        self.lengths = lengths
        self.runs = find_runs(source.block, source.row)
        self.blocks: list[int] = distinct(source.block).tolist()
        """Numbers of the blocks that hold these rows, ascending."""
        self.fields = [FieldRows(self, field, layouts) for field in fields]
        self._pieces: dict[bool, Pieces] = {}

    def pieces(self, *, per_token: bool) -> Pieces:
        """Return the runs as pieces of a field whose rows are stored whole. Items are tokens if `per_token`, else
        rows."""
        found = self._pieces.get(per_token)
        if found is None:
            runs, row = self.runs, self.source.row
            if per_token:
                found = runs.pieces(self.source.start, self.lengths)
            else:
                counts = np.diff(runs.first, append=runs.num_rows)
                found = Pieces(runs.source, row[runs.first].astype(np.int64), counts)
            self._pieces[per_token] = found
        return found


class FieldRows:
    """Wanted rows of one field, and the parts of blocks that hold them."""

    def __init__(self, rows: SourceRows, field: Field, layouts: Sequence[BlockLayout]) -> None:
        self.rows = rows
        self.field = field
        self.parts = {number: layouts[number].field_parts(field) for number in rows.blocks}
        """For each block, the numbers of the field's values part and, for kinds that have one, of its index part."""
        self.part_bytes = {number: layouts[number].part_bytes[parts[0]] for number, parts in self.parts.items()}
        """Number of bytes of the values part in each block."""
        shared = {number: layouts[number].shared_of(field) for number in rows.blocks}
        self.shared = shared if any(shared.values()) else None
        """For each block, its rows that share tokens of this field; None if no block has any."""

    def part(self, views: BlockViews, which: int) -> Parts:
        """Return the values part (which=0) or index part (which=1) in each block."""
        return {number: views[number][parts[which]] for number, parts in self.parts.items()}

    def pieces(self) -> Pieces:
        """Return the pieces that hold the rows of a PER_TOKEN or PER_SAMPLE field. Raises ValueError if a block's
        layout places rows before its first byte, or takes tokens of a row from a later one."""
        source, per_token = self.rows.source, self.field.kind is Kind.PER_TOKEN
        if self.shared is None:
            return self.rows.pieces(per_token=per_token)
        found = Pieces(*stored_pieces(source.block, source.row, source.start, self.rows.lengths, self.shared))
        if (found.first < 0).any() or (found.count < 0).any():
            raise ValueError(f"field {self.field.name!r}: the block's layout places rows before its first byte")
        return found

    def column(self, views: BlockViews, sums: Sums | None = None) -> Column:
        """Copy the rows out of the parts of their blocks, in the order requested."""
        field, source, runs = self.field, self.rows.source, self.rows.runs
        values = self.part(views, 0)
        if field.kind is Kind.PER_TOKEN:
            return Jagged(gather_pieces(field, self.pieces(), values, sums), self.rows.lengths)
        if field.kind is Kind.PER_SAMPLE:
            return gather_dense(field, source.block, source.row, runs, values, sums)
        index = self.part(views, 1)
        if field.kind is Kind.OBJECT:
            return gather_objects(source.block, source.row, values, index, sums)
        sizes = {number: part.nbytes for number, part in values.items()}
        shapes, pieces = locate_ragged(field, source.block, source.row, runs, sizes, index)
        return Ragged(gather_pieces(field, pieces, values, sums), shapes)


class ReadPlan:
    """Plan of one read: the locations of the wanted rows of each field. It is made without the bytes of any block."""

    def __init__(
        self, schema: Schema, lengths: np.ndarray, sources: Sequence[RowSource], layouts: Sequence[BlockLayout]
    ) -> None:
        """schema: the wanted fields only; each must be in exactly one source. lengths: number of tokens of each row,
        int64 `[N]`. layouts: layout of each block, at the block numbers that the sources use.

        Raises ValueError if a block lacks a wanted field or holds it as another kind.
        """
        self.schema = schema
        self.lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        self.layouts = layouts
        fields = [[schema[name] for name in source.fields if name in schema] for source in sources]
        self.sources = [
            SourceRows(source, self.lengths, wanted, layouts)
            for source, wanted in zip(sources, fields, strict=True)
            if wanted
        ]

    def parts(self, *, header: bool) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the parts that hold wanted rows, by block number, ascending. header: whether to include
        the header (part 0) of each block."""
        found: dict[int, set[int]] = {}
        for rows in self.sources:
            for wanted in rows.fields:
                for number, parts in wanted.parts.items():
                    found.setdefault(number, {0} if header else set()).update(parts)
        return {number: tuple(sorted(found[number])) for number in sorted(found)}

    def assemble(self, views: BlockViews, *, seed: int | None = None) -> Batch:
        """Copy the rows out of the blocks into a new Batch; see `assemble`."""
        columns: dict[str, Column] = {}
        for rows in self.sources:
            checks = None
            if seed is not None:
                checks = {
                    number: BlockSums(number, self.layouts[number], views[number], seed) for number in rows.blocks
                }
            for wanted in rows.fields:
                sums = None
                if checks is not None:
                    sums = {number: checks[number].of(wanted.field, parts) for number, parts in wanted.parts.items()}
                columns[wanted.field.name] = wanted.column(views, sums)
        return Batch(self.schema, len(self.lengths), columns)


BlockViews = Sequence[dict[int, np.ndarray]] | Mapping[int, dict[int, np.ndarray]]
"""Parts of blocks: for each block number, a dict from part number to a uint8 view of the whole part."""


def assemble(
    schema: Schema,
    lengths: np.ndarray,
    sources: Sequence[RowSource],
    layouts: Sequence[BlockLayout],
    views: BlockViews,
    *,
    seed: int | None = None,
) -> Batch:
    """Copy the requested rows out of the blocks into a new Batch that owns its memory, in the order requested.

    schema: the wanted fields only; each must be in exactly one source. lengths: number of tokens of each row, int64
    `[N]`. layouts, views: layout and parts of each block. Rows that are adjacent both in a block and in the request are
    copied in one piece. seed: the number given to `encode_blocks`, to check the checksums of all copied bytes; the
    views must then include the headers. None checks nothing.

    Raises ValueError if a block lacks a requested field or its bytes, or if an object cannot be decoded. Raises
    ValueError or IndexError if a block has no row of a requested number. With `seed`, it raises the errors of `verify`.
    """
    return ReadPlan(schema, lengths, sources, layouts).assemble(views, seed=seed)


def verify(
    schema: Schema,
    source: RowSource,
    block: int,
    layout: BlockLayout,
    views: Mapping[int, np.ndarray],
    *,
    seed: int = 0,
) -> None:
    """Check the xxh3 checksums of the rows that `source` reads from block number `block`, without copying them.

    Each checksum covers CHECKSUM_ROWS rows of a field. schema: the wanted fields of the block; others are not checked.
    views: parts of the block, which must include the header (part 0). seed: the number given to `encode_blocks`. Raises
    ChecksumMismatch when bytes differ, and ValueError when the block was written without checksums.
    """
    sums = BlockSums(block, layout, views, seed)
    rows = source.row[source.block == block]
    if layout.shared is not None:  # A row's common tokens can be stored with a row of an earlier row block.
        rows = np.concatenate([rows, np.array(layout.shared.parents, rows.dtype)])
    for name in layout.fields:
        if name in schema:
            sums.of(schema[name], layout.field_parts(schema[name])).check_rows(rows)
