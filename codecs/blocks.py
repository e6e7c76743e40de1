"""Encodes rows of a batch as a block, which is a few contiguous byte arrays (parts), and reads rows back from blocks.

The parts of a block, in order:
  part 0                the header: schema of the fields, number of rows, checksums, int32 lengths of the rows `[N]`
  then for each field   its values part, in which tokens that rows of a group have in common may stand once
                        (`BlockLayout.shared`); RAGGED and OBJECT fields have an index part after it
                        (RAGGED: int64 shapes `[N, ndim]`; OBJECT: int64 end offsets `[N]` into the msgpack bytes)
Fields with an index part come after all others, so that a block's layout is enough to find the parts of each field.
When the parts are laid end to end, each starts at a multiple of ALIGN bytes (`BlockLayout.offsets`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from . import objects
from .batch import Batch, Column, Jagged, Ragged
from .gather import as_bytes, exclusive_cumsum, find_runs, gather_dense, gather_jagged, gather_objects, gather_ragged
from .integers import ALIGN, ceil_div, distinct, round_up
from .schema import Field, Kind, Schema
from .shared_rows import (
    SharedRows,
    find_shared,
    gather_shared,
    kept_ranges,
    shared_fields,
    stored_ends,
    stored_pieces,
)

# ---------------- A block's part 0 describes the other parts without the partition's schema.
#
# bytes 0-7    magic and format version
# bytes 8-15   xxh3 of everything behind them, seeded with a number that the reader knows, too (0 outside a data plane)
# bytes 16-23  bytes of the manifest
# then         manifest: msgpack [schema, rows, has lengths, checksums or None], padded with zeros to 4
# then         int32 lengths `[N]` when a field is PER_TOKEN

MAGIC = b"hrblock1"
MAX_TOKENS = (1 << 31) - 1
"""Largest number of tokens that a row may have, because a block stores the rows' lengths as int32."""
_PREFIX = struct.Struct("<8sQQ")
_HASHED_FROM = 16
_MANIFEST = msgspec.msgpack.Decoder(tuple[bytes, int, bool, bytes | None])


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of a block's header (part 0)."""

    schema: Schema
    """Fields of the block in the order of their parts."""
    num_rows: int
    lengths: np.ndarray | None
    """Number of tokens of each row, int32 `[N]`; None when no field is PER_TOKEN."""
    checksums: np.ndarray | None
    """Checksums (xxh3, uint64), field by field: one for each row block (CHECKSUM_ROWS rows) of the values part, then
    one for the index part of a field that has one. None when the block was written without checksums."""


def encode_header(
    schema: Schema, num_rows: int, lengths: np.ndarray | None, checksums: list[int] | None, seed: int = 0
) -> np.ndarray:
    """Encode a block's header (part 0) as uint8 1-D. Raises ValueError when a row has more than MAX_TOKENS tokens.

    lengths: number of tokens of each row, int `[N]`; None when no field is PER_TOKEN. checksums: as in `Header`. seed:
    seed of the xxh3 that protects the header itself; a reader must pass the same seed to `decode_header`.
    """
    if lengths is not None and len(lengths) and lengths.max() > MAX_TOKENS:
        longest = int(lengths.argmax())
        raise ValueError(f"block: row {longest} has {lengths[longest]} tokens, expected at most {MAX_TOKENS}")
    sums = None if checksums is None else np.array(checksums, dtype="<u8").tobytes()
    manifest = msgspec.msgpack.encode((_schema_bytes(schema), num_rows, lengths is not None, sums))
    tail = b"" if lengths is None else lengths.astype("<i4").tobytes()
    hashed = struct.pack("<Q", len(manifest)) + manifest + bytes(-len(manifest) % 4) + tail
    digest = xxhash.xxh3_64_intdigest(hashed, seed)
    return np.frombuffer(MAGIC + struct.pack("<Q", digest) + hashed, dtype=np.uint8)


def decode_header(part: np.ndarray, seed: int = 0) -> Header:
    """Decode a header that `encode_header` wrote with the same seed. Raises ValueError when `part` is not a header, was
    written with another seed, or has changed since."""
    data = np.ascontiguousarray(part).tobytes()
    if len(data) < _PREFIX.size or data[:8] != MAGIC:
        raise ValueError(f"block header: {len(data)} bytes do not begin with {MAGIC!r}")
    _, written, manifest_bytes = _PREFIX.unpack_from(data)
    found = xxhash.xxh3_64_intdigest(data[_HASHED_FROM:], seed)
    if found != written:
        raise ValueError(f"block header: xxh3 is {found:016x}, but {written:016x} was written")
    manifest_end = _PREFIX.size + manifest_bytes
    schema_bytes, num_rows, has_lengths, sums = _MANIFEST.decode(data[_PREFIX.size : manifest_end])
    lengths = np.frombuffer(data, "<i4", num_rows, manifest_end + -manifest_bytes % 4) if has_lengths else None
    checksums = None if sums is None else np.frombuffer(sums, dtype="<u8")
    return Header(_schema(schema_bytes), num_rows, lengths, checksums)


@functools.lru_cache(maxsize=256)
def _schema_bytes(schema: Schema) -> bytes:
    return msgspec.msgpack.encode(schema.to_list())


@functools.lru_cache(maxsize=256)
def _schema(data: bytes) -> Schema:
    return Schema.from_list(msgspec.msgpack.decode(data))


CHECKSUM_ROWS = 64
"""Number of rows of a block that share one xxh3 checksum per field (a row block). A reader of a few rows verifies only
the row blocks that contain these rows."""

_INDEXED = (Kind.RAGGED, Kind.OBJECT)
"""Kinds of field that have an index part beside the values part: the rows' shapes (RAGGED) or end offsets (OBJECT)."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Names and sizes that locate each field in a block: the block's fields, and the number of bytes of each of its
    parts (byte arrays). Kept small, because every receipt (the keys and locations of rows, without their content)
    carries the layouts of its blocks."""

    fields: tuple[str, ...]
    """Names of the block's fields, in the order in which their byte arrays (parts) are stored."""
    num_rows: int
    num_tokens: int
    """Number of tokens of all rows together; 0 when no field is PER_TOKEN."""
    part_bytes: tuple[int, ...]
    """Number of bytes of each part; the first part is the header."""
    shared: SharedRows | None = None
    """Groups whose rows begin with tokens that are stored once; None if all rows are stored whole."""

    def shared_of(self, field: Field) -> SharedRows | None:
        """Return the groups whose rows share tokens of `field`; None if the field's rows are stored whole."""
        return self.shared if self.shared is not None and field.name in self.shared.fields else None

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each part within the block: parts follow one another, each at the next multiple of ALIGN
        bytes."""
        return self._ends()[0]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole block when its parts are laid end to end, padding included."""
        return self._ends()[1]

    def parts_of(self, schema: Schema, fields: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of the parts (byte arrays of a block) that hold the values and indexes of `fields`.

        schema: schema that declares at least `fields`. The header (part 0) is not included. Raises ValueError if the
        block lacks a field, or if the block has an index part for a field whose kind needs none, or lacks one that the
        kind needs.
        """
        return tuple(number for name in fields for number in self.field_parts(schema[name]))

    def field_parts(self, field: Field) -> tuple[int, ...]:
        """Return the part numbers of one field: (values part,) or (values part, index part). Raises ValueError as
        `parts_of` does."""
        if field.name not in self.fields:
            raise ValueError(f"field {field.name!r}: not in the block, which holds {', '.join(self.fields)}")
        position = self.fields.index(field.name)
        plain = 2 * len(self.fields) + 1 - len(self.part_bytes)  # fields without an index part; they come first
        if (position >= plain) != (field.kind in _INDEXED):
            raise ValueError(f"field {field.name!r}: the block holds it as another kind than {field.kind.value}")
        if position < plain:
            return (1 + position,)
        values = 1 + plain + 2 * (position - plain)
        return (values, values + 1)

    def _ends(self) -> tuple[tuple[int, ...], int]:
        offsets, end = [], 0
        for nbytes in self.part_bytes:
            offsets.append(end)
            end += round_up(nbytes, ALIGN)
        return tuple(offsets), end


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Block that is ready to be written to a store."""

    layout: BlockLayout
    pieces: tuple[tuple[np.ndarray, ...], ...]
    """Bytes of each part, as arrays (uint8) that follow one another: views of the batch's own memory where possible,
    new memory for the header and for encoded objects. A part has several where rows share tokens."""
    row_starts: np.ndarray | None
    """Position within the block of each row's first token, counted as if every row were stored whole, int64 `[N]`; None
    without PER_TOKEN fields."""

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """Bytes of each part, uint8 `[part_bytes[i]]`. Parts of several pieces are joined, in new memory."""
        return tuple(one[0] if len(one) == 1 else np.concatenate(one) for one in self.pieces)


def encode_block(
    batch: Batch, start: int, stop: int, *, checksum: bool, groups: np.ndarray | None = None
) -> EncodedBlock:
    """Encode rows `start:stop` of `batch` as one block; see `encode_blocks`."""
    return encode_blocks(batch, [(start, stop)], checksum=checksum, groups=groups)[0]


def encode_blocks(
    batch: Batch,
    cuts: Sequence[tuple[int, int]],
    *,
    checksum: bool,
    seed: int = 0,
    groups: np.ndarray | None = None,
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
        """Number of bytes of each column's values. Objects count with the size of their encoded form."""
        return [column.nbytes for column in self._columns]

    def blocks(
        self,
        cuts: Sequence[tuple[int, int]],
        *,
        checksum: bool,
        seed: int = 0,
        groups: np.ndarray | None = None,
    ) -> list[EncodedBlock]:
        """Return one block of rows `start:stop` for each (start, stop) in `cuts`.

        groups: number of each row's group, `[N]`; rows of a group that follow one another in a block share the tokens
        with which they begin, in the fields that the schema marks as `shared`. None stores all rows whole.

        checksum: whether to write checksums, which `verify` can check. seed: number that a reader must pass to
        `verify`; a block of another data plane, written with another seed, then fails verification. Raises ValueError
        for a row of more than MAX_TOKENS tokens.
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
        sums: list[int] = []
        lengths = None if lengths is None else lengths[start:stop]
        for field, column in zip(self._schema.values(), self._columns, strict=True):
            values, index, ends = column.rows(start, stop)
            kept = (values,)
            if shared is not None and field.name in shared.fields:
                assert lengths is not None
                size = field.item_bytes
                kept = tuple(values[first * size : behind * size] for first, behind in kept_ranges(shared, lengths))
                ends = stored_ends(shared, lengths) * size
            pieces.append(kept)
            if index is not None:
                pieces.append((index,))
            if checksum:
                sums += map(_xxh3, _row_blocks(kept[0] if len(kept) == 1 else np.concatenate(kept), ends))
                sums += () if index is None else (_xxh3(index),)
        pieces.insert(0, (encode_header(self._schema, stop - start, lengths, sums if checksum else None, seed),))
        row_starts = None if tokens is None else tokens[start:stop] - (tokens[start] if start < stop else 0)
        num_tokens = 0 if lengths is None else int(lengths.sum())
        sizes = tuple([sum(piece.nbytes for piece in part) for part in pieces])
        layout = BlockLayout(tuple(self._schema), stop - start, num_tokens, sizes, shared)
        return EncodedBlock(layout, tuple(pieces), row_starts)


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
        """Return the values part of rows `start:stop`, their index part (None for kinds without one), and the byte
        offset in the values part at which each row ends."""
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
    number of items of each row, of `item_bytes` bytes each."""
    bounds = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(items, out=bounds[1:])
    bounds *= item_bytes
    return bounds


def _row_blocks(values: np.ndarray, ends: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the values part in pieces of CHECKSUM_ROWS rows; the last piece may have fewer. ends: byte offset at which
    each row ends."""
    begin = 0
    for end in _piece_ends(ends):
        yield values[begin:end]
        begin = end


def _piece_ends(ends: np.ndarray) -> list[int]:
    """Return the end offsets of every CHECKSUM_ROWS-th row and of the last row, given those of all rows."""
    return [*ends[CHECKSUM_ROWS - 1 : -1 : CHECKSUM_ROWS].tolist(), *ends[-1:].tolist()]


def _row_ends(field: Field, index: np.ndarray | None, num_rows: int) -> np.ndarray:
    """Return the byte offset in the values part at which each row ends, int64 `[N]`, for a field that is not
    PER_TOKEN."""
    if field.kind is Kind.PER_SAMPLE:
        return np.arange(1, num_rows + 1, dtype=np.int64) * field.item_bytes
    assert index is not None
    if field.kind is Kind.RAGGED:
        shapes = index.view("<i8").reshape(num_rows, field.ndim)
        return np.cumsum(shapes.prod(axis=1), dtype=np.int64) * field.item_bytes
    return index.view("<i8")


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


BlockViews = Sequence[dict[int, np.ndarray]]
"""For each block, a dict from part number to a uint8 view of the whole part."""


def assemble(
    schema: Schema,
    lengths: np.ndarray,
    sources: Sequence[RowSource],
    layouts: Sequence[BlockLayout],
    views: BlockViews,
) -> Batch:
    """Copy the requested rows out of the blocks into a new Batch with memory of its own, in the order requested.

    schema: the wanted fields only; each must be in exactly one source. lengths: number of tokens of each row, int64
    `[N]`. layouts, views: layout and parts of each block. Rows that are adjacent both in a block and in the request are
    copied in one piece. Raises ValueError if a block lacks a requested field or its bytes, or if an object cannot be
    decoded. Raises ValueError or IndexError if a block has no row of a requested number.
    """
    lengths = np.ascontiguousarray(lengths, dtype=np.int64)
    columns: dict[str, Column] = {}
    for source in sources:
        wanted = [schema[name] for name in source.fields if name in schema]
        if not wanted:
            continue
        block, row = source.block, source.row
        runs = find_runs(block, row)
        used = distinct(block).tolist()
        for field in wanted:
            parts = {number: layouts[number].field_parts(field) for number in used}
            values = {number: views[number][parts[number][0]] for number in used}
            shared = {number: layouts[number].shared_of(field) for number in used}
            if any(shared.values()):
                pieces = stored_pieces(block, row, source.start, lengths, shared)
                columns[field.name] = gather_shared(field, lengths, pieces, values)
            elif field.kind is Kind.PER_TOKEN:
                columns[field.name] = gather_jagged(field, lengths, source.start, runs, values)
            elif field.kind is Kind.PER_SAMPLE:
                columns[field.name] = gather_dense(field, block, row, runs, values)
            else:
                index = {number: views[number][parts[number][1]] for number in used}
                columns[field.name] = (
                    gather_ragged(field, block, row, runs, values, index)
                    if field.kind is Kind.RAGGED
                    else gather_objects(block, row, values, index)
                )
    return Batch(schema, len(lengths), columns)


class ChecksumMismatch(ValueError):
    """Bytes of a block differ from those that were written. The message names the field, its rows, and the expected and
    found xxh3."""


def verify(
    schema: Schema,
    source: RowSource,
    block: int,
    layout: BlockLayout,
    views: Mapping[int, np.ndarray],
    *,
    seed: int = 0,
) -> None:
    """Check the xxh3 checksums of the rows that `source` reads from block number `block`.

    Each checksum covers CHECKSUM_ROWS rows of a field. schema: the wanted fields of the block; others are not checked.
    views: parts of the block, which must include the header (part 0). seed: the number given to `encode_blocks`. Raises
    ChecksumMismatch when bytes differ, and ValueError when the block was written without checksums.
    """
    try:
        header = decode_header(views[0], seed)
    except ValueError as error:
        raise ChecksumMismatch(str(error)) from error
    if header.checksums is None:
        raise ValueError("block: written without checksums (integrity was off at its writer), so it cannot be verified")
    per_field = ceil_div(header.num_rows, CHECKSUM_ROWS)
    row_blocks = [0]
    if per_field > 1:
        rows = source.row[source.block == block]
        if layout.shared is not None:  # a row's common tokens may stand with a row of an earlier row block
            rows = np.concatenate([rows, np.array(layout.shared.first, rows.dtype)])
        row_blocks = distinct(rows // CHECKSUM_ROWS).tolist()
    sums = header.checksums.tolist()
    for field in header.schema.values():
        shared = layout.shared_of(field)
        token_ends = None
        if header.lengths is not None:
            lengths = header.lengths.astype(np.int64)
            token_ends = _piece_ends(np.cumsum(lengths) if shared is None else stored_ends(shared, lengths))
        if field.name in schema:
            _verify_field(field, header, token_ends, row_blocks, sums, [views[n] for n in layout.field_parts(field)])
        del sums[: per_field + (field.kind in _INDEXED)]


def _verify_field(
    field: Field,
    header: Header,
    token_ends: list[int] | None,
    row_blocks: list[int],
    sums: list[int],
    parts: list[np.ndarray],
) -> None:
    """Check the checksums of one field; see `verify`. sums: checksums from the block's header, beginning with those of
    this field: one per row block of its values, then the one of its index part."""
    values, index = parts[0], parts[1] if len(parts) > 1 else None
    per_field = ceil_div(header.num_rows, CHECKSUM_ROWS)
    if index is not None:
        _expect_sum(field, 0, header.num_rows, sums[per_field], index, "index part of ")
    if per_field == 1:
        _expect_sum(field, 0, header.num_rows, sums[0], values)
    if per_field < 2:
        return
    if field.kind is Kind.PER_TOKEN:
        assert token_ends is not None
        size, ends = field.item_bytes, token_ends
    else:
        size, ends = 1, _piece_ends(_row_ends(field, index, header.num_rows))
    for number in row_blocks:
        begin = ends[number - 1] * size if number else 0
        first, behind = number * CHECKSUM_ROWS, min((number + 1) * CHECKSUM_ROWS, header.num_rows)
        _expect_sum(field, first, behind, sums[number], values[begin : ends[number] * size])


def _xxh3(data: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def _expect_sum(field: Field, first: int, behind: int, expected: int, data: np.ndarray, what: str = "") -> None:
    found = _xxh3(data)
    if found != expected:
        raise ChecksumMismatch(
            f"field {field.name!r}, {what}rows {first} to {behind - 1}: xxh3 of the bytes read is {found:016x}, "
            f"but {expected:016x} was written"
        )


def read_header(header: np.ndarray) -> tuple[Schema, int, np.ndarray | None]:
    """Return (schema of the fields, number of rows, int32 lengths `[N]` or None) from a header (part 0) that was
    written with seed 0. Raises ValueError for other bytes."""
    found = decode_header(header)
    return found.schema, found.num_rows, found.lengths
