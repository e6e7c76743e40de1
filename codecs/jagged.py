"""Packs tensors, lists and TensorDicts into batches, unpacks batches, and slices, selects and joins their rows."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from .batch import Batch, Column, Jagged, Ragged
from .columns import num_rows as rows_of
from .columns import tensordict_types, to_column
from .gather import find_runs, gather_dense, gather_pieces, locate_ragged
from .integers import exclusive_cumsum, round_up
from .memory import as_bytes, fresh
from .schema import Kind, Schema
from .tokens.packed_rows import PaddedRows

if TYPE_CHECKING:  # The package is not imported at run time; see `tensordict_types`.
    from tensordict import LazyStackedTensorDict, TensorDictBase


def pack(schema: Schema, data: Mapping[str, Any] | TensorDictBase, num_rows: int | None = None) -> Batch:
    """Return the fields of `data` as a Batch: contiguous columns on the CPU without grad, in the schema's order.

    data: a mapping (or Batch) from field name to a column in any form that `columns.to_column` takes, or a TensorDict
        with one batch dimension. Fields of the schema that `data` lacks are left out of the result.
    num_rows: number of rows that every field must have; None takes the number of rows of a Batch or TensorDict, or else
    of the first field.

    Columns share memory with inputs that are contiguous already, so do not write to those inputs while the batch is in
    use. Raises ValueError naming the field, the row, what was given and what was expected.
    """
    values, found_rows = _values(data)
    if num_rows is None:
        num_rows = found_rows
    for name in values:
        if name not in schema:
            raise ValueError(f"unknown field {name!r}{_nearest(name, schema)}; the schema has {', '.join(schema)}")
    columns: dict[str, Column] = {}
    first_jagged = ""
    for name in (name for name in schema if name in values):
        column = to_column(schema[name], values[name])
        count = rows_of(column)
        if num_rows is None:
            num_rows = count
        if count != num_rows:
            raise ValueError(f"field {name!r}: got {count} rows, expected {num_rows}")
        if isinstance(column, Jagged):
            first_jagged = first_jagged or name
            column = _same_lengths(name, column, first_jagged, columns.get(first_jagged))
        columns[name] = column
    if num_rows is None:
        raise ValueError("no fields and no number of rows: got an empty mapping, expected at least one field")
    return Batch(schema.subset(columns), num_rows, columns)


def _values(data: Mapping[str, Any] | TensorDictBase) -> tuple[Mapping[str, Any], int | None]:
    """Return (mapping from field name to value, number of rows if known) of the data given to `pack`. Raises ValueError
    for other types of data."""
    if isinstance(data, Batch):
        return data, data.num_rows
    if isinstance(data, tensordict_types("TensorDictBase")):
        return _tensordict_values(cast("TensorDictBase", data))
    if not isinstance(data, Mapping):
        raise ValueError(f"fields: got a {type(data).__name__}, expected a mapping or a TensorDict")
    return data, None


def _tensordict_values(data: TensorDictBase) -> tuple[dict[str, Any], int]:
    """Return (dict from field name to value, number of rows) of a TensorDict, which is not a Mapping. Raises ValueError
    unless it has exactly one batch dimension."""
    if len(data.batch_size) != 1:
        raise ValueError(f"TensorDict: got batch size {list(data.batch_size)}, expected one dimension, the rows")
    if isinstance(data, tensordict_types("LazyStackedTensorDict")):
        return _lazy_values(cast("LazyStackedTensorDict", data)), data.batch_size[0]
    return {name: data.get(name) for name in data.keys()}, data.batch_size[0]


def _lazy_values(data: LazyStackedTensorDict) -> dict[str, list[Any]]:
    """Return a dict from field name to the values of all rows of a lazily stacked TensorDict. Reads the rows one by
    one, because the stack's own `get` fails on ragged rows and its `keys` hides some fields. Raises ValueError when a
    row lacks a field."""
    rows = data.tensordicts
    names = list(dict.fromkeys(name for row in rows for name in row.keys()))
    values: dict[str, list[Any]] = {name: [] for name in names}
    for index, row in enumerate(rows):
        for name in names:
            value = row.get(name, None)
            if value is None:
                raise ValueError(f"field {name!r}, row {index}: it is missing there, but other rows have it")
            values[name].append(value.data if isinstance(value, tensordict_types("NonTensorData")) else value)
    return values


def _nearest(name: Any, schema: Schema) -> str:
    close = difflib.get_close_matches(str(name), list(schema), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _same_lengths(name: str, column: Jagged, first_name: str, first: Column | None) -> Jagged:
    """Return `column` with the lengths array of the batch's first PER_TOKEN field, so that all columns share it. Raises
    ValueError when the lengths differ."""
    if not isinstance(first, Jagged):
        return column
    if not np.array_equal(first.lengths, column.lengths):
        row = int(np.flatnonzero(first.lengths != column.lengths)[0])
        raise ValueError(
            f"field {name!r}, row {row}: got {column.lengths[row]} tokens, "
            f"expected {first.lengths[row]} as in field {first_name!r}"
        )
    return Jagged(column.values, first.lengths)


def unpack(batch: Batch) -> dict[str, list[Any]]:
    """Return a dict from field name to a list of the field's N rows.

    A row of a PER_TOKEN field is a tensor `[L, *trailing]`, of a PER_SAMPLE field `[*trailing]`, of a RAGGED field a
    tensor of the row's own shape, and of an OBJECT field the object. Tensors are views of the batch.
    """
    return {name: _row_views(column) for name, column in batch.items()}


def _row_views(column: Column) -> list[Any]:
    if isinstance(column, Jagged):
        return list(column.values.split(column.lengths.tolist()))
    if isinstance(column, Ragged):
        flat = column.values.split(column.shapes.prod(axis=1).tolist())
        return [row.view(shape) for row, shape in zip(flat, column.shapes.tolist(), strict=True)]
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def slice_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Return rows `start:stop` as views of `batch`. Raises ValueError unless 0 <= start <= stop <= number of rows."""
    if not 0 <= start <= stop <= batch.num_rows:
        raise ValueError(f"rows {start}:{stop}: expected 0 <= start <= stop <= {batch.num_rows}, the batch's rows")
    columns: dict[str, Column] = {}
    lengths = None if batch.lengths is None else batch.lengths[start:stop]
    for name, column in batch.items():
        if isinstance(column, Jagged):
            assert lengths is not None
            first = int(column.lengths[:start].sum())
            columns[name] = Jagged(column.values[first : first + int(lengths.sum())], lengths)
        elif isinstance(column, Ragged):
            elements = column.shapes.prod(axis=1)
            first, last = int(elements[:start].sum()), int(elements[:stop].sum())
            columns[name] = Ragged(column.values[first:last], column.shapes[start:stop])
        else:
            columns[name] = column[start:stop]
    return Batch(batch.schema, stop - start, columns)


def select_rows(batch: Batch, indices: Sequence[int] | np.ndarray) -> Batch:
    """Return a new batch with copies of the rows at `indices` `[M]`, in that order; a row can repeat. Raises ValueError
    for an index below 0 or beyond the last row."""
    row = np.asarray(indices, dtype=np.int64)
    if len(row) and not 0 <= row.min() <= row.max() < batch.num_rows:
        raise ValueError(f"rows {row.min()} to {row.max()}: expected 0 to {batch.num_rows - 1}, the batch's rows")
    block = np.zeros(len(row), dtype=np.int64)
    runs = find_runs(block, row)
    lengths = None if batch.lengths is None else batch.lengths[row]
    columns: dict[str, Column] = {}
    for name, column in batch.items():
        field = batch.schema[name]
        if isinstance(column, Jagged):
            assert lengths is not None
            pieces = runs.pieces(exclusive_cumsum(column.lengths)[row], lengths)
            columns[name] = Jagged(gather_pieces(field, pieces, {0: as_bytes(column.values)}), lengths)
        elif isinstance(column, Ragged):
            values, index = as_bytes(column.values), np.ascontiguousarray(column.shapes).reshape(-1).view(np.uint8)
            shapes, pieces = locate_ragged(field, block, row, runs, {0: values.nbytes}, {0: index})
            columns[name] = Ragged(gather_pieces(field, pieces, {0: values}), shapes)
        elif isinstance(column, torch.Tensor):
            columns[name] = gather_dense(field, block, row, runs, {0: as_bytes(column)})
        else:
            columns[name] = [column[index] for index in row.tolist()]
    return Batch(batch.schema, len(row), columns)


def concat(batches: Sequence[Batch]) -> Batch:
    """Return a new batch with copies of the rows of all `batches`, one after another. Raises ValueError when there are
    no batches or when their schemas differ."""
    if not batches:
        raise ValueError("concat: got no batches, expected at least one")
    schema = batches[0].schema
    for index, batch in enumerate(batches):
        if batch.schema != schema:
            raise ValueError(f"concat: batch {index} has {batch.schema}, expected {schema} as in batch 0")
    columns = {name: _concat_columns([batch[name] for batch in batches]) for name in schema}
    return Batch(schema, sum(batch.num_rows for batch in batches), columns)


def _concat_columns(columns: Sequence[Any]) -> Column:
    first = columns[0]
    if isinstance(first, Jagged):
        return Jagged(_cat([c.values for c in columns]), np.concatenate([c.lengths for c in columns]))
    if isinstance(first, Ragged):
        return Ragged(_cat([c.values for c in columns]), np.concatenate([c.shapes for c in columns]))
    if isinstance(first, torch.Tensor):
        return _cat(columns)
    return [row for column in columns for row in column]


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    out = fresh(tensors[0].dtype, (sum(map(len, tensors)), *tensors[0].shape[1:]))
    return torch.cat(tuple(tensors), out=out)


# ---------------- Jagged columns are converted to the right-padded tensors of trainers, and back.


def to_padded(
    batch: Batch, names: Sequence[str] | None = None, *, pad_to: int | None = None, multiple_of: int = 1
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return PER_TOKEN columns as right-padded tensors `[N, Lmax, *trailing]` by name, and their int64 lengths `[N]`.

    The padding is filled with each field's pad value.
    names: PER_TOKEN fields; None takes all.
    pad_to: Lmax, before it is rounded up; None takes the longest row's length.
    multiple_of: Lmax is rounded up to a multiple of this number, such as the number of tensor x context parallel ranks.
    Raises ValueError for a field of another kind and for rows longer than `pad_to`.
    """
    if names is None:
        names = [name for name in batch if batch.schema[name].kind is Kind.PER_TOKEN]
    if multiple_of < 1:
        raise ValueError(f"multiple_of: got {multiple_of}, expected at least 1")
    for name in names:
        if batch.schema[name].kind is not Kind.PER_TOKEN:
            raise ValueError(f"field {name!r} is {batch.schema[name].kind.value}, but only per_token can be padded")
    lengths = batch.lengths if batch.lengths is not None else np.zeros(batch.num_rows, dtype=np.int64)
    longest = int(lengths.max()) if len(lengths) else 0
    if pad_to is not None and longest > pad_to:
        raise ValueError(f"pad_to: got {pad_to}, but row {int(lengths.argmax())} has {longest} tokens")
    width = round_up(longest if pad_to is None else pad_to, multiple_of)
    rows = PaddedRows(lengths, width)
    padded = {name: rows.pad(batch.schema[name], batch.jagged(name).values) for name in names}
    return padded, torch.from_numpy(lengths.copy())


def from_padded(schema: Schema, padded: Mapping[str, torch.Tensor], lengths: torch.Tensor | Sequence[int]) -> Batch:
    """Return the valid tokens of right-padded `[N, Lmax, *trailing]` tensors as a Batch; the inverse of `to_padded`.

    lengths: number of valid tokens of each row, `[N]`. Raises ValueError for a field that is not PER_TOKEN, and for
    shapes, lengths and dtypes that do not fit the schema.
    """
    rows = torch.as_tensor(lengths, dtype=torch.int64).cpu().numpy()
    columns: dict[str, Column] = {}
    by_width: dict[int, PaddedRows] = {}
    for name, tensor in padded.items():
        if name not in schema or schema[name].kind is not Kind.PER_TOKEN:
            raise ValueError(f"field {name!r}: expected a per_token field of the schema, which has {', '.join(schema)}")
        if tensor.shape[:1] != rows.shape or tensor.ndim < 2:
            raise ValueError(f"field {name!r}: got shape {list(tensor.shape)}, expected [{len(rows)}, Lmax, ...]")
        width = tensor.shape[1]
        if len(rows) and not 0 <= rows.min() <= rows.max() <= width:
            raise ValueError(f"lengths: got {rows.min()} to {rows.max()}, expected 0 to {width} ({name!r})")
        if width not in by_width:
            by_width[width] = PaddedRows(rows, width)
        columns[name] = Jagged(by_width[width].unpad(tensor), rows)
    return pack(schema, columns, num_rows=len(rows))
