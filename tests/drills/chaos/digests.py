"""Computes digests of rows, field by field, so that the rows read can be compared with the rows put."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from headrace.codecs.batch import Batch, Column, Jagged, Ragged
from headrace.codecs.blobs import Blob, BlobRows, References
from headrace.codecs.jagged import slice_rows
from headrace.codecs.schema import Field


def row_digests(batch: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return for each field the digests of its values, one per row in the batch's order. A digest is xxh3 in
    hexadecimal; that of a list of blobs is their names."""
    pictures = next((name for name, column in batch.items() if _lists_blobs(column, batch, name)), None)
    found = {name: _column_digests(batch[name]) for name in batch if name != pictures}
    return found if pictures is None else {**found, pictures: _names(batch[pictures])}


def blob_digests(blobs: BlobRows, field: Field) -> list[str]:
    """Return the digests of rows with blobs as `row_digests` does, from the bytes that were read. field: declaration of
    the column."""
    rows = [slice_rows(blobs.blobs, at, at + 1) for at in range(blobs.blobs.num_rows)]
    names = [Blob(field, {name: _value(row[name]) for name in row}).name for row in rows]
    return [_listed([names[at] for at in blobs.of(row)]) for row in range(len(blobs.references.counts))]


def _value(column: Column) -> Any:
    """Return the value of the only row of a column."""
    if isinstance(column, Ragged):
        return column.values.reshape(tuple(column.shapes[0]))
    assert not isinstance(column, Jagged)
    return column[0]


def _lists_blobs(column: Any, batch: Mapping[str, Any], name: str) -> bool:
    if isinstance(batch, Batch) and batch.schema[name].parts:
        return True
    rows = column if isinstance(column, list) else [None]
    return all(isinstance(row, list) and all(isinstance(one, Blob) for one in row) for row in rows)


def _names(column: Any) -> list[str]:
    """Return the digests of the rows of a column of blobs, which has the blobs or their names."""
    if not isinstance(column, Ragged):
        return [_listed([one.name for one in row]) for row in column]
    found = References.read(column)
    listed = iter([found.names[at] for at in map(int, found.index)])
    return [_listed([next(listed) for _ in range(count)]) for count in found.counts.tolist()]


def _listed(names: Sequence[str]) -> str:
    return " ".join(names)


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
