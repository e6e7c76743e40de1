"""Jagged columns to and from right-padded tensors: where a trainer's padding begins and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from .batch import Batch, Column, Jagged
from .jagged import pack
from .memory import fresh
from .runs import as_bytes
from .schema import Field, Kind, Schema

_SAME_SIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def to_padded(
    batch: Batch,
    names: Sequence[str] | None = None,
    *,
    pad_to: int | None = None,
    multiple_of: int = 1,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """({name: `[N, Lmax, *trailing]`}, int64 lengths `[N]`): right-padded with each field's pad value.

    names: PER_TOKEN fields; None takes all.
    pad_to: Lmax; None takes the longest row's length.
    multiple_of: Lmax is rounded up to a multiple of this (of TP x CP, say).
    Raises ValueError for a field of another kind and for rows longer than `pad_to`.
    """
    if names is None:
        names = [name for name in batch if batch.schema[name].kind is Kind.PER_TOKEN]
    if multiple_of < 1:
        raise ValueError(f"multiple_of: got {multiple_of}, expected at least 1")
    for name in names:
        if batch.schema[name].kind is not Kind.PER_TOKEN:
            raise ValueError(f"field {name!r} is {batch.schema[name].kind.value}, only per_token fields are padded")
    lengths = batch.lengths if batch.lengths is not None else np.zeros(batch.num_rows, dtype=np.int64)
    longest = int(lengths.max()) if len(lengths) else 0
    if pad_to is not None and longest > pad_to:
        raise ValueError(f"pad_to: got {pad_to}, but row {int(lengths.argmax())} has {longest} tokens")
    width = -(-(longest if pad_to is None else pad_to) // multiple_of) * multiple_of
    valid = np.arange(width) < lengths[:, None]
    padded = {name: _scatter(batch.schema[name], batch.jagged(name).values, valid) for name in names}
    return padded, torch.from_numpy(lengths.copy())


def from_padded(schema: Schema, padded: Mapping[str, torch.Tensor], lengths: torch.Tensor | Sequence[int]) -> Batch:
    """Inverse of `to_padded`: the valid tokens of right-padded `[N, Lmax, *trailing]` tensors as a Batch.

    lengths: `[N]`. Raises ValueError for a field that is not PER_TOKEN and for what does not fit the schema.
    """
    rows = torch.as_tensor(lengths, dtype=torch.int64).cpu().numpy()
    columns: dict[str, Column] = {}
    for name, tensor in padded.items():
        if name not in schema or schema[name].kind is not Kind.PER_TOKEN:
            raise ValueError(f"field {name!r}: expected a per_token field of the schema, which has {', '.join(schema)}")
        if tensor.shape[:1] != (len(rows),) or tensor.ndim < 2:
            raise ValueError(f"field {name!r}: got shape {list(tensor.shape)}, expected [{len(rows)}, Lmax, ...]")
        if len(rows) and not 0 <= rows.min() <= rows.max() <= tensor.shape[1]:
            raise ValueError(f"lengths: got {rows.min()} to {rows.max()}, expected 0 to {tensor.shape[1]} ({name!r})")
        valid = torch.from_numpy(np.arange(tensor.shape[1]) < rows[:, None])
        columns[name] = Jagged(tensor.detach().cpu()[valid], rows)
    return pack(schema, columns, num_rows=len(rows))


def _scatter(field: Field, values: torch.Tensor, valid: np.ndarray) -> torch.Tensor:
    """`values` `[T, *trailing]` put where `valid` `[N, Lmax]` is true, the pad value elsewhere."""
    assert field.dtype is not None
    out = fresh(field.dtype, (*valid.shape, *field.trailing)).fill_(field.pad_value)
    # As unsigned integers of the same size: numpy knows no bf16 and fp8, and its masked copy is the fastest there is.
    plain = _SAME_SIZE[field.dtype.itemsize]
    target = as_bytes(out).view(plain).reshape(out.shape)
    target[valid] = as_bytes(values).view(plain).reshape(values.shape)
    return out
