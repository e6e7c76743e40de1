"""Keeps a partition's rows as numpy columns that grow by doubling. Row numbers are reused once their row is cleared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from ...codecs.integers import distinct_counts
from ..config import MAX_BLOCK_ROWS
from ..meta import POSITION

ROW_BITS = MAX_BLOCK_ROWS.bit_length() - 1
"""Number of low bits of a slot that hold the row's index within its block. A slot, `block_id << ROW_BITS | row in
block`, locates one value. There can be 16 M rows per block and 2^39 blocks per run."""
UNWRITTEN = -1
LOST = -2
"""Slot of a value that was lost with the process that held its block. It counts as not written. Slots of values that
can be read are not negative."""
UNKNOWN = -1
"""Value in the column of lengths for a row that has no PER_TOKEN field yet."""
MOST_REMEMBERED = 256
"""Largest number of sets of fields about which a partition remembers something. Most requests name one of a few."""
NO_POSITION = -1
"""Position in the prompt stream of a row without the tag POSITION."""


def grown(column: np.ndarray, size: int, fill: object) -> np.ndarray:
    """Return `column` if it has at least `size` items along its first axis. Otherwise return a copy that is long
    enough, and at least twice as long as `column`. Its new items are `fill`."""
    if len(column) >= size:
        return column
    new = np.full((max(size, 2 * len(column), 64), *column.shape[1:]), fill, column.dtype)
    new[: len(column)] = column
    return new


def pick(names: Sequence[str], which: np.ndarray) -> Sequence[str]:
    """Return the names at the positions `which`. The positions are ascending and have no repeats."""
    if len(which) == len(names):
        return names
    positions: list[int] = which.tolist()
    return [names[i] for i in positions]


class Numbers:
    """Allocates integers from 0 upwards. Integers that were given back are reused before new ones are allocated."""

    def __init__(self) -> None:
        self.end = 0
        self._free = np.empty(0, dtype=np.int64)
        """Stack of the numbers that were given back; only the first `_num_free` items count."""
        self._num_free = 0

    def take(self, count: int) -> np.ndarray:
        """Allocate numbers and return them, int64 `[count]`, ascending."""
        if not self._num_free:
            self.end += count
            return np.arange(self.end - count, self.end)
        left = max(0, self._num_free - count)
        reused = np.sort(self._free[left : self._num_free])
        self._num_free = left
        fresh = count - len(reused)
        if not fresh:
            return reused
        self.end += fresh
        return np.concatenate((reused, np.arange(self.end - fresh, self.end)))

    def give_back(self, numbers: np.ndarray) -> None:
        end = self._num_free + len(numbers)
        self._free = grown(self._free, end, 0)
        self._free[self._num_free : end] = numbers
        self._num_free = end


class Notes:
    """Keeps a number for each row, which is 0 until another number is set."""

    def __init__(self) -> None:
        self._column = np.empty(0, dtype=np.int64)
        """Numbers by row number. Rows beyond its end have 0, so that tasks without notes need no memory."""

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of rows (an array of any shape) as a new array, int64."""
        found = np.zeros(rows.shape, dtype=np.int64)
        inside = rows < len(self._column)
        found[inside] = self._column[rows[inside]]
        return found

    def set(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Set the numbers of `rows`, an array of any shape, to `numbers`, an array that broadcasts to this shape."""
        if rows.size:
            self._column = grown(self._column, int(rows.max()) + 1, 0)
            self._column[rows] = numbers

    def forget(self, rows: np.ndarray) -> None:
        """Set the numbers of rows back to 0."""
        self._column[rows[rows < len(self._column)]] = 0


class RowTable:
    """Holds the columns of a partition's rows, indexed by row number. All arrays have the same capacity."""

    def __init__(self, fields: Iterable[str]) -> None:
        self.index: dict[str, int] = {}
        """Row number of each key."""
        self.keys = np.empty(0, dtype=object)
        self.lengths = np.empty(0, dtype=np.int32)
        """Number of tokens of each row; UNKNOWN until a PER_TOKEN field is written."""
        self.versions = np.empty(0, dtype=np.int64)
        self.groups = np.empty(0, dtype=np.int64)
        """Index of each row's group in the partition's GroupTable."""
        self.arrivals = np.empty(0, dtype=np.int64)
        """Sequence number of each row's first write; a higher number is later. It is the row's generation in receipts,
        so no other row of a partition of this name gets it."""
        self.slots: dict[str, np.ndarray] = {}
        """For each field, the slot (location) of each row's value, `block_id << ROW_BITS | row in block`, or
        UNWRITTEN or LOST. The columns are views of `table`."""
        self._lines: dict[tuple[str, ...], np.ndarray] = {}
        """Results of `lines`."""
        self.table = np.empty((0, 0), dtype=np.int64)
        """The columns of `slots`, int64 `[fields, capacity]`. One operation on it costs a small request much less than
        one on each column."""
        self._set_table([*fields], 0)
        self.num_written = dict.fromkeys(self.slots, 0)
        """For each field, the number of rows in which it is written."""
        self.tags: dict[str, np.ndarray] = {}
        self.tag_given: dict[str, np.ndarray] = {}
        """For each tag (a named number or text of a row), a bool array that is True for the rows that were given it."""
        self.any_lost = False
        """Whether a value has ever been lost. If not, no row is examined to count lost ones."""
        self._numbers = Numbers()
        self.next_arrival = 0

    def __len__(self) -> int:
        return len(self.index)

    @property
    def capacity(self) -> int:
        return len(self.keys)

    def add_fields(self, names: Iterable[str]) -> None:
        """Add columns for fields that are written for no row yet."""
        self._set_table([*self.slots, *names], self.capacity)
        self.num_written = dict.fromkeys(self.slots, 0) | self.num_written

    def lines(self, fields: tuple[str, ...]) -> np.ndarray:
        """Return the line of each field in `table`, int64 `[fields, 1]`. It stays the same for good."""
        lines = self._lines.get(fields)
        if lines is None:
            lines = np.array([self._line[name] for name in fields], dtype=np.int64)[:, None]
            if len(self._lines) < MOST_REMEMBERED:
                self._lines[fields] = lines
        return lines

    def count_written(self, lines: np.ndarray, change: np.ndarray) -> None:
        """Add `change` `[fields, N]` to the numbers of rows in which the fields of these lines are written."""
        names = [*self.slots]
        for line, count in zip(lines[:, 0].tolist(), change.sum(axis=1).tolist(), strict=True):
            self.num_written[names[line]] += count

    def _set_table(self, names: Sequence[str], capacity: int) -> None:
        table = np.full((len(names), capacity), UNWRITTEN, dtype=np.int64)
        table[: len(self.table), : self.table.shape[1]] = self.table
        self.table, self.slots = table, dict(zip(names, table, strict=True))
        self._line = {name: line for line, name in enumerate(names)}

    def find(self, keys: Sequence[str]) -> np.ndarray:
        """Return the row number of each key, int64 `[N]`, -1 for unknown keys."""
        return np.fromiter(map(self.index.get, keys, itertools.repeat(-1)), np.int64, len(keys))

    def add(self, keys: Sequence[str], groups: np.ndarray) -> np.ndarray:
        """Add rows without any written field. Returns their row numbers, int64 `[N]`."""
        rows = self._numbers.take(len(keys))
        self._grow(self._numbers.end)
        self.index.update(zip(keys, rows.tolist(), strict=True))
        self.keys[rows] = keys
        self.lengths[rows] = UNKNOWN
        self.versions[rows] = -1
        self.groups[rows] = groups
        self.arrivals[rows] = np.arange(self.next_arrival, self.next_arrival + len(rows))
        self.next_arrival += len(rows)
        return rows

    def remove(self, rows: np.ndarray) -> None:
        """Forget rows. They have no repeats, and all of their fields must already be marked as unwritten."""
        for key in self.keys[rows].tolist():
            del self.index[key]
        self.keys[rows] = None
        for given in self.tag_given.values():
            given[rows] = False
        self._numbers.give_back(rows)

    def set_tag(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        if name not in self.tags:
            self.tags[name] = np.full(self.capacity, _blank(values.dtype), values.dtype)
            self.tag_given[name] = np.zeros(self.capacity, dtype=bool)
        self.tags[name][rows] = values
        self.tag_given[name][rows] = True

    def tags_of(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the tags (named numbers or texts) that all `rows` were given, as tag name -> values."""
        return {
            name: self.tags[name][rows] for name, given in self.tag_given.items() if len(rows) and given[rows].all()
        }

    def tag_of(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the values of one tag `[N]`; 0, False or "" for rows that were not given it."""
        values = self.tags[name][rows]
        values[~self.tag_given[name][rows]] = _blank(values.dtype)
        return values

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Return each row's position in the prompt stream, int64 `[N]`; NO_POSITION without the tag POSITION."""
        given = self.tag_given.get(POSITION)
        if given is None:
            return np.full(len(rows), NO_POSITION)
        return np.where(given[rows], self.tags[POSITION][rows].astype(np.int64), NO_POSITION)

    def written(self, rows: np.ndarray, fields: tuple[str, ...]) -> np.ndarray:
        """Return a bool array `[N]` that is True for rows with all of `fields` written."""
        return np.logical_and.reduce(self.table[self.lines(fields), rows] >= 0)

    def lost(self, rows: np.ndarray, fields: Iterable[str] | None = None) -> np.ndarray:
        """Return a bool array `[N]` that is True for rows that have lost one of `fields` with its process.

        `fields` None stands for all fields.
        """
        lost = np.zeros(len(rows), dtype=bool)
        for name in self.slots if fields is None else fields:
            if not self.any_lost:
                break
            lost |= self.slots[name][rows] == LOST
        return lost

    def live(self) -> np.ndarray:
        """Return the numbers of all rows in order of arrival, int64."""
        rows = np.fromiter(self.index.values(), np.int64, len(self.index))
        return rows[np.argsort(self.arrivals[rows], kind="stable")]

    def _grow(self, size: int) -> None:
        if size <= self.capacity:
            return
        self.keys = grown(self.keys, size, None)
        self.lengths = grown(self.lengths, size, UNKNOWN)
        self.versions = grown(self.versions, size, -1)
        self.groups = grown(self.groups, size, -1)
        self.arrivals = grown(self.arrivals, size, -1)
        self._set_table([*self.slots], self.capacity)
        self.tags = {name: grown(column, size, _blank(column.dtype)) for name, column in self.tags.items()}
        self.tag_given = {name: grown(column, size, False) for name, column in self.tag_given.items()}


def _blank(dtype: np.dtype) -> object:
    """Return the value that a column of tags holds for rows that were not given the tag."""
    return "" if dtype.kind == "O" else 0


class GroupTable:
    """Records which rows belong to which group. A group is removed with its last row."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.index: dict[str, int] = {}
        """For each group name, the group's index in the other arrays of this table."""
        self.names = np.empty(0, dtype=object)
        self.numbers = np.empty(0, dtype=np.int64)
        """Id of each group, an integer that is unique in the directory and never reused."""
        self.counts = np.empty(0, dtype=np.int32)
        self.rows = np.empty((0, group_size), dtype=np.int64)
        """Row numbers of each group, int64 `[groups, group_size]`, in order of arrival and padded with -1. Maintained
        only when group_size > 1."""
        self._free = Numbers()

    def find(self, names: Sequence[str]) -> np.ndarray:
        """Return the index of each named group, int64 `[N]`, -1 for unknown groups."""
        return np.fromiter(map(self.index.get, names, itertools.repeat(-1)), np.int64, len(names))

    def overfull(self, names: Sequence[str], added: np.ndarray) -> str | None:
        """Return the name of the first group that would exceed group_size with `added` new rows (int `[G]`), or None. A
        group_size of 1 sets no limit."""
        if self.group_size == 1 or not len(names):
            return None
        known = self.find(names)
        filled = added.copy()
        filled[known >= 0] += self.counts[known[known >= 0]]
        over = ((filled > self.group_size) & (added > 0)).nonzero()[0]
        return names[int(over[0])] if len(over) else None

    def intern(self, names: Sequence[str], numbering: Numbers) -> np.ndarray:
        """Return the index of each named group, int64 `[G]`, and create the groups that do not exist yet.

        names: names of the groups, without repeats. numbering: source of the new groups' ids.
        """
        found = self.find(names)
        fresh = (found < 0).nonzero()[0]
        if len(fresh):
            new = pick(names, fresh)
            indices = self._free.take(len(new))
            if self._free.end > len(self.names):
                self.names = grown(self.names, self._free.end, None)
                self.numbers = grown(self.numbers, self._free.end, -1)
                self.counts = grown(self.counts, self._free.end, 0)
                self.rows = grown(self.rows, self._free.end, -1)
            self.index.update(zip(new, indices.tolist(), strict=True))
            self.names[indices] = new
            self.numbers[indices] = numbering.take(len(new))
            self.counts[indices] = 0
            found[fresh] = indices
        return found

    def add(self, rows: np.ndarray, groups: np.ndarray) -> None:
        """Add new rows, given in order of arrival, to their groups. groups: index of each row's group."""
        order = groups.argsort(kind="stable")
        groups = groups[order]
        unique, counts = distinct_counts(groups)
        if self.group_size > 1:
            place = np.arange(len(rows)) - (counts.cumsum() - counts).repeat(counts)
            self.rows[groups, self.counts[groups] + place] = rows[order]
        self.counts[unique] += counts.astype(np.int32)

    def remove(self, rows: np.ndarray, groups: np.ndarray) -> None:
        """Remove rows from their groups and close the gaps. A group without rows is removed. groups: index of each
        row's group."""
        unique, counts = distinct_counts(groups)
        self.counts[unique] -= counts.astype(np.int32)
        emptied = self.counts[unique] == 0
        empty, left = unique[emptied], unique[~emptied]
        if self.group_size > 1:
            self.rows[empty] = -1
        if self.group_size > 1 and len(left):
            members = self.rows[left]
            gone = np.isin(members, rows) | (members < 0)
            order = np.argsort(gone, axis=1, kind="stable")
            self.rows[left] = np.take_along_axis(np.where(gone, -1, members), order, axis=1)
        for name in self.names[empty].tolist():
            del self.index[name]
        self.names[empty] = None
        self._free.give_back(empty)
