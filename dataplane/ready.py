"""What a task can claim: rows (or whole groups) whose fields are written and that nobody holds, in its sampler's order.

Kept up to date by `refresh` with just the rows that changed, so that a claim costs its own rows, not the partition's.
"""

from __future__ import annotations

import numpy as np

from ..codecs.integers import distinct
from .ready_queue import ReadyQueue
from .rows import GroupTable, RowTable, grown
from .samplers import Candidates, Order, StreamProgress, prompt_numbers


class ReadyView:
    """Rows with all of `fields` written that a task's cursor leaves free; in whole groups if asked."""

    def __init__(
        self,
        fields: tuple[str, ...],
        whole_groups: bool,
        rows: RowTable,
        groups: GroupTable,
        order: Order = "version",
        progress: StreamProgress | None = None,
    ) -> None:
        """progress: of the task in the prompt stream; what is set aside as too old is settled there."""
        self.fields = fields
        self.whole_groups = whole_groups
        self._rows = rows
        self._groups = groups
        self._order: Order = order
        self._progress = progress
        self._queue = ReadyQueue()
        self._min_version: int | None = None
        self._aside = np.empty(0, dtype=bool)
        """By item: ready, but older than `_min_version`; not queued."""
        self._num_aside = 0
        self._counted = np.empty(0, dtype=bool)
        """Whole groups: the row is ready and counts in its group."""
        self._ready_in_group = np.empty(0, dtype=np.int32)

    @property
    def rows_per_item(self) -> int:
        """1, or the size of a group."""
        return self._groups.group_size if self.whole_groups else 1

    @property
    def num_items(self) -> int:
        """Rows or groups that a claim could take now, if its sampler agrees."""
        return len(self._queue)

    @property
    def num_ready(self) -> int:
        """Rows of these."""
        return self.num_items * self.rows_per_item

    @property
    def num_stale(self) -> int:
        """Rows that could be taken were they not too old."""
        return self._num_aside * self.rows_per_item

    def first(self, count: int) -> np.ndarray:
        """int64: the first items in order, `count` or all there are; `refresh` their rows after leasing them."""
        return self._queue.first(min(count, len(self._queue)))

    def candidates(self, items: np.ndarray) -> Candidates:
        """Queued items as a sampler sees them."""
        tickets = self._queue.tickets(items)
        return Candidates(items, tickets, self._rows, self._groups, self.whole_groups, self._progress)

    def rows_of(self, items: np.ndarray) -> np.ndarray:
        """int64: their rows, item by item."""
        return self._groups.rows[items].reshape(-1) if self.whole_groups else items

    def stale_rows(self) -> np.ndarray:
        """int64: those of `num_stale`."""
        return self.rows_of(np.flatnonzero(self._aside)) if self._num_aside else np.empty(0, dtype=np.int64)

    def set_min_version(self, version: int | None) -> None:
        """From now on, items below `version` are set aside (None: none is). Costs nothing while it stays the same."""
        before, self._min_version = self._min_version, version
        if version == before:
            return
        if version is None or (before is not None and version < before):
            items = np.flatnonzero(self._aside)
            self._leave_aside(items)
            self._enter(items)  # those that are too old still are set aside anew
        else:
            items = self._queue.items()
            old = items[self._versions(items) < version]
            self._queue.discard(old)
            self._set_aside(old)

    def refresh(self, rows: np.ndarray, cursor: np.ndarray, *, requeue: bool = False) -> None:
        """Rows (each once) may have changed: written, leased, returned, or about to be cleared (slots unwritten).

        cursor: the task's column, 0 where a row is free. requeue: their versions may have changed too.
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
        change = ready.astype(np.int32) - self._counted[rows]
        self._counted[rows] = ready
        groups = self._rows.groups[rows]
        np.add.at(self._ready_in_group, groups, change)
        touched = distinct(groups)
        full = self._ready_in_group[touched] == self._groups.group_size
        self._requeue(touched, full, requeue)

    def _resize(self, capacity: int) -> None:
        self._queue.resize(capacity)
        self._aside = grown(self._aside, capacity, False)

    def _requeue(self, items: np.ndarray, ready: np.ndarray, requeue: bool) -> None:
        queued = self._queue.holds(items)
        held = queued | self._aside[items] if self._num_aside else queued
        leaving = held if requeue else held & ~ready
        self._queue.discard(items[leaving & queued])
        if self._num_aside:
            self._leave_aside(items[leaving & ~queued])
        self._enter(items[ready & (~held | leaving)])

    def _enter(self, items: np.ndarray) -> None:
        """Ready items, neither queued nor set aside, go where they belong."""
        if self._min_version is not None:
            fresh = self._versions(items) >= self._min_version
            self._set_aside(items[~fresh])
            items = items[fresh]
        if not len(items):
            return
        if self._order == "ready":
            self._queue.push_last(items)
        elif self._order == "version":
            self._queue.push(items, self._versions(items), self._arrivals(items))
        else:
            self._queue.push(items, self._prompts(items), self._arrivals(items))

    def _set_aside(self, items: np.ndarray) -> None:
        if not len(items):
            return
        self._aside[items] = True
        self._num_aside += len(items)
        if self._progress is not None:
            self._progress.settle(self._prompts(items).tolist())

    def _leave_aside(self, items: np.ndarray) -> None:
        self._aside[items] = False
        self._num_aside -= len(items)

    def _versions(self, items: np.ndarray) -> np.ndarray:
        versions = self._rows.versions
        return versions[self._groups.rows[items]].min(axis=1) if self.whole_groups else versions[items]

    def _arrivals(self, items: np.ndarray) -> np.ndarray:
        arrivals = self._rows.arrivals
        return arrivals[self._groups.rows[items]].min(axis=1) if self.whole_groups else arrivals[items]

    def _prompts(self, items: np.ndarray) -> np.ndarray:
        return prompt_numbers(self._groups.names[items if self.whole_groups else self._rows.groups[items]])
