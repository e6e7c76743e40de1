"""Finds the leading tokens that rows of a group have in common, and locates rows in blocks that store these once.

All rows of a prompt begin with the same tokens, and the rows of one episode often share many more: a branch goes on
from the middle of an earlier row, a call repeats the history of the call before. The rows of a group form a tree, in
which a row takes its leading tokens from an earlier row and stores only the tokens after these:

    rows in memory   prompt a, prompt b, prompt b c      positions count whole rows, as everywhere else
    values part      prompt a, b, c                      `stored_pieces` says where the pieces of a row are

Common tokens are found by comparing bytes. Rows with routes that differ somewhere in the prompt share the tokens
before the difference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from .batch import Batch
from .memory import as_bytes

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int

LEAST_BYTES = 128
"""Smallest number of saved bytes for which rows share tokens. Sharing costs bytes in every receipt."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a block that take their leading tokens from an earlier row. Successive rows that take the same tokens
    from the same row form a run."""

    fields: tuple[str, ...]
    """Names of the fields whose common tokens are stored once."""
    first: tuple[int, ...]
    """Position in the block of each run's first row, ascending."""
    counts: tuple[int, ...]
    """Number of rows of each run, at least 1."""
    tokens: tuple[int, ...]
    """Number of leading tokens that each row of a run takes; none of the rows is shorter."""
    starts: tuple[int, ...]
    """Position of the parent's first token in the block, counted as if every row were stored whole."""
    parents: tuple[int, ...] = ()
    """Position in the block of the row from which the rows of a run take their tokens; it is before the run. This row
    stores the last of these tokens itself, and may take the tokens before from another row."""

    def with_parents(self) -> SharedRows:
        """Return these rows as blocks describe them today.

        Journals of earlier versions have no parents: there each run begins with the row that the others take from."""
        if self.parents:
            return self
        first, counts = tuple(row + 1 for row in self.first), tuple(count - 1 for count in self.counts)
        return replace(self, first=first, counts=counts, parents=self.first)


def shared_fields(batch: Batch) -> tuple[str, ...]:
    """Return the fields of `batch` whose schema says that rows of a group share their leading tokens."""
    return tuple(name for name, field in batch.schema.items() if field.shared)


def find_shared(batch: Batch, start: int, stop: int, groups: np.ndarray, fields: Sequence[str]) -> SharedRows | None:
    """Return which rows of `start:stop` of `batch` take their leading tokens from an earlier row; None if no row does.
    The tokens are the same in all of `fields`. Runs that would save fewer than LEAST_BYTES bytes are left out.

    groups: number of each row's group, `[N]` for all rows of the batch. Only rows that follow one another form a group
    here.
    """
    lengths = batch.lengths
    if lengths is None or not fields or stop - start < 2:
        return None
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    columns = [(batch.schema[name].item_bytes, as_bytes(batch.jagged(name).values)) for name in fields]
    rows = _Rows(sorted(columns, key=itemgetter(0)), begins, lengths)  # The cheapest comparison comes first.
    found = [
        run
        for head, behind in _successive(groups, start, stop)
        for run in _Tree(rows, head).grow(behind)
        if run.tokens * run.count * rows.bytes_per_token >= LEAST_BYTES
    ]
    if not found:
        return None
    return SharedRows(
        tuple(fields),
        tuple(run.first - start for run in found),
        tuple(run.count for run in found),
        tuple(run.tokens for run in found),
        tuple(int(begins[run.parent] - begins[start]) for run in found),
        tuple(run.parent - start for run in found),
    )


def repeated_tokens(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return for each row of a group how many of its leading tokens an earlier row begins with, int64 `[N]`.

    ids: token ids of all rows in order. lengths: number of tokens of each row, `[N]`.
    """
    if len(lengths) < 2:
        return np.zeros(len(lengths), np.int64)
    columns = [(ids.itemsize, ids.view(np.uint8))]
    tree = _Tree(_Rows(columns, np.cumsum(lengths) - lengths, lengths), 0, least_bytes=1)
    tree.grow(len(lengths))
    return np.array(list(tree.taken.values()), np.int64)


def _successive(groups: np.ndarray, start: int, stop: int) -> list[tuple[int, int]]:
    """Return (first row, row behind the last) of the groups of rows `start:stop`."""
    column = groups[start:stop]
    heads = (start + np.flatnonzero(column[1:] != column[:-1]) + 1).tolist()
    return list(zip([start, *heads], [*heads, stop], strict=True)) if stop > start else []


class _Rows:
    """Tokens of rows, which can be compared."""

    def __init__(self, columns: Sequence[tuple[int, np.ndarray]], begins: np.ndarray, lengths: np.ndarray) -> None:
        """columns: for each column, the number of bytes of a token, and the column's bytes (uint8 1-D). begins,
        lengths: first token and number of tokens of each row."""
        self._columns = columns
        self._addresses = [(size, values.ctypes.data) for size, values in self._columns]
        self._memory = [(size, values.data) for size, values in self._columns]
        self.bytes_per_token = sum(size for size, _ in self._columns)
        self.begins = begins.tolist()
        self.lengths = lengths.tolist()

    def equal(self, one: int, other: int, start: int, stop: int) -> bool:
        """Return whether two rows have the same tokens `start:stop`. Both rows must have these tokens."""
        first, second, count = self.begins[one] + start, self.begins[other] + start, stop - start
        for size, address in self._addresses:
            if _memcmp(address + first * size, address + second * size, count * size):
                return False
        return True

    def common(self, one: int, other: int, start: int) -> int:
        """Return how many leading tokens two rows have in common, if the first `start` are known to be the same."""
        tokens = min(self.lengths[one], self.lengths[other]) - start
        for size, values in self._columns:
            first, second = ((self.begins[row] + start) * size for row in (one, other))
            tokens = _common(values, first, second, size, tokens)
        return start + tokens

    def token(self, row: int, index: int) -> bytes:
        """Return the bytes of one token of a row."""
        at = self.begins[row] + index
        return b"".join([memory[at * size : (at + 1) * size] for size, memory in self._memory])


def _common(values: np.ndarray, first: int, second: int, item_bytes: int, tokens: int) -> int:
    """Return how many of the `tokens` tokens that begin at the bytes `first` and `second` are the same. values: bytes
    of the column, uint8 1-D."""
    size, address = tokens * item_bytes, values.ctypes.data
    # Usually all tokens are the same. memcmp finds this in half the time of numpy.
    if not _memcmp(address + first, address + second, size):
        return tokens
    width = next(width for width in (8, 4, 2, 1) if item_bytes % width == 0)  # Wide words compare faster than bytes.
    words = [values[start : start + size].view(f"u{width}") for start in (first, second)]
    return int((words[0] != words[1]).argmax()) * width // item_bytes


@dataclass(slots=True)
class _Run:
    """Successive rows that take the same tokens from the same row; see `SharedRows`."""

    first: int
    count: int
    tokens: int
    parent: int


class _Tree:
    """Prefix tree of the rows of a group, into which the rows are put in order. Rows stand for its nodes."""

    def __init__(self, rows: _Rows, head: int, least_bytes: int = LEAST_BYTES) -> None:
        """head: first row of the group. least_bytes: smallest number of bytes that a row must take from another row
        beyond what that row takes itself."""
        self._rows = rows
        self._head = head
        self._chunk = max(1, least_bytes // rows.bytes_per_token)
        self._parents = {head: head}
        self.taken = {head: 0}
        """For each row, the number of tokens that it takes from its parent; 0 for a row without a parent."""
        self._next: dict[tuple[int, int, bytes], int] = {}
        """A row that continues in some way after so many tokens of a row, by that row, this number and the token."""
        self._runs: list[_Run] = []

    def grow(self, behind: int) -> list[_Run]:
        """Put in the rows up to row `behind`, and return their runs."""
        self._know(self._head, -1, 0)
        for row in range(self._head + 1, behind):
            run = self._runs[-1] if self._runs else None
            if run is not None and run.first + run.count == row and self._fits(row, run):
                self._parents[row], self.taken[row] = run.parent, run.tokens
                run.count += 1
                continue
            parent, tokens = self._longest(row)
            self._add(row, parent, tokens)
            if not tokens:
                continue
            near = run is not None and run.first + run.count == row and run.parent == parent
            if run is not None and near and abs(run.tokens - tokens) < self._chunk:
                run.tokens = min(run.tokens, tokens)
                run.count += 1
            else:
                self._runs.append(_Run(row, 1, tokens, parent))
        return self._runs

    def _fits(self, row: int, run: _Run) -> bool:
        """Return whether a row begins like the rows of a run, and like no other row for much longer.

        This spares most rows of a prompt with one row for each sample the search for the longest beginning."""
        rows, tokens = self._rows, run.tokens
        if rows.lengths[row] < tokens or not rows.equal(row, run.parent, 0, tokens):
            return False
        if rows.lengths[row] - tokens < self._chunk:
            return True
        stop = tokens + self._chunk
        other = self._next.setdefault((run.parent, tokens, rows.token(row, tokens)), row)
        return other == row or rows.lengths[other] < stop or not rows.equal(row, other, tokens, stop)

    def _longest(self, row: int) -> tuple[int, int]:
        """Return the row that begins like `row` for the most tokens, and their number."""
        rows, at = self._rows, row - 1
        tokens = rows.common(row, at, 0)
        while True:
            at = self._owner(at, tokens)
            if tokens == rows.lengths[row]:
                break
            other = self._next.get((at if tokens else -1, tokens, rows.token(row, tokens)))
            if other is None:
                break
            at, tokens = other, rows.common(row, other, tokens)
        while self.taken[at] and tokens - self.taken[at] < self._chunk:  # These few tokens are not worth a run.
            at, tokens = self._parents[at], self.taken[at]
        return at, tokens

    def _owner(self, row: int, tokens: int) -> int:
        """Return the row that stores the last of the first `tokens` tokens of `row`."""
        while self.taken[row] >= tokens and self.taken[row]:
            row = self._parents[row]
        return row

    def _add(self, row: int, parent: int, tokens: int) -> None:
        self._parents[row], self.taken[row] = parent, tokens
        self._know(row, parent if tokens else -1, tokens)
        if tokens:
            self._know(parent, parent, tokens)

    def _know(self, row: int, parent: int, tokens: int) -> None:
        """Record that `row` continues after the first `tokens` tokens of `parent` (-1: at its beginning)."""
        if tokens < self._rows.lengths[row]:
            self._next.setdefault((parent, tokens, self._rows.token(row, tokens)), row)


def _savings(shared: SharedRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the columns `first`, `counts` and `tokens` of the runs as arrays, int64 `[R]` each."""
    first, counts, tokens = (np.array(one, np.int64) for one in (shared.first, shared.counts, shared.tokens))
    return first, counts, tokens


def _taken(shared: SharedRows, num_rows: int) -> np.ndarray:
    """Return how many tokens each row of a block takes from another row, int64 `[num_rows]`."""
    first, counts, tokens = _savings(shared)
    taken = np.zeros(num_rows, np.int64)
    taken[np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())] = np.repeat(tokens, counts)
    return taken


def kept_ranges(shared: SharedRows, lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges of tokens (start, stop) that a values part stores, in order. Positions count as if every row
    were stored whole. lengths: number of tokens of each row of the block, int `[N]`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    taken = _taken(shared, len(lengths))
    at = np.flatnonzero(taken)
    stops = ends[at] - lengths[at]
    return list(zip([0, *(stops + taken[at]).tolist()], [*stops.tolist(), int(ends[-1])], strict=True))


def stored_ends(shared: SharedRows, lengths: np.ndarray) -> np.ndarray:
    """Return the position in the values part at which each row ends, in tokens, int64 `[N]`.

    lengths: as in `kept_ranges`."""
    return np.cumsum(lengths - _taken(shared, len(lengths)), dtype=np.int64)


class _Places:
    """Locations of the rows of one block in its values part."""

    def __init__(self, shared: SharedRows) -> None:
        self._first, self._counts, self.tokens = _savings(shared)
        saved = self._counts * self.tokens
        self._before = np.cumsum(saved) - saved
        """Number of tokens saved by all runs before each run."""
        self.parents, starts = np.array(shared.parents, np.int64), np.array(shared.starts, np.int64)
        if (self.parents >= self._first).any():
            raise ValueError("the block's layout takes tokens of a row from a later row")
        self.parent_run = self.run_of(self.parents)
        """The run of each run's parent, or -1."""
        self.parent_begin = starts - self.saved_before(self.parents)
        """Position in the values part of the first token that each run's parent stores itself."""

    def run_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the run of each row, or -1 for a row that is stored whole."""
        run = np.searchsorted(self._first, rows, side="right") - 1
        return np.where((run >= 0) & (rows < (self._first + self._counts)[run]), run, -1)

    def saved_before(self, rows: np.ndarray) -> np.ndarray:
        """Return how many tokens fewer the rows before each row store than they have."""
        run = np.searchsorted(self._first, rows, side="right") - 1
        inside = np.clip(rows - self._first[run], 0, self._counts[run])
        return np.where(run >= 0, self._before[run] + inside * self.tokens[run], 0)


def stored_pieces(
    block: np.ndarray, row: np.ndarray, start: np.ndarray, lengths: np.ndarray, shared: Mapping[int, SharedRows | None]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the pieces of the wanted rows are stored, int64 `[P]` each, in the order of the rows. The arrays are
    the block, the first token in the values part, and the number of tokens of each piece. Adjacent pieces are joined.
    Raises ValueError for a layout in which rows take tokens from later rows.

    block, row, start: block of each wanted row, its position there, and the position of its first token counted as if
    all rows were stored whole, `[N]`. lengths: number of tokens of each wanted row, `[N]`. shared: for each block, its
    rows that share tokens.
    """
    begin, count = start.astype(np.int64), lengths.astype(np.int64)
    pieces = [(np.arange(len(row)), begin, count)]  # Pieces of later entries are earlier in their rows.
    for number, runs in shared.items():
        if runs is None:
            continue
        places, at = _Places(runs), np.flatnonzero(block == number)
        begin[at] -= places.saved_before(row[at])
        run = places.run_of(row[at])
        at, run = at[run >= 0], run[run >= 0]
        count[at] -= places.tokens[run]
        while len(at):
            above = places.parent_run[run]
            own = np.where(above >= 0, places.tokens[above], 0)  # The parent takes so many of the tokens itself.
            pieces.append((at, places.parent_begin[run], places.tokens[run] - own))
            at, run = at[above >= 0], above[above >= 0]
    index, begin, count = (np.concatenate(columns) for columns in zip(*pieces[::-1], strict=True))
    order = np.argsort(index, kind="stable")
    return _joined(block[index[order]].astype(np.int64), begin[order], count[order])


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
