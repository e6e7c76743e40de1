"""The queue of what can be claimed: items (row or group numbers) by key, then tie. Leaving early costs nothing."""

from __future__ import annotations

import numpy as np

from .rows import grown

_KEY, _TIE, _ITEM, _TICKET = range(4)
_FEW_LATE = 1024
"""Entries out of order that are kept apart before they are merged with the others."""


class _Run:
    """Entries `[N, 4]` (key, tie, item, ticket) in ascending order; those before `head` are spent."""

    def __init__(self) -> None:
        self.entries = np.empty((0, 4), dtype=np.int64)
        self.head = 0
        self.tail = 0

    def takes(self, new: np.ndarray) -> bool:
        """Whether `new` are in order, and behind all that are here."""
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
        """The entries that are not stale."""
        entries = self.entries[self.head : self.tail]
        return entries[ticket[entries[:, _ITEM]] == entries[:, _TICKET]]

    def replace(self, entries: np.ndarray) -> None:
        """Nothing but `entries`, which are in order."""
        self.entries, self.head, self.tail = entries, 0, len(entries)

    def front(self, count: int, ticket: np.ndarray) -> np.ndarray:
        """The first `count` entries that are not stale, or all of them."""
        found: list[np.ndarray] = []
        missing, cursor, step = count, self.head, max(count, 64)
        while missing and cursor < self.tail:
            chunk = self.entries[cursor : min(cursor + step, self.tail)]
            valid = chunk[ticket[chunk[:, _ITEM]] == chunk[:, _TICKET]]
            if missing == count and not len(valid):
                self.head = cursor + len(chunk)  # nothing but stale entries so far: never look at them again
            found.append(valid[:missing])
            missing -= len(found[-1])
            cursor += len(chunk)
        return np.concatenate(found) if found else self.entries[:0]


class ReadyQueue:
    """Items by key, then tie. Those that come in order are appended; the others wait apart until someone looks."""

    def __init__(self) -> None:
        self._ticket = np.empty(0, dtype=np.int64)
        """By item: ticket of its entry, -1 when it is not queued. An entry with another ticket is stale."""
        self._main = _Run()
        self._late = _Run()
        """Few, by _FEW_LATE or an eighth of the others."""
        self._unsorted: list[np.ndarray] = []
        self._next_ticket = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def resize(self, capacity: int) -> None:
        self._ticket = grown(self._ticket, capacity, -1)

    def holds(self, items: np.ndarray) -> np.ndarray:
        """bool `[N]`."""
        return self._ticket[items] >= 0

    def items(self) -> np.ndarray:
        """int64: all that are queued, in no order."""
        return np.flatnonzero(self._ticket >= 0)

    def tickets(self, items: np.ndarray) -> np.ndarray:
        """int64 `[N]`: ascends in the order in which they were queued."""
        return self._ticket[items]

    def push(self, items: np.ndarray, keys: np.ndarray, ties: np.ndarray) -> None:
        """Items (each once, none queued) enter at their place."""
        new = self._entries(items)
        new[:, _KEY], new[:, _TIE] = keys, ties
        if self._main.takes(new):
            self._main.append(new, self._ticket)
        else:
            self._unsorted.append(new)

    def push_last(self, items: np.ndarray) -> None:
        """Items (each once, none queued) enter at the end. Not for queues that `push` fills."""
        new = self._entries(items)
        new[:, _KEY], new[:, _TIE] = 0, new[:, _TICKET]
        self._main.append(new, self._ticket)

    def discard(self, items: np.ndarray) -> None:
        """Queued items (each once) leave."""
        self._ticket[items] = -1
        self._live -= len(items)

    def first(self, count: int) -> np.ndarray:
        """int64 `[count]`: the first items; they stay queued until discarded. At least `count` must be queued."""
        assert count <= self._live, (count, self._live)
        if self._unsorted:
            self._sort()
        main, late = self._main.front(count, self._ticket), self._late.front(count, self._ticket)
        if len(late):
            main = _in_order(np.concatenate((main, late)))[:count]
        return main[:, _ITEM]

    def _entries(self, items: np.ndarray) -> np.ndarray:
        """int64 `[N, 4]`: item and ticket filled in."""
        new = np.empty((len(items), 4), dtype=np.int64)
        new[:, _ITEM] = items
        new[:, _TICKET] = np.arange(self._next_ticket, self._next_ticket + len(items))
        self._next_ticket += len(items)
        self._ticket[items] = new[:, _TICKET]
        self._live += len(items)
        return new

    def _sort(self) -> None:
        """Put what came out of order in order, and with the others once it is much."""
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
