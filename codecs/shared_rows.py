"""Finds the common leading tokens of the rows of a group, and locates rows in blocks that store these tokens once.

All rows of a prompt begin with the same tokens, which have the same routes. A block stores this common part only with
the first row of the group:

    rows in memory   prompt a, prompt b, prompt c        positions count whole rows, as everywhere else
    values part      prompt a, b, c                      `stored_pieces` says where a row's two pieces are

The common part is found by comparing bytes. Rows with routes that differ somewhere in the prompt share the tokens
before the difference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .batch import Batch
from .memory import as_bytes

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int

LEAST_BYTES = 128
"""Smallest number of saved bytes for which the rows of a group share tokens. Sharing costs bytes in every receipt."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Groups of a block that store the common leading tokens of their rows once. A group is a run of successive
    rows."""

    fields: tuple[str, ...]
    """Names of the fields whose leading tokens are stored once for each group."""
    first: tuple[int, ...]
    """Position in the block of each group's first row, ascending."""
    counts: tuple[int, ...]
    """Number of rows of each group, at least 2."""
    tokens: tuple[int, ...]
    """Number of leading tokens that the rows of each group share; none of the rows is shorter."""
    starts: tuple[int, ...]
    """Position of each group's first token in the block, counted as if every row were stored whole."""


def shared_fields(batch: Batch) -> tuple[str, ...]:
    """Return the fields of `batch` whose schema says that rows of a group share their leading tokens."""
    return tuple(name for name, field in batch.schema.items() if field.shared)


def find_shared(batch: Batch, start: int, stop: int, groups: np.ndarray, fields: Sequence[str]) -> SharedRows | None:
    """Return the groups in rows `start:stop` of `batch` whose rows begin with the same tokens; None if there are none.
    The tokens must be the same in all of `fields`. Groups whose sharing would save fewer than LEAST_BYTES bytes are
    left out.

    groups: number of each row's group, `[N]` for all rows of the batch. Only rows that follow one another form a group
    here.
    """
    lengths = batch.lengths
    if lengths is None or not fields or stop - start < 2:
        return None
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    column = groups[start:stop]
    heads = start + np.concatenate([[0], np.flatnonzero(column[1:] != column[:-1]) + 1])
    sizes = np.diff(heads, append=stop)
    named = sorted(fields, key=lambda name: batch.schema[name].item_bytes)  # The cheapest comparison comes first.
    columns = [(batch.schema[name].item_bytes, as_bytes(batch.jagged(name).values)) for name in named]
    bytes_per_token = sum(size for size, _ in columns)
    found: list[tuple[int, int, int, int]] = []
    for head, size in zip(heads.tolist(), sizes.tolist(), strict=True):
        for first, count, tokens in _runs(columns, begins, lengths, head, head + size):
            if tokens * bytes_per_token * (count - 1) >= LEAST_BYTES:
                found.append((first - start, count, tokens, int(begins[first] - begins[start])))
    if not found:
        return None
    first, counts, shared, starts = zip(*found, strict=True)
    return SharedRows(tuple(fields), first, counts, shared, starts)


def _runs(
    columns: Sequence[tuple[int, np.ndarray]], begins: np.ndarray, lengths: np.ndarray, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Divide the rows `start:stop` of one group into runs that begin alike. A run is (first row, number of rows, number
    of leading tokens in common). A row that begins with another token, such as one without routes, begins a run.

    columns: for each column, the number of bytes of a token, and the column's bytes (uint8 1-D). begins, lengths: first
    token and number of tokens of each row of the batch.
    """
    first, tokens = start, int(lengths[start])
    for row in range(start + 1, stop):
        common = min(tokens, int(lengths[row]))
        for item_bytes, values in columns:
            common = _common(values, int(begins[first]), int(begins[row]), item_bytes, common)
        if common:
            tokens = common
        else:
            yield first, row - first, tokens
            first, tokens = row, int(lengths[row])
    yield first, stop - first, tokens


def _common(values: np.ndarray, one: int, other: int, item_bytes: int, tokens: int) -> int:
    """Return how many of the first `tokens` tokens are the same in the rows that begin at the tokens `one` and `other`.
    values: bytes of the column, uint8 1-D."""
    size, first, second = tokens * item_bytes, one * item_bytes, other * item_bytes
    address = values.ctypes.data
    # Usually all tokens are the same. memcmp finds this in half the time of numpy.
    if not _memcmp(address + first, address + second, size):
        return tokens
    width = next(width for width in (8, 4, 2, 1) if item_bytes % width == 0)  # Wide words compare faster than bytes.
    words = [values[start : start + size].view(f"u{width}") for start in (first, second)]
    return int((words[0] != words[1]).argmax()) * width // item_bytes


def _saved_before(shared: SharedRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of tokens saved by all groups before each group, and by each group itself, int64 `[G]` each."""
    saved = (np.array(shared.counts, np.int64) - 1) * np.array(shared.tokens, np.int64)
    return np.cumsum(saved) - saved, saved


def kept_ranges(shared: SharedRows, lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges of tokens (start, stop) that a values part stores, in order. Positions count as if every row
    were stored whole. lengths: number of tokens of each row of the block, int `[N]`."""
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    ranges, start = [], 0
    for first, count, tokens in zip(shared.first, shared.counts, shared.tokens, strict=True):
        for row in range(first + 1, first + count):
            ranges.append((start, int(begins[row])))
            start = int(begins[row]) + tokens
    return [*ranges, (start, int(lengths.sum()))]


def stored_ends(shared: SharedRows, lengths: np.ndarray) -> np.ndarray:
    """Return the position in the values part at which each row ends, in tokens, int64 `[N]`. lengths: as in
    `kept_ranges`."""
    kept = np.array(lengths, dtype=np.int64)
    for first, count, tokens in zip(shared.first, shared.counts, shared.tokens, strict=True):
        kept[first + 1 : first + count] -= tokens
    return np.cumsum(kept)


def stored_pieces(
    block: np.ndarray, row: np.ndarray, start: np.ndarray, lengths: np.ndarray, shared: Mapping[int, SharedRows | None]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the pieces of the wanted rows are stored, int64 `[P]` each, in the order of the rows. The arrays are
    the block, the first token in the values part, and the number of tokens of each piece. Adjacent pieces are joined.

    block, row, start: block of each wanted row, its position there, and the position of its first token counted as if
    all rows were stored whole, `[N]`. lengths: number of tokens of each wanted row, `[N]`. shared: for each block, its
    groups that share tokens.
    """
    begin = np.stack([np.zeros(len(row), np.int64), start.astype(np.int64)], axis=1)
    count = np.stack([np.zeros(len(row), np.int64), lengths.astype(np.int64)], axis=1)
    for number, groups in shared.items():
        if groups is None:
            continue
        at = np.flatnonzero(block == number)
        firsts, counts, tokens, starts = (
            np.array(one, np.int64) for one in (groups.first, groups.counts, groups.tokens, groups.starts)
        )
        before, saved = _saved_before(groups)
        group = np.searchsorted(firsts, row[at], side="right") - 1
        known = group >= 0
        at, group = at[known], group[known]
        index = row[at] - firsts[group]
        inside, later = index < counts[group], (index > 0) & (index < counts[group])
        # Earlier groups move all later rows forward. In addition, a row of the group moves by what the group's rows
        # before it save, and a row after the group by all that the group saves.
        moved = before[group] + np.where(inside, np.maximum(index - 1, 0) * tokens[group], saved[group])
        begin[at, 1] -= moved
        count[at[later], 1] -= tokens[group[later]]
        count[at[later], 0] = tokens[group[later]]
        begin[at[later], 0] = starts[group[later]] - before[group[later]]
    return _joined(np.repeat(block, 2).astype(np.int64), begin.reshape(-1), count.reshape(-1))


def _joined(block: np.ndarray, begin: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drop empty pieces, and join adjacent ones of the same block."""
    full = np.flatnonzero(count)
    block, begin, count = block[full], begin[full], count[full]
    if not len(full):
        return block, begin, count
    breaks = np.ones(len(full), dtype=bool)
    breaks[1:] = (block[1:] != block[:-1]) | (begin[1:] != begin[:-1] + count[:-1])
    heads = np.flatnonzero(breaks)
    return block[heads], begin[heads], np.add.reduceat(count, heads)
