"""Deletes blocks in storage units from an event loop, which receives the units' replies without a thread."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from ...errors import DataPlaneError
from .link import Sent, UnitLink
from .wire import Free, column, encode

SOON_S = 0.25
"""Seconds within which a unit must answer. The blocks of one that does not are left to a thread, which can wait."""


class SoonFreed:
    """Request to one or more units to delete blocks. It must be made on an event loop."""

    def __init__(self, done: Callable[[bool], None]) -> None:
        """done: function that is called on the event loop, once, with whether all units have deleted their blocks."""
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[UnitLink, Sent] = {}
        self._all_gone = True
        self._timer: asyncio.TimerHandle | None = None

    def send(self, wanted: Mapping[UnitLink, Sequence[int]]) -> bool:
        """Ask units to delete blocks. Returns False if one of them has no open connection at the moment; `done` is not
        called then. wanted: ids of the blocks of each unit."""
        deadline = time.monotonic() + SOON_S
        for unit, block_ids in wanted.items():
            sent = unit.send_pooled("clear", "free", encode(Free(column(block_ids))), deadline)
            if sent is None:
                for begun in self._waiting.values():
                    begun.connection.close()
                return False
            self._waiting[unit] = sent
        for unit, sent in self._waiting.items():
            self._loop.add_reader(sent.connection.socket, self._receive, unit)
        self._timer = self._loop.call_later(SOON_S, self._give_up)
        return True

    def _receive(self, unit: UnitLink) -> None:
        sent = self._waiting[unit]
        if not sent.connection.has_message():
            return
        del self._waiting[unit]
        self._loop.remove_reader(sent.connection.socket)
        try:
            # The deadline has passed, so that a connection that has ended in a reply is not waited for.
            with unit.answer(dataclasses.replace(sent, deadline=0.0)):
                pass
        except DataPlaneError:
            self._all_gone = False  # A thread asks again, and finds out what has happened to the unit.
        self._end()

    def _give_up(self) -> None:
        for sent in self._waiting.values():
            self._loop.remove_reader(sent.connection.socket)
            sent.connection.close()
        self._waiting.clear()
        self._all_gone = False
        self._end()

    def _end(self) -> None:
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._done(self._all_gone)
