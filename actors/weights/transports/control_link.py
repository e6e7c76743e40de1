"""Carries small messages between a sender and each of its receivers over TCP: joining, announcements and progress.

Each connection lasts for one update. If it breaks earlier, the sender knows at once which receiver is lost, which a
failed collective operation would not tell.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

from ....codecs import messages
from .protocol import BucketFrame

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
_BACKLOG = 1024


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

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """Take ownership of a connected socket. timeout_s: seconds after which `send` fails if the other end does not
        read."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self._socket = connection
        self._lock = threading.Lock()
        self._pending = bytearray()

    @staticmethod
    def connect(host: str, port: int, timeout_s: float) -> Link:
        """Connect to a sender that listens at `host` and `port`. Raises OSError if this fails or takes longer than
        `timeout_s` seconds."""
        return Link(socket.create_connection((host, port), timeout_s), timeout_s)

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

        Raises OSError when the connection is broken or the bytes are not a message.
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


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket on `host`, at `port`, or at any free port when `port` is 0 or taken. Raises OSError if
    this fails."""
    for wanted in (port, 0):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((host, wanted))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or wanted == 0 and port:
                raise OSError(error.errno, f"weights: cannot listen on {host}:{wanted}: {error.strerror}") from error
    raise OSError(errno.EADDRINUSE, f"weights: no port of {host} is free")


def readable(thing: socket.socket | Link, wait_s: float) -> bool:
    """Wait at most `wait_s` seconds until there is something to read or the connection has ended, and return whether
    that happened. Raises ConnectionError if another thread has closed the socket."""
    poll = select.poll()
    try:
        poll.register(thing, select.POLLIN)
    except ValueError as error:  # another thread has closed it, which makes its file number -1
        raise ConnectionError("the connection was closed") from error
    return bool(poll.poll(max(0.0, wait_s) * 1e3))
