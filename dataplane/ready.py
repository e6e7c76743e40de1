"""What a task can claim: rows (or whole groups) whose fields are written and that nobody holds, oldest first.

Kept up to date by `refresh` with just the rows that changed, so that a claim costs its own rows, not the partition's.
"""

from __future__ import annotations

import numpy as np

from ..codecs.integers import distinct
from .rows import GroupTable, RowTable, grown


class ReadyQueue:
    """Items (rows or groups) ordered by version, then arrival. Leaving early only marks an entry stale."""

    def __init__(self) -> None:
        self._ticket = np.empty(0, dtype=np.int64)
        """By item: ticket of its entry in the queue, -1 when it is not queued."""
        self._entries = np.empty((0, 4), dtype=np.int64)
        """version, arrival, item, ticket of each entry; those before `_head` are spent."""
        self._head = 0
        self._tail = 0
        self._next_ticket = 0
        self._sorted = True
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def resize(self, capacity: int) -> None:
        self._ticket = grown(self._ticket, capacity, -1)

    def holds(self, items: np.ndarray) -> np.ndarray:
        """bool `[N]`."""
        return self._ticket[items] >= 0

    def push(self, items: np.ndarray, versions: np.ndarray, arrivals: np.ndarray) -> None:
        """Items (each once, none queued) enter at their place."""
        if not len(items):
            return
        tickets = np.arange(self._next_ticket, self._next_ticket + len(items))
        self._next_ticket += len(items)
        self._ticket[items] = tickets
        end = self._tail + len(items)
        if end > len(self._entries):
            self._compact()
            end = self._tail + len(items)
            self._entries = grown(self._entries, max(end, 2 * self._tail), -1)
        new = self._entries[self._tail : end]
        new[:, 0], new[:, 1], new[:, 2], new[:, 3] = versions, arrivals, items, tickets
        if self._sorted:
            known = self._entries[max(self._head, self._tail - 1) : end, :2]
            later = (known[1:, 0] > known[:-1, 0]) | ((known[1:, 0] == known[:-1, 0]) & (known[1:, 1] >= known[:-1, 1]))
            self._sorted = bool(later.all())
        self._tail = end
        self._live += len(items)

    def discard(self, items: np.ndarray) -> None:
        """Queued items (each once) leave."""
        self._ticket[items] = -1
        self._live -= len(items)

    def first(self, count: int) -> np.ndarray:
        """int64 `[count]`: the oldest items; they stay queued until discarded. At least `count` must be queued."""
        assert count <= self._live, (count, self._live)
        if not self._sorted:
            self._compact()
            entries = self._entries[: self._tail]
            self._entries[: self._tail] = entries[np.lexsort((entries[:, 1], entries[:, 0]))]
            self._sorted = True
        found: list[np.ndarray] = []
        missing, cursor, step = count, self._head, max(count, 64)
        while missing:
            chunk = self._entries[cursor : min(cursor + step, self._tail)]
            valid = chunk[self._ticket[chunk[:, 2]] == chunk[:, 3], 2]
            if missing == count and not len(valid):
                self._head = cursor + len(chunk)  # nothing but stale entries so far: never look at them again
            found.append(valid[:missing])
            missing -= len(found[-1])
            cursor += len(chunk)
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _compact(self) -> None:
        entries = self._entries[self._head : self._tail]
        valid = entries[self._ticket[entries[:, 2]] == entries[:, 3]]
        self._entries[: len(valid)] = valid
        self._head, self._tail = 0, len(valid)


class ReadyView:
    """Rows of one partition with all of `fields` written that a task's cursor leaves free; in whole groups if asked."""

    def __init__(self, fields: tuple[str, ...], whole_groups: bool, rows: RowTable, groups: GroupTable) -> None:
        self.fields = fields
        self.whole_groups = whole_groups
        self._rows = rows
        self._groups = groups
        self._queue = ReadyQueue()
        self._counted = np.empty(0, dtype=bool)
        """Whole groups: the row is ready and counts in its group."""
        self._ready_in_group = np.empty(0, dtype=np.int32)

    @property
    def num_ready(self) -> int:
        """Rows that a claim could take now."""
        return len(self._queue) * (self._groups.group_size if self.whole_groups else 1)

    def first(self, count: int) -> np.ndarray:
        """int64 `[count]`: the oldest ready rows (group by group if whole groups); `refresh` after leasing them."""
        if not self.whole_groups:
            return self._queue.first(count)
        groups = self._queue.first(count // self._groups.group_size)
        return self._groups.rows[groups].reshape(-1)

    def refresh(self, rows: np.ndarray, cursor: np.ndarray, *, requeue: bool = False) -> None:
        """Rows (each once) may have changed: written, leased, returned, or about to be cleared (slots unwritten).

        cursor: the task's column, 0 where a row is free. requeue: their versions may have changed too.
        """
        ready = self._rows.written(rows, self.fields) & (cursor[rows] == 0)
        if self.whole_groups:
            self._refresh_groups(rows, ready, requeue)
        else:
            self._queue.resize(self._rows.capacity)
            self._requeue(rows, ready, requeue, self._rows.versions[rows], self._rows.arrivals[rows])

    def _requeue(
        self, items: np.ndarray, ready: np.ndarray, requeue: bool, versions: np.ndarray, arrivals: np.ndarray
    ) -> None:
        queued = self._queue.holds(items)
        leaving = queued if requeue else queued & ~ready
        self._queue.discard(items[leaving])
        entering = ready & (~queued | leaving)
        self._queue.push(items[entering], versions[entering], arrivals[entering])

    def _refresh_groups(self, rows: np.ndarray, ready: np.ndarray, requeue: bool) -> None:
        size = self._groups.group_size
        self._counted = grown(self._counted, self._rows.capacity, False)
        self._ready_in_group = grown(self._ready_in_group, len(self._groups.counts), 0)
        self._queue.resize(len(self._groups.counts))
        change = ready.astype(np.int32) - self._counted[rows]
        self._counted[rows] = ready
        groups = self._rows.groups[rows]
        np.add.at(self._ready_in_group, groups, change)
        touched = distinct(groups)
        full = self._ready_in_group[touched] == size
        versions = np.zeros(len(touched), dtype=np.int64)
        arrivals = np.zeros(len(touched), dtype=np.int64)
        members = self._groups.rows[touched[full]]
        versions[full] = self._rows.versions[members].min(axis=1)
        arrivals[full] = self._rows.arrivals[members].min(axis=1)
        self._requeue(touched, full, requeue, versions, arrivals)
