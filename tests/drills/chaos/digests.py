"""Computes digests of rows, field by field, so that the rows read can be compared with the rows put."""

from __future__ import annotations

import numpy as np
import xxhash

from headrace.codecs.batch import Batch, Column, Jagged, Ragged


def row_digests(batch: Batch) -> dict[str, list[str]]:
    """Return for each field the digests of its values, one per row in the batch's order. A digest is xxh3 in
    hexadecimal."""
    return {name: _column_digests(batch[name]) for name in batch}


def _column_digests(column: Column) -> list[str]:
    if isinstance(column, Jagged):
        flat = column.values.numpy()
        return [_digest(part) for part in np.split(flat, np.cumsum(column.lengths)[:-1])]
    if isinstance(column, Ragged):
        sizes = column.shapes.prod(axis=1)
        return [_digest(part) for part in np.split(column.values.numpy(), np.cumsum(sizes)[:-1])]
    if isinstance(column, list):
        return [xxhash.xxh3_64_hexdigest(repr(value).encode()) for value in column]
    return [_digest(row) for row in column.numpy()]


def _digest(values: np.ndarray) -> str:
    head = f"{values.dtype} {values.shape} ".encode()
    return xxhash.xxh3_64_hexdigest(head + np.ascontiguousarray(values).tobytes())
