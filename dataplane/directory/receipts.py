"""Builds receipts, the keys and locations of rows, from a partition's columns and the table of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...codecs.blocks import BlockLayout
from ...codecs.gather import RowSource
from ...codecs.integers import distinct
from ...codecs.schema import Kind
from ..meta import KVBatchMeta
from .block_table import BlockTable
from .calls import Committed, PutRows
from .partition import Partition
from .rows import ROW_BITS


def receipt_of(
    part: Partition, blocks: BlockTable, rows: np.ndarray, fields: tuple[str, ...], lease_id: int, plane_id: int
) -> KVBatchMeta:
    """Build a receipt (the keys and locations of rows) for `rows`. Fields whose values are in the same blocks and
    rows for all of `rows` share one `RowSource`."""
    together: list[tuple[list[str], np.ndarray]] = []
    table = part.rows.table[part.rows.lines(fields), rows]
    if (table == table[0]).all():
        together.append(([*fields], table[0]))
    else:
        for name, slots in zip(fields, table, strict=True):
            names = next((names for names, same in together if np.array_equal(same, slots)), None)
            if names is None:
                together.append(([name], slots))
            else:
                names.append(name)
    block_ids = distinct(np.concatenate([slots for _, slots in together]) >> ROW_BITS)
    sources = []
    for names, slots in together:
        block = np.searchsorted(block_ids, slots >> ROW_BITS)
        row = slots & ((1 << ROW_BITS) - 1)
        tokens = any(part.schema[name].kind is Kind.PER_TOKEN for name in names)
        start = blocks.token_starts(block_ids, block, row) if tokens else np.zeros(len(rows), dtype=np.int64)
        sources.append(RowSource(tuple(names), block.astype(np.int32), row.astype(np.int32), start))
    return KVBatchMeta(
        part.name,
        tuple(part.rows.keys[rows].tolist()),
        fields,
        np.maximum(part.rows.lengths[rows], 0).astype(np.int64),
        part.rows.versions[rows],
        part.groups.numbers[part.rows.groups[rows]],
        part.rows.tags_of(rows),
        blocks.refs(block_ids),
        tuple(sources),
        lease_id,
        schema=part.schema,
        plane_id=plane_id,
        generations=part.rows.arrivals[rows],
    )


def committed_of(
    part: Partition, put: PutRows, rows: np.ndarray, first_id: int, locations: Sequence[bytes]
) -> Committed:
    """Return the part of a put's receipt that its writer does not have. rows: the put's rows in the partition;
    first_id: id of its first block."""
    others = {name: values for name, values in part.rows.tags_of(rows).items() if name not in put.tags}
    return Committed(
        first_id,
        tuple(locations),
        np.maximum(part.rows.lengths[rows], 0).astype(np.int64) if put.lengths is None else None,
        part.rows.versions[rows] if put.versions is None else None,
        part.groups.numbers[part.rows.groups[rows]],
        part.rows.arrivals[rows],
        others,
    )


def token_starts(lengths: np.ndarray | None, layouts: Sequence[BlockLayout]) -> list[np.ndarray | None]:
    """Return for each block an array with the index of each row's first token within the block. If the rows have no
    lengths (None), the list holds None for each block."""
    if lengths is None:
        return [None] * len(layouts)
    starts: list[np.ndarray | None] = []
    end = 0
    for layout in layouts:
        part = np.asarray(lengths[end : end + layout.num_rows], dtype=np.int64)
        starts.append(part.cumsum() - part)
        end += layout.num_rows
    return starts
