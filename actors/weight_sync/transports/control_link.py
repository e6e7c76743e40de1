"""Carries small messages between a sender and each of its receivers over TCP: joining, announcements and progress.

Each connection lasts for one update, and begins with a handshake in which both ends prove that they know the run's key.
If it breaks earlier, the sender knows at once which receiver is lost, which a failed collective operation would not
show. `ReceiverTracker` knows which receivers have joined, how far each is, and which failed or are lost.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ....codecs import messages
from ....dataplane.security.authenticated_listener import AuthenticatedListener, connect_authenticated, listen
from .protocol import BucketFrame, ReceiverGroup, worker_name

SERVICE = "weights"
"""Name of a sender of weights in handshakes."""
MAX_REPORT_BYTES = 1 << 20
"""Largest number of bytes of a message from a receiver to the sender."""
MAX_ANNOUNCEMENT_BYTES = 1 << 28
"""Largest number of bytes of a message from the sender to a receiver. The bucket plan of a million weights fits."""
_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
_MAX_WAITING = 1024
"""Largest number of connections that a sender keeps for `LinkListener.accept`. Above this number, the oldest connection
is closed."""
_HELLO_S = 10.0
"""Seconds that a receiver may take for its first message, or to read one, if the listener turns receivers away."""
_EVERY = 1 << 62
"""Number that is larger than that of every update."""
_NOTES_AT_ONCE = 256
"""Largest number of messages of one receiver that are read before the next receiver's."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a receiver, which joins it to an update."""

    update: int
    """Number that the sender gave the update."""
    rank: int
    """Rank of the receiver in the process group, from 1; the sender is rank 0."""
    group: str
    """Name of the process group that the receiver still belongs to from an earlier update; "" for none. With the
    transport `pairs`, number of the version that the receiver keeps, as a base of changes."""
    host: str = ""
    """Space whose receivers can read each other's memory, as `host_ring.host_name` returns it; "" if the receiver
    shares no memory."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A receiver's place in an update: it is in the process group, or reads the memory of a receiver of its host."""

    rank: int
    """Rank in the process group; 0 if the receiver reads what the first receiver of its host has received."""
    world: int
    """Number of processes in the process group."""
    readers: tuple[int, ...] = ()
    """Ranks, as in `Hello`, of the receivers that read the memory of the first receiver of this host."""


@dataclass(frozen=True, slots=True)
class Note:
    """Any message after `Hello`, from the sender or from a receiver."""

    kind: str
    """Kind of the message. The sender's are `start`, `frame`, `end`, `abort` and `without` (a reader has left); a
    receiver's are `through` (a bucket is finished), `moves`, `failed`, `gave up` and `done` (the version is complete).
    The first receiver of a host sends `ring`, which the sender passes on to the host's others. One that failed sends
    `passed` once it has received the rest for others."""
    text: str = ""
    """Name and backend of the process group in a `start` message; the reason in an `abort` or `failed` message; the
    location of the memory in a `ring` message; otherwise empty."""
    number: int = 0
    """In a `start` message, the port of the TCP store through which the group's members find each other; in a `through`
    message, the bucket that the receiver has finished; in a `without` message, the reader's rank; otherwise 0."""
    data: bytes = b""
    """Encoded bucket plan in a `start` message; regions that a receiver needs of later versions in a `done` message of
    the transport `pairs`; otherwise empty."""
    frame: BucketFrame | None = None
    """Header of the next bucket in a `frame` message; otherwise None."""
    place: GroupPlace | None = None
    """The receiver's place in a `start` message; None for a group of the sender and all receivers."""


class Link:
    """One end of a TCP connection between a sender and a receiver. Any thread may call `send` and `close`; the other
    methods must all be called from one thread."""

    def __init__(self, connection: socket.socket, timeout_s: float, max_bytes: int) -> None:
        """Take ownership of a connected socket after its handshake. timeout_s: seconds after which `send` fails if
        the other end does not read. max_bytes: largest number of bytes of a message from the other end."""
        connection.settimeout(timeout_s)
        self._socket = connection
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pending = bytearray()

    @staticmethod
    def connect(host: str, port: int, key: bytes, timeout_s: float) -> Link:
        """Connect to a sender that listens at `host` and `port`. key: the run's key. Raises OSError if this fails, if
        the server there does not know the key, or if it takes longer than `timeout_s` seconds."""
        connection = connect_authenticated(host, port, key, SERVICE, timeout_s)
        return Link(connection, timeout_s, MAX_ANNOUNCEMENT_BYTES)

    @property
    def local_host(self) -> str:
        """This host's own address on the connection, as the other end sees it."""
        return self._socket.getsockname()[0]

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Hello | Note) -> None:
        """Send a message. Raises OSError when the connection is broken or the other end does not read."""
        body = messages.encode(message)
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, kind: type, wait_s: float) -> Hello | Note | None:
        """Return the next message, decoded as type `kind`, or None when none comes within `wait_s` seconds.

        Raises OSError when the connection is broken, the bytes are not a message, or the message is too long.
        """
        deadline = time.monotonic() + wait_s
        while True:
            body = self._take()
            if body is not None:
                try:
                    return messages.decode(body, kind)
                except ValueError as error:
                    raise ConnectionError(f"got bytes that are not a message of this protocol: {error}") from error
            if not readable(self._socket, max(0.0, deadline - time.monotonic())):
                return None
            data = self._socket.recv(_CHUNK)
            if not data:
                raise ConnectionError("the connection was closed by the other end")
            self._pending += data

    def put_back(self, message: Hello | Note) -> None:
        """Make a message that was received the next one that `receive` returns."""
        body = messages.encode(message)
        self._pending[:0] = _LENGTH.pack(len(body)) + body

    def _take(self) -> bytes | None:
        if len(self._pending) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._pending)
        if length > self._max_bytes:
            raise ConnectionError(f"got a message of {length} bytes, expected at most {self._max_bytes}")
        end = _LENGTH.size + length
        if len(self._pending) < end:
            return None
        body = bytes(self._pending[_LENGTH.size : end])
        del self._pending[:end]
        return body

    def close(self) -> None:
        """Close the connection, which also ends a `receive` that waits in another thread. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The link is closed, or was never connected.
        finally:
            self._socket.close()


class LinkListener:
    """Listens for a sender's receivers. A thread carries out the handshakes, so that only clients that know the run's
    key reach the sender's own thread."""

    def __init__(self, host: str, key: bytes, *, turns_away: bool = False) -> None:
        """Listen on `host`. key: the run's key. turns_away: whether receivers of updates that have ended are turned
        away, even while no update is open. Raises ValueError when the key is empty, and OSError when listening
        fails."""
        self._waiting: deque[socket.socket | Link] = deque()
        """Connections whose clients have proved that they know the run's key, and that `accept` has not returned."""
        self._turns_away = turns_away
        self._lock = threading.Lock()
        self._ended = 0, ""
        """Number of the last update that has ended early, and the reason."""
        self._listener = AuthenticatedListener(listen(host), key, SERVICE, self._admit)
        self.port = self._listener.port

    def _admit(self, connection: socket.socket) -> None:
        if self._turns_away:
            link = Link(connection, _HELLO_S, MAX_REPORT_BYTES)
            threading.Thread(target=self._introduce, args=(link,), daemon=True, name="headrace-links").start()
        else:
            self._keep(connection)

    def _introduce(self, link: Link) -> None:
        """Read a receiver's first message, and keep the link if the receiver's update can still come."""
        try:
            hello = link.receive(Hello, _HELLO_S)
            with self._lock:
                reason = self.ended(hello.update) if isinstance(hello, Hello) else "a receiver sent no message"
                if isinstance(hello, Hello) and not reason:
                    link.put_back(hello)
                    return self._keep(link)
            link.send(Note("abort", reason))
        except OSError:  # The connection broke before the receiver identified itself.
            pass
        link.close()

    def ended(self, number: int) -> str:
        """Return why an update has ended early; "" if it has not."""
        return self._ended[1] if number <= self._ended[0] else ""

    def end(self, number: int, reason: str) -> None:
        """Turn away the receivers of the update `number`, and of earlier ones, that have connected or will."""
        with self._lock:
            if number > self._ended[0]:
                self._ended = number, reason
            waiting, self._waiting = self._waiting, deque()
        for link in waiting:
            assert isinstance(link, Link)
            self._introduce(link)

    def _keep(self, connection: socket.socket | Link) -> None:
        self._waiting.append(connection)
        if len(self._waiting) > _MAX_WAITING:
            with contextlib.suppress(IndexError):  # The sender's thread has just taken the last connection.
                self._waiting.popleft().close()

    def accept(self, timeout_s: float) -> Link | None:
        """Return the link to the receiver that has connected first, or None when there is none; never waits. timeout_s:
        seconds after which the link's `send` fails if the receiver does not read."""
        try:
            first = self._waiting.popleft()
        except IndexError:
            return None
        if isinstance(first, Link):
            first._socket.settimeout(timeout_s)
            return first
        return Link(first, timeout_s, MAX_REPORT_BYTES)

    def close(self) -> None:
        """Stop listening, and close the connections that were not accepted. Idempotent."""
        self._listener.close()
        if self._turns_away:
            self.end(_EVERY, "the sender has closed")
        while self._waiting:
            self._waiting.popleft().close()


def readable(thing: socket.socket, wait_s: float) -> bool:
    """Wait at most `wait_s` seconds for something to read or the connection's end, and return whether one of them came.
    Raises ConnectionError if another thread has closed the socket."""
    poll = select.poll()
    try:
        poll.register(thing, select.POLLIN)
    except ValueError as error:  # Another thread has closed the socket, so its file number is -1.
        raise ConnectionError("the connection was closed") from error
    return bool(poll.poll(max(0.0, wait_s) * 1e3))


class ReceiverTracker:
    """The sender's view of every receiver of one update. Receivers have ranks from 1 on; the sender is rank 0.

    Only one thread may use it, but any thread may call `end`.
    """

    def __init__(
        self,
        number: int,
        receivers: Sequence[ReceiverGroup],
        listener: LinkListener,
        send_s: float,
        ranks: Collection[int] | None = None,
    ) -> None:
        """Track the receivers that connect to `listener`. number: number of the update; receivers that try to join
        another one are turned away. send_s: longest time in seconds that sending a message may take. ranks: ranks of
        the receivers that take part; None for all."""
        every = [(group.engine, worker) for group in receivers for worker in range(group.num_workers)]
        members = {rank: member for rank, member in enumerate(every, 1) if ranks is None or rank in ranks}
        self._number = number
        self._listener = listener
        self._send_s = send_s
        self._engines = {rank: engine for rank, (engine, _) in members.items()}
        self._names = {rank: worker_name(*member) for rank, member in members.items()}
        self._links: dict[int, Link] = {}
        self._arrivals: list[Link] = []
        """Links to receivers that have not identified themselves yet."""
        self._lock = threading.RLock()
        self._closed = False
        self.num_heard = 0
        """Number of messages received from receivers that have joined."""
        self.heard: dict[int, float] = {}
        """Time of `time.monotonic` at which each receiver's last message was read."""
        self.groups: dict[int, str] = {}
        """Process group that each receiver still belonged to when it joined: rank -> name, "" for none. Only receivers
        that have joined are in it."""
        self.hosts: dict[int, str] = {}
        """Space in which each receiver that has joined shares memory, as in `Hello`."""
        self._first_of: dict[int, int] = {}
        """Reader -> the receiver of its host whose memory it reads."""
        self.rings: set[int] = set()
        """Ranks of the receivers whose memory their readers can open."""
        self.through: dict[int, int] = dict.fromkeys(self._names, -1)
        """Last bucket that each receiver has finished: rank -> bucket, or -1 before the first."""
        self.done: set[int] = set()
        """Ranks of the receivers that have the complete version."""
        self.needs: dict[int, bytes] = {}
        """Data of the `done` messages: rank -> encoded regions that the receiver needs of later versions."""
        self.failed: dict[int, str] = {}
        """Receivers that failed or were lost: rank -> reason."""
        self.gave_up: set[int] = set()
        """Ranks of the receivers that left before they had the complete version and reported no failure of their
        own."""
        self._passed: set[int] = set()
        """Ranks of the receivers that failed, but have received all payloads, so that others miss nothing."""

    @property
    def world(self) -> int:
        """Number of processes in the process group: the sender and all receivers."""
        return len(self._names) + 1

    @property
    def lost(self) -> bool:
        """True if a member of the process group is gone, so that no collective operation can complete any more."""
        return any(rank not in self._first_of for rank in self._gone)

    @property
    def stranded(self) -> bool:
        """True if a receiver that is gone has left readers without the complete version."""
        ended = self.done | self.gave_up | set(self.failed)
        return any(first in self._gone and reader not in ended for reader, first in self._first_of.items())

    @property
    def _gone(self) -> set[int]:
        return self.gave_up | {rank for rank in self.failed if rank not in self._links and rank not in self._passed}

    @property
    def over(self) -> bool:
        """True once every receiver has the complete version, has failed or has left."""
        return len(self.done | self.gave_up | set(self.failed)) == len(self._names)

    def places(self, *, shared: bool) -> dict[int, GroupPlace]:
        """Give every receiver its place, once all have joined. shared: whether only the first receiver of each host
        becomes a member of the process group, and the host's others read its memory."""
        hosts: dict[str, list[int]] = {}
        for rank in self._names:
            hosts.setdefault((shared and self.hosts[rank]) or str(rank), []).append(rank)
        places = {}
        for number, (first, *readers) in enumerate(hosts.values(), 1):
            places[first] = GroupPlace(number, len(hosts) + 1, tuple(readers))
            for reader in readers:
                places[reader] = GroupPlace(0, len(hosts) + 1, tuple(readers))
                self._first_of[reader] = first
        return places

    def poll(self) -> None:
        """Accept new connections and read all messages received so far, without waiting."""
        with self._lock:
            self._poll()

    def _poll(self) -> None:
        while not self._closed and (link := self._listener.accept(self._send_s)) is not None:
            self._arrivals.append(link)
        if self._closed:  # Another thread closed the tracker, perhaps before the last link arrived.
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
                self.heard[hello.rank] = time.monotonic()
                self.groups[hello.rank] = hello.group
                self.hosts[hello.rank] = hello.host
        except OSError:  # The connection broke before the receiver identified itself.
            link.close()
        self._arrivals.remove(link)

    def _hear(self, rank: int, note: Note) -> None:
        self.num_heard += 1
        self.heard[rank] = time.monotonic()
        if note.kind == "through":
            self.through[rank] = note.number
        elif note.kind == "done":
            self.done.add(rank)
            self.needs[rank] = note.data
        elif note.kind == "failed":
            self.failed.setdefault(rank, note.text)
        elif note.kind == "passed":
            self._passed.add(rank)
        elif note.kind == "gave up":
            self.gave_up.add(rank)
            self._leave(rank)
        elif note.kind == "ring":
            self.rings.add(rank)
            for reader in [reader for reader, first in self._first_of.items() if first == rank]:
                self.tell(note, reader)

    def _leave(self, rank: int) -> None:
        """Tell the receiver whose memory a lost reader has read that it must not wait for it."""
        if rank in self._first_of:
            self.tell(Note("without", number=rank), self._first_of[rank])

    def _lose(self, rank: int, reason: str) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            link.close()
        if rank not in self.done | self.gave_up:
            self.failed.setdefault(rank, f"{reason}, {self._place(rank)}")
        self._leave(rank)

    def link(self, rank: int) -> Link:
        """Return the link to a receiver that has joined and is not lost."""
        return self._links[rank]

    def tell(self, note: Note, to: int | None = None) -> None:
        """Send a message to the receiver of rank `to`; None sends it to all that have joined. A receiver that cannot be
        reached is recorded as lost at the next `poll`."""
        for link in [link for rank, link in list(self._links.items()) if to in (None, rank)]:
            with contextlib.suppress(OSError):
                link.send(note)

    def end(self, reason: str) -> None:
        """Tell all connected receivers that the update has ended. Another thread may call it."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._poll()
            self.tell(Note("abort", reason))

    def close(self) -> None:
        """Close all connections, including one that `end` is accepting in another thread. Idempotent."""
        self._closed = True
        for link in [*self._links.values(), *self._arrivals]:
            link.close()

    # ---------------- These private methods word errors.

    def _place(self, rank: int) -> str:
        if rank not in self.groups:
            return "did not join"
        return f"after bucket {self.through[rank]}" if self.through[rank] >= 0 else "before its first bucket"

    def blame(self, what: str) -> tuple[str, list[str]]:
        """Return an error text that starts with `what` and names the receivers at fault, and a list of their engines.

        The receivers that failed or were lost are at fault; when there are none, those furthest behind.
        """
        at_fault = sorted(self.failed)
        told = [f"{self._names[rank]} {self.failed[rank]}" for rank in at_fault]
        if not at_fault:
            at_fault = self._behind()
            told = [f"{self._names[rank]} {self._place(rank)}" for rank in at_fault]
        told += [f"{self._names[rank]} gave up waiting" for rank in sorted(self.gave_up - set(at_fault))]
        return f"{what}: {'; '.join(told)}", [self._engines[rank] for rank in at_fault]

    def blame_silent(self, what: str, silent_s: float) -> tuple[str, list[str]]:
        """Return an error text and engines as `blame` does, but blame no receiver that only waits.

        If none has failed, those are at fault that have joined and said nothing for `silent_s` seconds, perhaps none.
        """
        if self.failed:
            return self.blame(what)
        latest = time.monotonic() - silent_s
        silent = [rank for rank, at in sorted(self.heard.items()) if at < latest and rank not in self.done]
        told = [f"{self._names[rank]} is silent" for rank in silent]
        told += [f"{self._names[rank]} gave up waiting" for rank in sorted(self.gave_up - set(silent))]
        return f"{what}: {'; '.join(told) or 'all receivers wait'}", [self._engines[rank] for rank in silent]

    def _behind(self) -> list[int]:
        """Return the ranks of unfinished receivers that have not joined, or if all have, of those furthest behind."""
        behind = [rank for rank in self._names if rank not in self.done | self.gave_up]
        if any(rank not in self.groups for rank in behind):
            return [rank for rank in behind if rank not in self.groups]
        least = min((self.through[rank] for rank in behind), default=0)
        return [rank for rank in behind if self.through[rank] == least]
