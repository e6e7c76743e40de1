"""Computes which tokens of each row a context-parallel rank needs: two zig-zag chunks and one token after each.

A row of L tokens is treated as if padded to P, a multiple of `pad_multiple`, and is cut into 2 * cp chunks of P / (2 *
cp) tokens. Rank r computes chunks r and 2 * cp - 1 - r, so that under causal attention all ranks have the same amount
of work (Llama 3, arXiv:2407.21783, section 3.3.2; Megatron-core's layout). The log-prob of token p + 1 comes from the
hidden state at p, so each chunk [a, b) is sent with one token of look-ahead, as tokens [a, b + 1), cut off at the end
of the row. Nothing is sent for a chunk that begins at or after the end of the row.
"""

from __future__ import annotations

import numpy as np

from ..batch import Batch, Column, Jagged
from ..gather import as_bytes, copy_runs, exclusive_cumsum
from ..integers import ceil_div
from ..memory import fresh


def chunks(lengths: np.ndarray, pad_multiple: int, cp: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, stops) of the two chunks of each padded row that `rank` computes, int64 `[N, 2]`. The look-ahead
    token is not counted.

    lengths: number of tokens of each row, int `[N]`. Starts and stops may lie beyond the end of the unpadded row.
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
        raise ValueError("context slices: the batch's rows are not of the lengths given, expected whole rows")
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
