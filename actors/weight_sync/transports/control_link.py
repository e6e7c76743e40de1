"""Carries small messages between a sender and each of its receivers over TCP: joining, announcements and progress.

Each connection lasts for one update, and begins with a handshake in which both ends prove that they know the run's key.
If it breaks earlier, the sender knows at once which receiver is lost, which a failed collective operation would not
tell.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

from ....codecs import messages
from ....dataplane.security.authenticated_listener import AuthenticatedListener, connect_authenticated, listen
from .protocol import BucketFrame

SERVICE = "weights"
"""Name of a sender of weights in handshakes."""
MAX_REPORT_BYTES = 1 << 20
"""Largest number of bytes of a message from a receiver to the sender."""
MAX_ANNOUNCEMENT_BYTES = 1 << 28
"""Largest number of bytes of a message from the sender to a receiver. The bucket plan of a million weights fits."""
_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
_MAX_WAITING = 1024
"""Largest number of connections that a sender keeps for `LinkListener.accept`. Above it the oldest is closed."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a receiver, with which it joins an update."""

    update: int
    """Number that the sender gave the update."""
    rank: int
    """Rank of the receiver in the process group, from 1; the sender is rank 0."""
    group: str
    """Name of the process group that the receiver still belongs to from an earlier update; "" for none."""


@dataclass(frozen=True, slots=True)
class Note:
    """Any message after `Hello`, from the sender or from a receiver."""

    kind: str
    """Kind of the message. The sender's are `start`, `frame`, `end` and `abort`; a receiver's are `through` (a bucket
    is finished), `failed`, `gave up` and `done` (the version is complete)."""
    text: str = ""
    """Name and backend of the process group in a `start` message; the reason in an `abort` or `failed` message;
    otherwise empty."""
    number: int = 0
    """In a `start` message, the port of the TCP store through which the group's members find each other; in a `through`
    message, the bucket that the receiver has finished; otherwise 0."""
    data: bytes = b""
    """Encoded bucket plan in a `start` message; otherwise empty."""
    frame: BucketFrame | None = None
    """Header of the next bucket in a `frame` message; otherwise None."""


class Link:
    """One end of a TCP connection between a sender and a receiver. Any thread may call `send` and `close`; the other
    methods must all be called from one thread."""

    def __init__(self, connection: socket.socket, timeout_s: float, max_bytes: int) -> None:
        """Take ownership of a connected socket, whose handshake is over. timeout_s: seconds after which `send` fails if
        the other end does not read. max_bytes: largest number of bytes of a message from the other end."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self._socket = connection
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pending = bytearray()

    @staticmethod
    def connect(host: str, port: int, key: bytes, timeout_s: float) -> Link:
        """Connect to a sender that listens at `host` and `port`. key: the run's key. Raises OSError if this fails, if
        who listens there does not know the key, or if it takes longer than `timeout_s` seconds."""
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

        Raises OSError when the connection is broken, the bytes are not a message, or it has too many.
        """
        deadline = time.monotonic() + wait_s
        while True:
            body = self._take()
            if body is not None:
                try:
                    return messages.decode(body, kind)
                except ValueError as error:
                    raise ConnectionError(f"got bytes that are no message of this protocol: {error}") from error
            if not readable(self._socket, max(0.0, deadline - time.monotonic())):
                return None
            data = self._socket.recv(_CHUNK)
            if not data:
                raise ConnectionError("the connection was closed by the other end")
            self._pending += data

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
            return  # closed, or never connected
        finally:
            self._socket.close()


class LinkListener:
    """Listens for a sender's receivers. A thread carries out the handshakes, so that connections of strangers never
    reach the sender's own thread."""

    def __init__(self, host: str, key: bytes, port: int = 0) -> None:
        """Listen on `host`, at `port`, or at any free port when `port` is 0 or taken. key: the run's key. Raises
        ValueError when the key is empty, and OSError when listening fails."""
        self._waiting: deque[socket.socket] = deque()
        """Connections whose clients have proved that they know the run's key, and that `accept` has not returned."""
        self._listener = AuthenticatedListener(listen(host, port), key, SERVICE, self._admit)
        self.port = self._listener.port

    def _admit(self, connection: socket.socket) -> None:
        self._waiting.append(connection)
        if len(self._waiting) > _MAX_WAITING:
            with contextlib.suppress(IndexError):  # the sender's thread has just taken them
                self._waiting.popleft().close()

    def accept(self, timeout_s: float) -> Link | None:
        """Return the link to the receiver that has connected first, or None when there is none; never waits. timeout_s:
        seconds after which the link's `send` fails if the receiver does not read."""
        try:
            return Link(self._waiting.popleft(), timeout_s, MAX_REPORT_BYTES)
        except IndexError:
            return None

    def close(self) -> None:
        """Stop listening, and close the connections that were not accepted. Idempotent."""
        self._listener.close()
        while self._waiting:
            self._waiting.popleft().close()


def readable(thing: socket.socket, wait_s: float) -> bool:
    """Wait at most `wait_s` seconds for something to read or the connection's end, and return whether it came. Raises
    ConnectionError if another thread has closed the socket."""
    poll = select.poll()
    try:
        poll.register(thing, select.POLLIN)
    except ValueError as error:  # another thread has closed it, which makes its file number -1
        raise ConnectionError("the connection was closed") from error
    return bool(poll.poll(max(0.0, wait_s) * 1e3))
