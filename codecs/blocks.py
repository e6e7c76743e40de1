"""Wire blocks: one put's rows x fields as a few contiguous parts plus a header that describes them.

A block's parts, in order:
  part 0                the header: magic, msgpack manifest (schema of the fields, rows, tokens, checksums), int32 lengths `[N]`
  then for each field   its values part; RAGGED and OBJECT fields have an index part behind it
                        (RAGGED: int64 shapes `[N, ndim]`; OBJECT: int64 end offsets `[N]` into the msgpack bytes)
Laid end to end, every part starts at a multiple of ALIGN bytes (`BlockLayout.offsets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .batch import Batch
from .schema import Schema

ALIGN = 64
"""Parts start at multiples of this, so that views of any dtype are aligned."""

CHECKSUM_ROWS = 64
"""Rows under one xxh3 checksum: a reader of a few rows verifies only the row blocks it touches."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where a block's parts are. Small: it travels in receipts."""

    fields: tuple[str, ...]
    """Field names in the order of their parts."""
    num_rows: int
    num_tokens: int
    """Sum of the rows' lengths; 0 when no field is PER_TOKEN."""
    part_bytes: tuple[int, ...]
    """Bytes of each part, header first."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each part when the parts are laid end to end, ALIGN-ed."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block laid end to end, padding included."""
        raise NotImplementedError

    def parts_of(self, schema: Schema, fields: Sequence[str]) -> tuple[int, ...]:
        """Part numbers that hold `fields` (values and index parts), without the header."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block ready to be written."""

    layout: BlockLayout
    parts: tuple[np.ndarray, ...]
    """uint8 `[part_bytes[i]]` each; views of the batch's own memory where it is contiguous."""
    row_starts: np.ndarray | None
    """int64 `[N]`: first token of each row within the block; None without PER_TOKEN fields."""


def encode_block(batch: Batch, start: int, stop: int, *, checksum: bool) -> EncodedBlock:
    """Rows `start:stop` of `batch` as one block. No copy of PER_TOKEN, PER_SAMPLE and RAGGED values."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RowSource:
    """For one set of fields written together: where each requested row stands."""

    fields: tuple[str, ...]
    block: np.ndarray
    """int32 `[N]`: position in the list of blocks given to `assemble`."""
    row: np.ndarray
    """int32 `[N]`: row within that block."""
    start: np.ndarray
    """int64 `[N]`: first token of that row within that block (0 when none of `fields` is PER_TOKEN)."""


BlockViews = Sequence[dict[int, np.ndarray]]
"""Per block: part number -> uint8 view of the whole part."""


def assemble(
    schema: Schema,
    lengths: np.ndarray,
    sources: Sequence[RowSource],
    layouts: Sequence[BlockLayout],
    views: BlockViews,
) -> Batch:
    """Copy the requested rows out of the blocks into one fresh Batch (owned memory), in request order.

    `schema` holds just the wanted fields, each in exactly one source. `lengths` is int64 `[N]`.
    Rows that are neighbours in a block and in the request are copied as one run.
    """
    raise NotImplementedError


class ChecksumMismatch(ValueError):
    """Bytes differ from what was written: names field, row block, expected and found xxh3."""


def verify(
    schema: Schema,
    source: RowSource,
    block: int,
    layout: BlockLayout,
    views: dict[int, np.ndarray],
) -> None:
    """Check the xxh3 of every row block of `block` that `source` reads; views must include part 0.

    `schema` holds the block's wanted fields. Raises ChecksumMismatch; ValueError when the block was
    written without checksums.
    """
    raise NotImplementedError


def read_header(header: np.ndarray) -> tuple[Schema, int, np.ndarray | None]:
    """(fields' schema, rows, int32 lengths `[N]` or None) from part 0. Raises ValueError on foreign bytes."""
    raise NotImplementedError
