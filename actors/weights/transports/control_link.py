"""Small messages between a sender and each of its receivers over TCP: who is there, what comes, how far one is.

A connection lives as long as one update. Its end tells at once who is lost, which a broken collective does not.
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
    """A receiver's first words."""

    update: int
    """The sender's number of it."""
    rank: int
    """1 and up."""
    group: str
    """Name of the process group that it is in; "" for none."""


@dataclass(frozen=True, slots=True)
class Note:
    """All that is said afterwards."""

    kind: str
    """By the sender: `start`, `frame`, `end`, `abort`; by receivers: `through`, `failed`, `gave up`, `done`."""
    text: str = ""
    """`start`: the group's name; `abort`, `failed`: why."""
    number: int = 0
    """`start`: port of the group's store; `through`: bucket."""
    data: bytes = b""
    """`start`: the plan, a message."""
    frame: BucketFrame | None = None
    """`frame` only."""


class Link:
    """One end of a connection. `send` may be called by any thread, the rest by one."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """timeout_s: most that a send may take: the other end reads, or is stopped."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self._socket = connection
        self._lock = threading.Lock()
        self._pending = bytearray()

    @staticmethod
    def connect(host: str, port: int, timeout_s: float) -> Link:
        """Raises OSError."""
        return Link(socket.create_connection((host, port), timeout_s), timeout_s)

    @property
    def local_host(self) -> str:
        """This host's address on the way to the other end."""
        return self._socket.getsockname()[0]

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Hello | Note) -> None:
        """Raises OSError when the connection is broken or the other end does not read."""
        body = messages.encode(message)
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, kind: type, wait_s: float) -> Hello | Note | None:
        """The next message, of type `kind`; None when none comes in time. Raises OSError when the link is broken."""
        deadline = time.monotonic() + wait_s
        while True:
            body = self._take()
            if body is not None:
                try:
                    return messages.decode(body, kind)
                except ValueError as error:
                    raise ConnectionError(f"no message of this protocol: {error}") from error
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
        """Idempotent; a `receive` of another thread ends."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed, or never connected
        finally:
            self._socket.close()


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket on `host`. Should `port` be taken, another is; 0: any that is free. Raises OSError."""
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
    """Whether there is something to read (or an end to be seen) within the time."""
    poll = select.poll()
    try:
        poll.register(thing, select.POLLIN)
    except ValueError as error:  # closed by another thread: its number is -1
        raise ConnectionError("the connection was closed") from error
    return bool(poll.poll(max(0.0, wait_s) * 1e3))
