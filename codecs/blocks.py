"""Encodes rows of a batch as a block, which is a few contiguous byte arrays (parts); `gather.py` reads them back.

The parts of a block, in order:
  part 0                the header (see `block_header.py`): schema of the fields, number of rows, checksums, int32
                        lengths of the rows `[N]`
  then for each field   its values part, which can store the common leading tokens of a group's rows once
                        (`BlockLayout.shared`); RAGGED and OBJECT fields have an index part after it
                        (RAGGED: int64 shapes `[N, ndim]`; OBJECT: int64 end offsets `[N]` into the msgpack bytes)
Fields with an index part come after all others, so that a block's layout is enough to find the parts of each field.
When the parts are laid end to end, each starts at a multiple of ALIGN bytes (`BlockLayout.offsets`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import objects
from .batch import Batch, Column, Jagged, Ragged
from .block_header import (
    CHECKSUM_ROWS,
    COPY_BYTES,
    ChecksumMismatch,
    FieldSums,
    RunningSums,
    decode_header,
    encode_header,
    enter_checksums,
    mismatch,
    row_block_ends,
    xxh3,
)
from .integers import ALIGN, ceil_div, exclusive_cumsum, round_up
from .memory import as_bytes
from .schema import Field, Kind, Schema
from .shared_rows import SharedRows, find_shared, kept_ranges, shared_fields, stored_ends

_INDEXED = (Kind.RAGGED, Kind.OBJECT)
"""Kinds of field that also have an index part: the rows' shapes (RAGGED) or end offsets (OBJECT)."""

BlockPieces = tuple[tuple[np.ndarray, ...], ...]
"""Parts of a block. Each is divided into successive pieces (uint8 1-D). A part has several pieces where rows share
tokens."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Names of a block's fields and sizes of its parts (byte arrays), which locate each field in the block. The layout
    is kept small, because every receipt (the keys and locations of rows, without their content) carries the layouts of
    its blocks."""

    fields: tuple[str, ...]
    """Names of the block's fields, in the order in which their byte arrays (parts) are stored."""
    num_rows: int
    num_tokens: int
    """Number of tokens of all rows together; 0 when no field is PER_TOKEN."""
    part_bytes: tuple[int, ...]
    """Number of bytes of each part; the first part is the header."""
    shared: SharedRows | None = None
    """Rows that take their leading tokens from an earlier row; None if all rows are stored whole."""

    def shared_of(self, field: Field) -> SharedRows | None:
        """Return which rows share tokens of `field`; None if the field's rows are stored whole."""
        return self.shared if self.shared is not None and field.name in self.shared.fields else None

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each part within the block: parts follow one another at multiples of ALIGN bytes."""
        return _end_to_end(self.part_bytes)[0]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole block when its parts are laid end to end, padding included."""
        return _end_to_end(self.part_bytes)[1]

    def field_parts(self, field: Field) -> tuple[int, ...]:
        """Return the numbers of the parts that hold one field: (values part,) or (values part, index part).

        Raises ValueError if the block lacks the field, or if the presence of its index part does not fit its kind.
        """
        if field.name not in self.fields:
            raise ValueError(f"field {field.name!r} is not in the block, which holds {', '.join(self.fields)}")
        position = self.fields.index(field.name)
        # The `plain` fields, those without an index part, come first.
        plain = 2 * len(self.fields) + 1 - len(self.part_bytes)
        if (position >= plain) != (field.kind in _INDEXED):
            raise ValueError(f"field {field.name!r}: its kind in the block is not {field.kind.value}")
        if position < plain:
            return (1 + position,)
        values = 1 + plain + 2 * (position - plain)
        return (values, values + 1)


@functools.lru_cache(maxsize=256)
def _end_to_end(part_bytes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the offset of each part when parts are laid end to end, and the end of the last one with its padding."""
    offsets, end = [], 0
    for nbytes in part_bytes:
        offsets.append(end)
        end += round_up(nbytes, ALIGN)
    return tuple(offsets), end


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Block that is ready to be written to a store."""

    layout: BlockLayout
    pieces: BlockPieces
    """Bytes of each part, as successive arrays (uint8). They are views of the batch's memory where possible; the header
    and encoded objects are in new memory. A part has several arrays where rows share tokens. The checksums in the
    header are zeros until `stream` or `parts` computes them."""
    row_starts: np.ndarray | None
    """Position within the block of each row's first token, counted as if every row were stored whole, int64 `[N]`; None
    without PER_TOKEN fields."""
    sum_ends: tuple[list[int], ...] | None
    """For each part after the header, the end offsets in bytes of the ranges with a separate checksum; None for a block
    without checksums."""
    seed: int
    """Seed of the header's own checksum."""

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """Bytes of each part, uint8 `[part_bytes[i]]`. Parts of several pieces are joined, in new memory."""
        return tuple(joined(pieces) for pieces in self.complete())

    def complete(self) -> BlockPieces:
        """Write the checksums into the header, and return `pieces`."""
        for _ in self.stream()[1]:  # Iterating over the pieces computes the checksums.
            pass
        return self.pieces

    def stream(self) -> tuple[list[int], Iterator[np.ndarray]]:
        """Return the offset of each piece within the block, and an iterator over the bytes of the pieces. The header is
        the last piece.

        The checksums of a piece are computed when the next piece is taken. If the caller copies a piece before it takes
        the next, the piece is still in the CPU cache.
        """
        parts = self.pieces[1:]
        if self.sum_ends is not None:
            parts = [[view for piece in part for view in _cut(piece)] for part in parts]
        offsets = [
            at + before
            for at, part in zip(self.layout.offsets[1:], parts, strict=True)
            for before in exclusive_cumsum(np.array([piece.nbytes for piece in part])).tolist()
        ]
        return [*offsets, 0], self._stream(parts)

    def _stream(self, parts: Sequence[Sequence[np.ndarray]]) -> Iterator[np.ndarray]:
        if self.sum_ends is None:
            for part in parts:
                yield from part
        else:
            sums: list[int] = []
            for part, ends in zip(parts, self.sum_ends, strict=True):
                running = RunningSums(ends)
                for piece in part:
                    yield piece
                    running.feed(piece.data)
                sums += running.sums
            enter_checksums(self.pieces[0][0], sums, self.seed)
        yield self.pieces[0][0]


def part_bytes(block: BlockPieces) -> tuple[int, ...]:
    """Return the number of bytes of each part."""
    return tuple([sum([piece.nbytes for piece in pieces]) for pieces in block])


def joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bytes of a part's pieces as one array (uint8 1-D). It is the piece itself if there is only one, else
    new memory."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _cut(piece: np.ndarray) -> list[np.ndarray]:
    """Cut a piece of a part into one or more views of at most COPY_BYTES bytes."""
    return [piece[start : start + COPY_BYTES] for start in range(0, max(1, piece.nbytes), COPY_BYTES)]


def encode_block(
    batch: Batch, start: int, stop: int, *, checksum: bool, seed: int = 0, groups: np.ndarray | None = None
) -> EncodedBlock:
    """Encode rows `start:stop` of `batch` as one block; see `encode_blocks`."""
    return encode_blocks(batch, [(start, stop)], checksum=checksum, seed=seed, groups=groups)[0]


def encode_blocks(
    batch: Batch, cuts: Sequence[tuple[int, int]], *, checksum: bool, seed: int = 0, groups: np.ndarray | None = None
) -> list[EncodedBlock]:
    """Return one block of rows `start:stop` of `batch` for each (start, stop) in `cuts`; see `BatchEncoder.blocks`."""
    return BatchEncoder(batch).blocks(cuts, checksum=checksum, seed=seed, groups=groups)


class BatchEncoder:
    """Encodes a batch as blocks. Only the values of OBJECT fields are copied."""

    def __init__(self, batch: Batch) -> None:
        """Prepare every column of `batch` for encoding. Raises TypeError or ValueError if an OBJECT field has a value
        that `objects.encode` does not accept."""
        self._batch = batch
        self._schema = batch.schema.subset(sorted(batch, key=lambda name: batch.schema[name].kind in _INDEXED))
        self._columns = [_Encoder(field, batch[field.name]) for field in self._schema.values()]

    @property
    def column_bytes(self) -> list[int]:
        """Number of bytes of each column's values. For objects it is the size of their encoded form."""
        return [column.nbytes for column in self._columns]

    def blocks(
        self, cuts: Sequence[tuple[int, int]], *, checksum: bool, seed: int = 0, groups: np.ndarray | None = None
    ) -> list[EncodedBlock]:
        """Return one block of rows `start:stop` for each (start, stop) in `cuts`.

        groups: number of each row's group, `[N]`. Successive rows of a group in a block share leading tokens in the
        fields that the schema marks as `shared`. None stores all rows whole.

        checksum: whether to write checksums, which `verify` can check. seed: number that a reader must pass to
        `verify`, so that a block of another data plane, written with another seed, fails verification. Raises
        ValueError for a row of more than MAX_TOKENS tokens.
        """
        lengths = self._batch.lengths
        tokens = None if lengths is None else exclusive_cumsum(lengths)
        fields = () if groups is None else shared_fields(self._batch)
        found = [
            None if groups is None else find_shared(self._batch, start, stop, groups, fields) for start, stop in cuts
        ]
        return [
            self._block(start, stop, lengths, tokens, checksum, seed, shared)
            for (start, stop), shared in zip(cuts, found, strict=True)
        ]

    def _block(
        self,
        start: int,
        stop: int,
        lengths: np.ndarray | None,
        tokens: np.ndarray | None,
        checksum: bool,
        seed: int,
        shared: SharedRows | None,
    ) -> EncodedBlock:
        assert 0 <= start <= stop <= self._batch.num_rows, (start, stop, self._batch.num_rows)
        pieces: list[tuple[np.ndarray, ...]] = []
        sum_ends: list[list[int]] = []
        lengths = None if lengths is None else lengths[start:stop]
        for field, column in zip(self._schema.values(), self._columns, strict=True):
            values, index, ends = column.rows(start, stop)
            kept = (values,)
            if shared is not None and field.name in shared.fields:
                assert lengths is not None
                size = field.item_bytes
                kept = tuple(values[first * size : behind * size] for first, behind in kept_ranges(shared, lengths))
                ends = stored_ends(shared, lengths) * size
            pieces += (kept,) if index is None else (kept, (index,))
            if checksum:
                sum_ends.append(row_block_ends(ends))
                sum_ends += () if index is None else ([index.nbytes],)
        num_checksums = sum(map(len, sum_ends)) if checksum else None
        pieces.insert(0, (encode_header(self._schema, stop - start, lengths, num_checksums, seed),))
        row_starts = None if tokens is None else tokens[start:stop] - (tokens[start] if start < stop else 0)
        num_tokens = 0 if lengths is None else int(lengths.sum())
        parts = tuple(pieces)
        layout = BlockLayout(tuple(self._schema), stop - start, num_tokens, part_bytes(parts), shared)
        return EncodedBlock(layout, parts, row_starts, tuple(sum_ends) if checksum else None, seed)


class _Encoder:
    """Encodes one column of a batch once, so that each block can take its range of rows without a copy."""

    def __init__(self, field: Field, column: Column) -> None:
        self._shapes: np.ndarray | None = None
        self._has_ends = isinstance(column, list)
        if isinstance(column, list):
            self._values, ends = objects.encode_column(field.name, column)
            self._bounds = np.concatenate((np.zeros(1, np.int64), ends))
        elif isinstance(column, Jagged):
            self._values = as_bytes(column.values)
            self._bounds = _bounds(column.lengths, field.item_bytes)
        elif isinstance(column, Ragged):
            self._values = as_bytes(column.values)
            self._shapes = np.ascontiguousarray(column.shapes, dtype="<i8")
            self._bounds = _bounds(column.shapes.prod(axis=1), field.item_bytes)
        else:
            self._values = as_bytes(column)
            self._bounds = np.arange(len(column) + 1, dtype=np.int64) * field.item_bytes

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Return the values part of rows `start:stop`, their index part, and the byte offset at which each row ends.
        The index part is None for kinds without one. Offsets count from the beginning of the values part."""
        first = int(self._bounds[start])
        values = self._values[first : int(self._bounds[stop])]
        ends = self._bounds[start + 1 : stop + 1] - first
        if self._has_ends:
            return values, ends.view(np.uint8), ends
        index = None if self._shapes is None else self._shapes[start:stop].reshape(-1).view(np.uint8)
        return values, index, ends

    @property
    def nbytes(self) -> int:
        """Number of bytes of the column's values part."""
        return self._values.nbytes


def _bounds(items: np.ndarray, item_bytes: int) -> np.ndarray:
    """Return the byte offset at which each row begins, followed by the end of the last row, int64 `[N + 1]`. items:
    number of items of each row. Each item has `item_bytes` bytes."""
    bounds = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(items, out=bounds[1:])
    bounds *= item_bytes
    return bounds


class BlockSums:
    """Checksums of one block that is being read, taken from its header."""

    def __init__(self, block: int, layout: BlockLayout, views: Mapping[int, np.ndarray], seed: int) -> None:
        """Raise ChecksumMismatch for a damaged header, and ValueError for one without checksums. The arguments are
        those of `verify`."""
        try:
            self._header = decode_header(views[0], seed)
        except ValueError as error:
            raise ChecksumMismatch(str(error), block) from error
        if self._header.checksums is None:
            text = "block: written without checksums (integrity was off at its writer), so it cannot be verified"
            raise ValueError(text)
        self._block = block
        self._layout = layout
        self._views = views
        self._sums = self._header.checksums.tolist()
        self._per_field = ceil_div(self._header.num_rows, CHECKSUM_ROWS)
        """Number of checksums of a field's values part."""
        self._first: dict[str, int] = {}
        """Position of each field's first checksum."""
        position = 0
        for name, field in self._header.schema.items():
            self._first[name] = position
            position += self._per_field + (field.kind in _INDEXED)
        self._token_ends: list[int] | None = None
        """End of each row block, counted in tokens, for fields with rows that are stored whole."""

    def of(self, field: Field, parts: Sequence[int]) -> FieldSums:
        """Return the checksums of a field's values part, and check its index part. parts: the result of
        `BlockLayout.field_parts`. Raises ChecksumMismatch, and ValueError if the header does not fit the block.
        """
        if field.name not in self._first:
            raise ValueError(f"field {field.name!r} is not in the block's header")
        first = self._first[field.name]
        behind = first + self._per_field
        index = self._views[parts[1]] if len(parts) > 1 else None
        if index is not None:
            expected, found = self._sums[behind], xxh3(index.data)
            if found != expected:
                what = f"index part of rows 0 to {self._header.num_rows - 1}"
                raise mismatch(field.name, self._block, what, expected, found)
        values, ends = self._views[parts[0]], self._ends(field, index)
        return FieldSums(field.name, self._block, self._header.num_rows, values, ends, self._sums[first:behind])

    def _ends(self, field: Field, index: np.ndarray | None) -> list[int]:
        """Return the byte offsets in the values part at which row blocks end."""
        num_rows, lengths, size = self._header.num_rows, self._header.lengths, field.item_bytes
        if index is not None:
            return row_block_ends(_row_ends(field, index, num_rows))
        if field.kind is Kind.PER_SAMPLE:
            stops = range(CHECKSUM_ROWS, num_rows + CHECKSUM_ROWS, CHECKSUM_ROWS)
            return [min(stop, num_rows) * size for stop in stops]
        assert lengths is not None
        shared = self._layout.shared_of(field)
        if shared is not None:
            return [end * size for end in row_block_ends(stored_ends(shared, lengths))]
        if self._token_ends is None:
            self._token_ends = row_block_ends(np.cumsum(lengths, dtype=np.int64))
        return [end * size for end in self._token_ends]


def _row_ends(field: Field, index: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the byte offset in the values part at which each row ends, int64 `[N]`, for a field with an index part."""
    if field.kind is Kind.OBJECT:
        return index.view("<i8")
    shapes = index.view("<i8").reshape(num_rows, field.ndim)
    return np.cumsum(shapes.prod(axis=1), dtype=np.int64) * field.item_bytes


def read_header(header: np.ndarray) -> tuple[Schema, int, np.ndarray | None]:
    """Return (schema of the fields, number of rows, int32 lengths `[N]` or None) from a header (part 0). The header
    must have been written with seed 0. Raises ValueError for other bytes."""
    found = decode_header(header)
    return found.schema, found.num_rows, found.lengths
