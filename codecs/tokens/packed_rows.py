"""Copies packed rows of tokens into right-padded memory and back, and cuts the slices of context-parallel ranks.

A slice consists of two zig-zag chunks, each with the token after it. A row of L tokens is treated as if padded to P, a
multiple of `pad_multiple`, and is cut into 2 * cp chunks of P / (2 * cp) tokens. Rank r computes chunks r and
2 * cp - 1 - r, so that under causal attention all ranks have the same amount of work (Llama 3, arXiv:2407.21783,
section 3.3.2; Megatron-core's layout). The log-prob of token p + 1 comes from the hidden state at p, so each chunk
[a, b) is sent with one token of look-ahead, as tokens [a, b + 1), cut off at the end of the row. Nothing is sent for a
chunk that begins at or after the end of the row.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..batch import Batch, Column, Jagged
from ..gather import copy_runs
from ..integers import ceil_div, exclusive_cumsum
from ..memory import as_bytes, fresh
from ..schema import Field

ROWWISE_BYTES = 2048
"""Smallest number of bytes of a padded row at which rows are copied one by one, each as one piece of bytes. Shorter
rows are copied together through a mask of their valid tokens, because separate copies of such rows take longer than the
mask."""


class PaddedRows:
    """Converts columns of the same N rows between their packed form and the right-padded one."""

    def __init__(self, lengths: np.ndarray, width: int) -> None:
        """lengths: number of valid tokens of each row, int64 `[N]`. width: number of tokens of a padded row, at least
        the largest of `lengths`."""
        self._lengths = lengths
        self._width = width

    def pad(self, field: Field, values: torch.Tensor) -> torch.Tensor:
        """Return a PER_TOKEN field's packed values `[T, *trailing]` as a padded tensor `[N, width, *trailing]`. The
        tensor is contiguous on the CPU, and the field's pad value follows each row."""
        assert field.dtype is not None
        # Filling the whole tensor brings it into the CPU cache, which makes the copies faster by as much as the filling
        # costs.
        out = fresh(field.dtype, (len(self._lengths), self._width, *field.trailing)).fill_(field.pad_value)
        if not values.numel():
            return out
        source, target, item_bytes = as_bytes(values), as_bytes(out), field.item_bytes
        row_bytes = self._width * item_bytes
        if row_bytes < ROWWISE_BYTES:
            _tokens(target, item_bytes).reshape(self._valid.shape)[self._valid] = _tokens(source, item_bytes)
            return out
        sizes = self._lengths * item_bytes
        ends = np.cumsum(sizes)
        read, written = source.data, target.data
        places = range(0, len(target), row_bytes)
        for at, begin, end in zip(places, (ends - sizes).tolist(), ends.tolist(), strict=True):
            written[at : at + end - begin] = read[begin:end]
        return out

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Return the valid tokens of a tensor `[N, width, *trailing]` as a contiguous tensor `[T, *trailing]`. The
        tensor can have any strides and be on any device; the result is on the CPU without grad."""
        tensor = padded.detach().cpu().resolve_neg()
        out = fresh(tensor.dtype, (int(self._lengths.sum()), *tensor.shape[2:]))
        if not out.numel():
            return out
        item_bytes = out[0].nbytes
        if self._width * item_bytes < ROWWISE_BYTES:
            tokens = _tokens(as_bytes(tensor.contiguous()), item_bytes).reshape(self._valid.shape)
            _tokens(as_bytes(out), item_bytes)[:] = tokens[self._valid]
            return out
        memory, row_bytes = _row_memory(tensor)
        number = np.arange(len(tensor))
        copy_runs(as_bytes(out), {0: memory}, np.zeros_like(number), number * row_bytes, self._lengths * item_bytes)
        return out

    @functools.cached_property
    def _valid(self) -> np.ndarray:
        return np.arange(self._width) < self._lengths[:, None]


def _tokens(memory: np.ndarray, item_bytes: int) -> np.ndarray:
    """Return bytes as a 1-D array of tokens, without a copy. The tokens are opaque, so that one mask selects whole
    tokens of any dtype and trailing shape."""
    return memory.view(np.dtype((np.void, item_bytes)))


def _row_memory(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """Return the memory of a tensor `[N, width, *trailing]` as uint8 1-D, and its row stride in bytes. The stride is
    the distance from the beginning of a row to the beginning of the next. The tensor is copied only if there are gaps
    within its rows; gaps between the rows, as in `tensor[:, :width]`, need no copy."""
    if not tensor[0].is_contiguous():
        tensor = tensor.contiguous()
    step = tensor.stride(0)
    whole = tensor.as_strided(((len(tensor) - 1) * step + tensor[0].numel(),), (1,))
    return as_bytes(whole), step * tensor.itemsize


def chunks(lengths: np.ndarray, pad_multiple: int, cp: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, stops) of the two chunks of each padded row that `rank` computes, int64 `[N, 2]`. The look-ahead
    token is not counted.

    lengths: number of tokens of each row, int `[N]`. Starts and stops can lie beyond the end of the unpadded row.
    Raises ValueError when the padded rows cannot be cut into 2 * cp equal chunks, when cp is less than 2, or when
    `rank` is not between 0 and cp - 1.
    """
    if cp < 2 or not 0 <= rank < cp:
        raise ValueError(f"context slices: got rank {rank} of cp={cp}, expected cp >= 2 and a rank below it")
    if pad_multiple % (2 * cp):
        raise ValueError(f"pad_multiple: got {pad_multiple}, expected a multiple of 2 * cp = {2 * cp}")
    lengths = np.asarray(lengths, dtype=np.int64)
    size = ceil_div(lengths, pad_multiple) * (pad_multiple // (2 * cp))
    starts = np.stack([rank * size, (2 * cp - 1 - rank) * size], axis=1)
    return starts, starts + size[:, None]


def pieces(lengths: np.ndarray, pad_multiple: int, cp: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, stops) of the two pieces of each row that are sent to `rank`, int64 `[N, 2]`.

    A piece is a chunk and one token of look-ahead, cut off at the end of the row. Arguments and errors are those of
    `chunks`. The piece of a chunk that begins at or after the end of its row is empty.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    starts, stops = chunks(lengths, pad_multiple, cp, rank)
    ends = lengths[:, None]
    return np.minimum(starts, ends), np.where(starts < ends, np.minimum(stops + 1, ends), ends)


def piece_lengths(lengths: np.ndarray, pad_multiple: int, cp: int, rank: int) -> np.ndarray:
    """Return the number of tokens of each row that are sent to `rank`, int64 `[N]`. Arguments and errors are those of
    `chunks`."""
    starts, stops = pieces(lengths, pad_multiple, cp, rank)
    return (stops - starts).sum(axis=1)


def slice_batch(batch: Batch, lengths: np.ndarray, pad_multiple: int, cp: int, rank: int) -> Batch:
    """Return `batch` with each row of its PER_TOKEN columns reduced to the two pieces of `rank`. They are joined, in
    new memory.

    batch: whole rows. lengths: their numbers of tokens, int `[N]`. Columns of other kinds are shared, not copied.
    Raises ValueError as `chunks` does, and when the batch's rows do not have these lengths.
    """
    if batch.lengths is None:
        return batch
    if not np.array_equal(batch.lengths, lengths):
        raise ValueError("context slices: the batch's rows have other lengths than those given, expected whole rows")
    starts, stops = pieces(lengths, pad_multiple, cp, rank)
    taken = (stops - starts).sum(axis=1)
    full = (stops > starts).reshape(-1)
    begin = (exclusive_cumsum(batch.lengths)[:, None] + starts).reshape(-1)[full]
    tokens = (stops - starts).reshape(-1)[full]
    whole = np.zeros(len(begin), dtype=np.int64)
    columns: dict[str, Column] = {}
    for name, column in batch.items():
        if isinstance(column, Jagged):
            field = batch.schema[name]
            values = fresh(column.values.dtype, (int(taken.sum()), *field.trailing))
            size = field.item_bytes
            copy_runs(as_bytes(values), {0: as_bytes(column.values)}, whole, begin * size, tokens * size)
            column = Jagged(values, taken)
        columns[name] = column
    return Batch(batch.schema, batch.num_rows, columns)
