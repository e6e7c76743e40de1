"""Computes digests of rows and byte ranges, to compare a read with what another process wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack

from ...codecs.batch import Jagged, Ragged
from ...codecs.gather import as_bytes

Digests = dict[str, np.ndarray]
"""Digests of the rows: field name -> uint64 `[N]`."""

BYTES = "bytes"
"""Name of the single field of baselines that know only bytes."""


class Mismatch(ValueError):
    """Raised when a read returned other bytes, another dtype or other rows than were written."""


def row_digests(columns: Mapping[str, Any]) -> Digests:
    """Compute xxh3 of every row's bytes and dtype, for columns of a Batch or of a TensorDict."""
    return {name: np.array([_digest(row) for row in _rows(column)], np.uint64) for name, column in columns.items()}


def bytes_digest(data: Any) -> Digests:
    """Compute the xxh3 of one buffer, as the only row of the field BYTES."""
    return {BYTES: np.array([xxhash.xxh3_64_intdigest(data)], np.uint64)}


def check(got: Digests, expected: Digests, what: str) -> None:
    """Raise Mismatch naming the field and the first row that differs, or the fields or rows that are missing."""
    if set(got) != set(expected):
        raise Mismatch(f"{what}: read fields {sorted(got)}, expected {sorted(expected)}")
    for name, wanted in expected.items():
        if len(got[name]) != len(wanted):
            raise Mismatch(f"{what}: field {name!r} has {len(got[name])} rows, expected {len(wanted)}")
        wrong = np.flatnonzero(got[name] != wanted)
        if len(wrong):
            raise Mismatch(f"{what}: field {name!r} differs in {len(wrong)} rows, the first is row {wrong[0]}")


def _rows(column: Any) -> list[Any]:
    if isinstance(column, Jagged):
        return list(column.values.split(column.lengths.tolist()))
    if isinstance(column, Ragged):
        return list(column.values.split(column.shapes.prod(axis=1).tolist()))
    if isinstance(column, NonTensorStack | NonTensorData):
        return list(column.tolist())
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def _digest(row: Any) -> int:
    if isinstance(row, torch.Tensor):
        return xxhash.xxh3_64_intdigest(as_bytes(row.contiguous().reshape(-1)).data, _DTYPE_SEEDS[row.dtype])
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(row, order="sorted"))


_DTYPE_SEEDS = {
    dtype: 1 + number
    for number, dtype in enumerate(
        (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        )
    )
}
"""Seed of the digest for each dtype. It makes a row that is read with another dtype than it was written with count as a
mismatch."""
