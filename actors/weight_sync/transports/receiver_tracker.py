"""Tracks the receivers of one update for their sender: which have joined, how far each is, which failed or are lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from .control_link import Hello, Link, LinkListener, Note
from .deadline import worker_name
from .protocol import ReceiverGroup

_NOTES_AT_ONCE = 256
"""Largest number of messages of one receiver that are read before the next receiver's."""


class ReceiverTracker:
    """The sender's view of every receiver of one update. Receivers have ranks from 1 on; the sender is rank 0.

    Only one thread may use it, but any thread may call `end`.
    """

    def __init__(self, number: int, receivers: Sequence[ReceiverGroup], listener: LinkListener, send_s: float) -> None:
        """Track the receivers that connect to `listener`. number: number of the update; receivers that try to join
        another one are turned away. send_s: longest time in seconds that sending a message may take."""
        members = [(group.engine, worker) for group in receivers for worker in range(group.num_workers)]
        self._number = number
        self._listener = listener
        self._send_s = send_s
        self._engines = {rank: engine for rank, (engine, _) in enumerate(members, 1)}
        self._names = {rank: worker_name(*member) for rank, member in enumerate(members, 1)}
        self._links: dict[int, Link] = {}
        self._arrivals: list[Link] = []
        """Links to receivers that have not said yet which receiver they are."""
        self._lock = threading.RLock()
        self._closed = False
        self.num_heard = 0
        """Number of messages heard from receivers that have joined."""
        self.groups: dict[int, str] = {}
        """Process group that each receiver still belonged to when it joined: rank -> name, "" for none. Only receivers
        that have joined are in it."""
        self.through: dict[int, int] = dict.fromkeys(self._names, -1)
        """Last bucket that each receiver has finished: rank -> bucket, or -1 before the first."""
        self.done: set[int] = set()
        """Ranks of the receivers that have the complete version."""
        self.failed: dict[int, str] = {}
        """Receivers that failed or were lost: rank -> reason."""
        self.gave_up: set[int] = set()
        """Ranks of the receivers that left before they had the complete version and reported no failure of their
        own."""

    @property
    def world(self) -> int:
        """Number of processes in the process group: the sender and all receivers."""
        return len(self._names) + 1

    @property
    def lost(self) -> bool:
        """True if a receiver is gone, so that no collective operation can complete any more."""
        return any(rank not in self._links for rank in self.failed) or bool(self.gave_up)

    @property
    def over(self) -> bool:
        """True once every receiver has the complete version, has failed or has left."""
        return len(self.done | self.gave_up | set(self.failed)) == len(self._names)

    def poll(self) -> None:
        """Accept new connections and read all messages that have come, without waiting."""
        with self._lock:
            self._poll()

    def _poll(self) -> None:
        while not self._closed and (link := self._listener.accept(self._send_s)) is not None:
            self._arrivals.append(link)
        if self._closed:  # by another thread, perhaps before it could see the last arrival
            self.close()
            return
        for link in list(self._arrivals):
            self._greet(link)
        for rank, link in list(self._links.items()):
            try:
                for _ in range(_NOTES_AT_ONCE):
                    note = link.receive(Note, 0)
                    if note is None:
                        break
                    assert isinstance(note, Note)
                    self._hear(rank, note)
            except OSError as error:
                self._lose(rank, f"is lost: {error}")

    def _greet(self, link: Link) -> None:
        try:
            hello = link.receive(Hello, 0)
            if hello is None:
                return
            assert isinstance(hello, Hello)
            if hello.update != self._number or hello.rank not in self._names or hello.rank in self._links:
                link.send(Note("abort", f"update {hello.update} is over, {self._number} is under way"))
                link.close()
            else:
                self._links[hello.rank] = link
                self.groups[hello.rank] = hello.group
        except OSError:  # the connection broke before it said what it is
            link.close()
        self._arrivals.remove(link)

    def _hear(self, rank: int, note: Note) -> None:
        self.num_heard += 1
        if note.kind == "through":
            self.through[rank] = note.number
        elif note.kind == "done":
            self.done.add(rank)
        elif note.kind == "failed":
            self.failed.setdefault(rank, note.text)
        elif note.kind == "gave up":
            self.gave_up.add(rank)

    def _lose(self, rank: int, reason: str) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            link.close()
        if rank not in self.done | self.gave_up:
            self.failed.setdefault(rank, f"{reason}, {self._place(rank)}")

    def tell(self, note: Note) -> None:
        """Send a message to all receivers that have joined. One that cannot be reached is recorded as lost at the next
        `poll`."""
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):
                link.send(note)

    def end(self, reason: str) -> None:
        """Tell all connected receivers that the update has ended. Another thread may call it."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._poll()
            self.tell(Note("abort", reason))

    def close(self) -> None:
        """Close all connections, also one that an `end` in another thread is just accepting. Idempotent."""
        self._closed = True
        for link in [*self._links.values(), *self._arrivals]:
            link.close()

    # ------------------------------------------------------------ for errors

    def _place(self, rank: int) -> str:
        if rank not in self.groups:
            return "did not join"
        return f"after bucket {self.through[rank]}" if self.through[rank] >= 0 else "before its first bucket"

    def blame(self, what: str) -> tuple[str, list[str]]:
        """Return an error text that starts with `what` and names the receivers at fault, and a list of their engines.

        At fault are the receivers that failed or were lost; when there are none, those that are furthest behind.
        """
        at_fault = sorted(self.failed)
        told = [f"{self._names[rank]} {self.failed[rank]}" for rank in at_fault]
        if not at_fault:
            at_fault = self._behind()
            told = [f"{self._names[rank]} {self._place(rank)}" for rank in at_fault]
        told += [f"{self._names[rank]} gave up waiting" for rank in sorted(self.gave_up - set(at_fault))]
        return f"{what}: {'; '.join(told)}", [self._engines[rank] for rank in at_fault]

    def _behind(self) -> list[int]:
        """Return the ranks of unfinished receivers that have not joined, or if all have, of those furthest behind."""
        behind = [rank for rank in self._names if rank not in self.done | self.gave_up]
        if any(rank not in self.groups for rank in behind):
            return [rank for rank in behind if rank not in self.groups]
        least = min((self.through[rank] for rank in behind), default=0)
        return [rank for rank in behind if self.through[rank] == least]
