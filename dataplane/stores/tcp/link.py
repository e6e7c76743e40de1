"""Sends requests to one storage unit over pooled connections."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import CapacityExceeded, DataPlaneError, IntegrityError, RowsCleared, StoreLost
from ...rpc.forks import renew_in_forks
from ...rpc.frames import LAST_NUMBER
from ...security.authenticated_listener import connect_authenticated
from ...security.handshake import HandshakeError, left_s
from ..deadline import unanswered
from .wire import DAMAGED, DONE, FREED, FULL, SERVICE, Connection, Progress, UnitAddress

DYING_S = 1.0
"""Seconds for which a unit with broken connections is asked whether it still listens."""


class UnitDied(StoreLost):
    """A storage unit's address refuses connections, so its process has ended, and its blocks are lost."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that a unit has been sent, and whose reply is still to be received."""

    connection: Connection
    op: str
    """The client's operation, for errors."""
    started: float
    deadline: float
    progress: Progress


class UnitLink:
    """Connections of this process to one storage unit. Thread-safe: each call takes a separate connection."""

    def __init__(self, address: UnitAddress, key: bytes) -> None:
        self.address = address
        self._key = key
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._idle: list[Connection] = []
        self._closed = False
        self._watching = threading.Lock()
        self._watch: list[Connection] = []
        """List of at most one unused connection. Its end shows that the unit has died."""
        self._watch_pid = 0
        # The idle connections are closed even if `close` is never called.
        self._finalizer = weakref.finalize(self, _close_all, self._idle, self._watch)
        renew_in_forks(self, UnitLink._renew)

    def _renew(self) -> None:
        self._lock, self._watching = threading.Lock(), threading.Lock()

    def ask(
        self, op: str, request: str, head: bytes, raw: Sequence[memoryview], deadline: float, *, summed: bool = False
    ) -> bytes:
        """Send a request whose reply has no raw bytes, and return the reply's head. op: the client's operation, for
        errors. summed: whether a SUM of `raw` follows it. Raises the errors of `answer`."""
        with self.answer(self.send(op, request, head, raw, deadline, summed=summed)) as (_, answer, _):
            return answer

    def send(
        self,
        op: str,
        request: str,
        head: bytes,
        raw: Sequence[memoryview],
        deadline: float,
        *,
        expected: int = 0,
        summed: bool = False,
    ) -> Sent:
        """Send a request. The caller must pass the result to `answer`, or close its connection. expected: number of raw
        bytes of the reply, for errors. summed: as for `ask`. Raises the errors of `answer` for a unit that cannot be
        reached."""
        started, progress = time.monotonic(), Progress(expected)
        try:
            connection = self._sent(request, head, raw, deadline, progress, summed)
        except (OSError, ValueError) as error:
            if isinstance(error, DataPlaneError):
                raise
            raise self._lost(op, error, started, deadline, progress) from None
        return Sent(connection, op, started, deadline, progress)

    def send_pooled(self, op: str, request: str, head: bytes, deadline: float) -> Sent | None:
        """Send a request as `send` does, but only over a connection that is open already. Returns None if there is none
        or if it breaks."""
        connection = self._take()
        if connection is None:
            return None
        sent = Sent(connection, op, time.monotonic(), deadline, Progress())
        connection.progress, connection.number = sent.progress, 1 + next(self._numbers) % LAST_NUMBER
        try:
            connection.send(request, head, (), deadline)
        except OSError:
            connection.close()
            return None
        return sent

    @contextlib.contextmanager
    def answer(self, sent: Sent) -> Iterator[tuple[Connection, bytes, int]]:
        """Receive the beginning of the reply to a request. The context's value is the connection, the reply's head, and
        the number of raw bytes to receive from the connection.

        Raises RowsCleared when a block was freed, CapacityExceeded when the unit has no room, IntegrityError when the
        raw bytes were damaged on the way, UnitDied when the unit's address refuses connections, DataPlaneTimeout when
        the deadline passes, and StoreLost when it passes after SILENT_S seconds without a byte, or when the unit breaks
        the connection, or got or sent a damaged message.
        """
        connection, op = sent.connection, sent.op
        try:
            try:
                reply = connection.receive(sent.deadline, reply=True)
                if reply is None:
                    raise ConnectionResetError
                answer, text, raw_bytes = reply
                if answer == DONE:
                    yield connection, text, raw_bytes
                elif raw_bytes:
                    raise ValueError(f"got {raw_bytes} bytes with the reply {answer!r}, expected none")
            except BaseException:
                connection.close()
                raise
            if answer in (DONE, FREED, FULL, DAMAGED):
                self._give(connection)
            else:
                connection.close()  # The unit closes its end, too.
        except (OSError, ValueError) as error:
            if isinstance(error, DataPlaneError):
                raise
            raise self._lost(op, error, sent.started, sent.deadline, sent.progress) from None
        if answer != DONE:
            kind = {FREED: RowsCleared, FULL: CapacityExceeded, DAMAGED: IntegrityError}.get(answer, StoreLost)
            text = text.decode(errors="replace")
            raise kind(text, op=op, peer=self.address.peer, elapsed_s=time.monotonic() - sent.started)

    def check_alive(self, op: str, deadline: float) -> None:
        """Raise UnitDied, StoreLost or DataPlaneTimeout unless the unit's process still holds a connection. The check
        takes a microsecond. op: the client's operation, for errors.

        The memory of a pool whose unit has died can still be read, but cleared blocks in it are no longer marked.
        """
        started = time.monotonic()
        with self._watching:
            with self._lock:
                if self._watch and (self._watch_pid != os.getpid() or not self._watch[0].is_idle()):
                    self._watch.pop().socket.close()
                if self._watch:
                    return
            try:
                connection = self._connected(deadline)
            except (OSError, ValueError) as error:
                if isinstance(error, DataPlaneError):
                    raise
                raise self._lost(op, error, started, deadline, Progress()) from None
            with self._lock:
                if not self._closed:
                    self._watch.append(connection)
                    self._watch_pid = os.getpid()
                    return
        connection.close()
        raise self._closed_error()

    def close(self) -> None:
        """Close the idle connections now, and those in use after their calls. A call that needs another connection then
        raises StoreLost, as puts and reads do that have begun. Idempotent."""
        with self._lock:
            self._closed = True
        self._finalizer()

    def _sent(
        self, request: str, head: bytes, raw: Sequence[memoryview], deadline: float, progress: Progress, summed: bool
    ) -> Connection:
        """Send a request over a pooled connection, or over a new one if the pooled one has ended. Returns the
        connection."""
        while True:
            connection = self._take()
            pooled = connection is not None
            connection = connection or self._connected(deadline)
            progress.sent, connection.progress = 0, progress
            connection.number = 1 + next(self._numbers) % LAST_NUMBER
            try:
                connection.send(request, head, raw, deadline, summed=summed)
                return connection
            except BaseException as error:
                connection.close()
                if not pooled or not isinstance(error, ConnectionError):
                    raise

    def _take(self) -> Connection | None:
        while True:
            with self._lock:
                if self._pid != os.getpid():  # After a fork, the connections belong to the parent.
                    self._pid = os.getpid()
                    while self._idle:
                        self._idle.pop().socket.close()  # Only this process's copy of the socket is closed.
                if not self._idle or self._closed:
                    return None
                connection = self._idle.pop()
            if connection.is_idle():
                return connection
            connection.close()

    def _give(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and self._pid == os.getpid():
                self._idle.append(connection)
                return
        connection.close()

    def _connected(self, deadline: float) -> Connection:
        if self._closed:
            raise self._closed_error()
        address = self.address
        return Connection(connect_authenticated(address.host, address.port, self._key, SERVICE, left_s(deadline)))

    def _closed_error(self) -> StoreLost:
        return StoreLost("this client is closed", op="connect", peer=self.address.peer)

    def _lost(self, op: str, error: Exception, started: float, deadline: float, progress: Progress) -> DataPlaneError:
        kind, peer = StoreLost, self.address.peer
        if isinstance(error, TimeoutError):
            return unanswered("the storage unit", op, peer, started, moved=progress.moved, progress=str(progress))
        if isinstance(error, HandshakeError | ValueError):
            what = f"is lost: {error}"
        elif isinstance(error, ConnectionRefusedError) or isinstance(error, ConnectionError) and self._died(deadline):
            kind, what = UnitDied, "has died: no process listens at its address"
        else:
            reason = (isinstance(error, OSError) and error.strerror) or str(error) or "closed by the unit"
            what = f"is lost: the connection broke ({reason})"
        return kind(f"the storage unit {what}", op=op, peer=peer, elapsed_s=time.monotonic() - started)

    def _died(self, deadline: float) -> bool:
        """Return whether the unit's address refuses connections after one to it broke.

        A process that dies closes its sockets one by one, so its listener may outlive this connection by a moment.
        """
        try:
            self._connected(min(deadline, time.monotonic() + DYING_S)).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False


def _close_all(*pools: list[Connection]) -> None:
    for connections in pools:
        while connections:
            connections.pop().close()
