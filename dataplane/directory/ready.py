"""Tracks which rows or whole groups a task can claim (written and free), in the order of its sampler.

`refresh` updates a view with only the rows that changed. The cost of a claim therefore depends on the rows that it
takes, not on the size of the partition.
"""

from __future__ import annotations

import numpy as np

from ...codecs.integers import distinct
from .rows import GroupTable, Notes, RowTable, grown
from .samplers import Candidates, Order, StreamProgress

# ---------------- A queue of claimable items (row or group numbers) is sorted by key, then by tie-breaker.

_KEY, _TIE, _ITEM, _TICKET = range(4)
_FEW_LATE = 1024
"""Number of out-of-order entries that can be kept separately before they are merged with the others."""


class _Run:
    """Queue entries `[N, 4]` (key, tie, item, ticket) in ascending order; a ticket is the item's arrival number. Only
    the entries from `head` to `tail` are in use."""

    def __init__(self) -> None:
        self.entries = np.empty((0, 4), dtype=np.int64)
        self.head = 0
        self.tail = 0

    def takes(self, new: np.ndarray) -> bool:
        """Return whether the entries `new` can be appended: they are in order and come after all entries held."""
        if len(new) == 1 and self.tail > self.head:
            return self.entries[self.tail - 1, :2].tolist() <= new[0, :2].tolist()
        known = np.concatenate((self.entries[max(self.head, self.tail - 1) : self.tail, :2], new[:, :2]))
        key, tie = known[:, _KEY], known[:, _TIE]
        return bool(((key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & (tie[1:] >= tie[:-1]))).all())

    def append(self, new: np.ndarray, ticket: np.ndarray) -> None:
        if self.tail + len(new) > len(self.entries):
            self.replace(self.live(ticket))
            self.entries = grown(self.entries, max(self.tail + len(new), 2 * self.tail), -1)
        self.entries[self.tail : self.tail + len(new)] = new
        self.tail += len(new)

    def live(self, ticket: np.ndarray) -> np.ndarray:
        """Return the entries that are not stale. An entry is stale if its item has been removed or queued again
        since."""
        entries = self.entries[self.head : self.tail]
        return entries[ticket[entries[:, _ITEM]] == entries[:, _TICKET]]

    def replace(self, entries: np.ndarray) -> None:
        """Replace all entries with `entries`, which must be in order."""
        self.entries, self.head, self.tail = entries, 0, len(entries)

    def front(self, count: int, ticket: np.ndarray) -> np.ndarray:
        """Return the first `count` entries that are not stale, or all such entries if there are fewer."""
        found: list[np.ndarray] = []
        missing, cursor, step = count, self.head, max(count, 64)
        while missing and cursor < self.tail:
            chunk = self.entries[cursor : min(cursor + step, self.tail)]
            valid = chunk[ticket[chunk[:, _ITEM]] == chunk[:, _TICKET]]
            if missing == count and not len(valid):
                self.head = cursor + len(chunk)  # All entries so far are stale, so later calls skip them.
            found.append(valid[:missing])
            missing -= len(found[-1])
            cursor += len(chunk)
        return np.concatenate(found) if found else self.entries[:0]


class ReadyQueue:
    """Keeps items (row or group numbers) sorted by key, with a tie-breaker for equal keys. Items that arrive in order
    are appended; the others are kept separately, and sorted only when the queue is read."""

    def __init__(self) -> None:
        self._ticket = np.empty(0, dtype=np.int64)
        """Ticket (arrival number) of each item's valid entry, -1 if the item is not queued. An entry with another
        ticket is stale."""
        self._main = _Run()
        self._late = _Run()
        """Sorted entries that arrived out of order: at most _FEW_LATE, or an eighth of the entries in order if that is
        more."""
        self._unsorted: list[np.ndarray] = []
        self._next_ticket = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def resize(self, capacity: int) -> None:
        self._ticket = grown(self._ticket, capacity, -1)

    def holds(self, items: np.ndarray) -> np.ndarray:
        """Return a bool array `[N]` that is True for the items in the queue."""
        return self._ticket[items] >= 0

    def items(self) -> np.ndarray:
        """Return all queued items in no particular order, int64."""
        return np.flatnonzero(self._ticket >= 0)

    def tickets(self, items: np.ndarray) -> np.ndarray:
        """Return the tickets (arrival numbers) of queued items, int64 `[N]`. An item that was queued later has a higher
        ticket."""
        return self._ticket[items]

    def push(self, items: np.ndarray, keys: np.ndarray, ties: np.ndarray) -> None:
        """Insert items in the order of their keys and tie-breakers. The items must be without repeats and not be queued
        already."""
        new = self._entries(items)
        new[:, _KEY], new[:, _TIE] = keys, ties
        if self._main.takes(new):
            self._main.append(new, self._ticket)
        else:
            self._unsorted.append(new)

    def push_last(self, items: np.ndarray) -> None:
        """Append items at the end. The items must be without repeats and not be queued already. A queue must be filled
        with either this method or `push`, not with both."""
        new = self._entries(items)
        new[:, _KEY], new[:, _TIE] = 0, new[:, _TICKET]
        self._main.append(new, self._ticket)

    def discard(self, items: np.ndarray) -> None:
        """Remove queued items, given without repeats. This is cheap, because their entries only become stale."""
        self._ticket[items] = -1
        self._live -= len(items)

    def first(self, count: int) -> np.ndarray:
        """Return the first `count` items, int64 `[count]`, without removing them. At least `count` items must be
        queued."""
        assert count <= self._live, (count, self._live)
        if self._unsorted:
            self._sort()
        main = self._main.front(count, self._ticket)
        if self._late.tail and len(late := self._late.front(count, self._ticket)):
            main = _in_order(np.concatenate((main, late)))[:count]
        return main[:, _ITEM]

    def _entries(self, items: np.ndarray) -> np.ndarray:
        """Create entries for newly queued items, int64 `[N, 4]`. Only the columns for item and ticket (arrival number)
        are filled in."""
        new = np.empty((len(items), 4), dtype=np.int64)
        new[:, _ITEM] = items
        new[:, _TICKET] = np.arange(self._next_ticket, self._next_ticket + len(items))
        self._next_ticket += len(items)
        self._ticket[items] = new[:, _TICKET]
        self._live += len(items)
        return new

    def _sort(self) -> None:
        """Sort the entries that arrived out of order, and merge them with the others once there are many."""
        late = np.concatenate((self._late.live(self._ticket), *self._unsorted))
        late = late[self._ticket[late[:, _ITEM]] == late[:, _TICKET]]
        self._unsorted.clear()
        if len(late) > max(_FEW_LATE, (self._main.tail - self._main.head) // 8):
            late = np.concatenate((self._main.live(self._ticket), late))
            self._main.replace(_in_order(late))
            self._late.replace(late[:0])
        else:
            self._late.replace(_in_order(late))


def _in_order(entries: np.ndarray) -> np.ndarray:
    return entries[np.lexsort((entries[:, _TIE], entries[:, _KEY]))]


_TOO_OLD, _TOO_NEW = 1, 2


class ReadyView:
    """The index of the rows, or whole groups, that one task can claim. In these rows all of `fields` are written, and
    the task has neither leased nor finished them."""

    def __init__(
        self,
        fields: tuple[str, ...],
        whole_groups: bool,
        rows: RowTable,
        groups: GroupTable,
        order: Order = "version",
        progress: StreamProgress | None = None,
    ) -> None:
        """progress: the task's progress in the prompt stream. When an item is passed over because of its version, its
        position is marked there as settled, so that the task does not wait for it."""
        self.fields = fields
        self.whole_groups = whole_groups
        self._rows = rows
        self._groups = groups
        self._order: Order = order
        self._progress = progress
        self._queue = ReadyQueue()
        self._min_version: int | None = None
        self._max_version: int | None = None
        self._aside = np.empty(0, dtype=np.int8)
        """For each item, _TOO_OLD or _TOO_NEW if it is ready but not queued because its version is below `_min_version`
        or above `_max_version`; else 0."""
        self._num_aside = np.zeros(3, dtype=np.int64)
        """Number of items that are too old and too new, indexed by _TOO_OLD and _TOO_NEW."""
        self._counted = np.empty(0, dtype=bool)
        """Bool array that is True for rows that are ready and have been counted in their group. Used only for claims of
        whole groups."""
        self._ready_in_group = np.empty(0, dtype=np.int32)

    @property
    def rows_per_item(self) -> int:
        """Number of rows of an item: 1, or the size of a group."""
        return self._groups.group_size if self.whole_groups else 1

    @property
    def num_items(self) -> int:
        """Number of rows or groups that a claim could take now, if its sampler chooses them."""
        return len(self._queue)

    @property
    def num_ready(self) -> int:
        """Number of rows in the items that a claim could take now."""
        return self.num_items * self.rows_per_item

    @property
    def num_stale(self) -> int:
        """Number of rows that are ready but cannot be claimed because their version is too old."""
        return int(self._num_aside[_TOO_OLD]) * self.rows_per_item

    @property
    def num_too_new(self) -> int:
        """Number of rows that are ready but cannot be claimed because their version is too new."""
        return int(self._num_aside[_TOO_NEW]) * self.rows_per_item

    def first(self, count: int) -> np.ndarray:
        """Return the first `count` items in order, or all if there are fewer, int64. Call `refresh` with their rows
        after leasing them."""
        return self._queue.first(min(count, len(self._queue)))

    def candidates(self, items: np.ndarray, notes: Notes) -> Candidates:
        """Return queued items as the `Candidates` among which a sampler chooses. notes: the task's notes."""
        tickets = self._queue.tickets(items)
        return Candidates(items, tickets, self._rows, self._groups, self.whole_groups, self._progress, notes)

    def rows_of(self, items: np.ndarray) -> np.ndarray:
        """Return the row numbers of the items, item by item, int64."""
        return self._groups.rows[items].reshape(-1) if self.whole_groups else items

    def stale_rows(self) -> np.ndarray:
        """Return the numbers of the rows that are ready but too old to be claimed, int64."""
        return self.rows_of(np.flatnonzero(self._aside == _TOO_OLD)) if self.num_stale else np.empty(0, dtype=np.int64)

    def set_versions(self, lowest: int | None, highest: int | None) -> None:
        """Set the lowest and highest policy version that can be claimed. Ready items with another version are not
        queued until they can be claimed again; None sets no bound. An item with several rows is within the bounds if
        all its rows are.

        Does nothing if the bounds are unchanged. Otherwise the cost depends on the number of queued items when a bound
        becomes tighter, and on the number of items passed over when it becomes wider. In the order "ready", items that
        a wider bound lets in count as ready from then on, in order of arrival.
        """
        low, high = self._min_version, self._max_version
        if (low, high) == (lowest, highest):
            return
        self._min_version, self._max_version = lowest, highest
        aside = self._aside == _TOO_NEW  # A group that was too new can be too old now.
        if low is not None and (lowest is None or lowest < low):
            aside |= self._aside == _TOO_OLD
        below = lowest is not None and (low is None or lowest > low)
        above = highest is not None and (high is None or highest < high)
        if below or above:
            items = self._queue.items()
            outside = self._outside(items)
            self._queue.discard(items[outside > 0])
            self._set_aside(items[outside > 0], outside[outside > 0])
        items = np.flatnonzero(aside)
        if len(items):
            items = items[np.argsort(self._arrivals(items), kind="stable")]
            self._leave_aside(items)
            self._enter(items)  # Items that are still outside the bounds are set aside again.

    def refresh(self, rows: np.ndarray, cursor: np.ndarray, *, requeue: bool = False) -> None:
        """Update the view for rows that were written, leased or released, or that are about to be cleared. The rows
        have no repeats, and rows to be cleared are already marked as unwritten.

        cursor: the task's state of every row (`TaskCursor.column`), 0 for a free row. requeue: whether the rows' policy
        versions may have changed, too.
        """
        ready = self._rows.written(rows, self.fields) & (cursor[rows] == 0)
        if self.whole_groups:
            self._refresh_groups(rows, ready, requeue)
        else:
            self._resize(self._rows.capacity)
            self._requeue(rows, ready, requeue)

    def _refresh_groups(self, rows: np.ndarray, ready: np.ndarray, requeue: bool) -> None:
        self._counted = grown(self._counted, self._rows.capacity, False)
        self._ready_in_group = grown(self._ready_in_group, len(self._groups.counts), 0)
        self._resize(len(self._groups.counts))
        before = self._counted[rows]
        if not requeue and not np.count_nonzero(before != ready):
            return  # So it is for rows that a consumer holds, when they are released as finished and when they go.
        change = ready.astype(np.int32) - before
        self._counted[rows] = ready
        groups = self._rows.groups[rows]
        np.add.at(self._ready_in_group, groups, change)
        touched = distinct(groups)
        full = self._ready_in_group[touched] == self._groups.group_size
        self._requeue(touched, full, requeue)

    def _resize(self, capacity: int) -> None:
        self._queue.resize(capacity)
        self._aside = grown(self._aside, capacity, 0)

    def _requeue(self, items: np.ndarray, ready: np.ndarray, requeue: bool) -> None:
        queued = self._queue.holds(items)
        some_aside = self._num_aside.any()
        held = queued | (self._aside[items] > 0) if some_aside else queued
        leaving = held if requeue else held & ~ready
        self._queue.discard(items[leaving & queued])
        if some_aside:
            self._leave_aside(items[leaving & ~queued])
        self._enter(items[ready & (~held | leaving)])

    def _enter(self, items: np.ndarray) -> None:
        """Queue ready items, or set them aside if their version is outside the bounds. None of the items is queued or
        set aside already."""
        if self._min_version is not None or self._max_version is not None:
            outside = self._outside(items)
            self._set_aside(items[outside > 0], outside[outside > 0])
            items = items[outside == 0]
        if not len(items):
            return
        if self._order == "ready":
            self._queue.push_last(items)
        elif self._order == "version":
            self._queue.push(items, self._versions(items), self._arrivals(items))
        else:
            self._queue.push(items, self._prompts(items), self._arrivals(items))

    def _outside(self, items: np.ndarray) -> np.ndarray:
        """Return for each item _TOO_OLD or _TOO_NEW if its version is outside the bounds, else 0, int8 `[N]`. An item
        with rows of both kinds is too old."""
        found = np.zeros(len(items), dtype=np.int8)
        if self._max_version is not None:
            found[self._newest(items) > self._max_version] = _TOO_NEW
        if self._min_version is not None:
            found[self._versions(items) < self._min_version] = _TOO_OLD
        return found

    def _set_aside(self, items: np.ndarray, why: np.ndarray) -> None:
        if not len(items):
            return
        self._aside[items] = why
        self._num_aside += np.bincount(why, minlength=3)
        if self._progress is not None:
            self._progress.settle(self._prompts(items).tolist())

    def _leave_aside(self, items: np.ndarray) -> None:
        self._num_aside -= np.bincount(self._aside[items], minlength=3)
        self._aside[items] = 0

    def _versions(self, items: np.ndarray) -> np.ndarray:
        versions = self._rows.versions
        return versions[self._groups.rows[items]].min(axis=1) if self.whole_groups else versions[items]

    def _newest(self, items: np.ndarray) -> np.ndarray:
        versions = self._rows.versions
        return versions[self._groups.rows[items]].max(axis=1) if self.whole_groups else versions[items]

    def _arrivals(self, items: np.ndarray) -> np.ndarray:
        arrivals = self._rows.arrivals
        return arrivals[self._groups.rows[items]].min(axis=1) if self.whole_groups else arrivals[items]

    def _prompts(self, items: np.ndarray) -> np.ndarray:
        return self._rows.positions(self._groups.rows[items, 0] if self.whole_groups else items)
