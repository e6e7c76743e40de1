"""Limits what clients may cost that have not proved yet that they know the run's key: their number, time and bytes.

Such a client is a stranger. It costs one descriptor and at most HELLO_BYTES bytes of memory, it has HANDSHAKE_TIMEOUT_S
seconds, and there are never more than MOST_STRANGERS for one service. This holds for each service, whatever reads its
connections: a thread of its own (`authenticated_listener.py`) or an event loop (the directory's server).
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Callable
from typing import Protocol

from .handshake import ServerHandshake

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds after which a connection is closed if its client has not proved that it knows the run's key."""
MAX_STRANGERS = 128
"""Number of strangers' connections above which an old one is closed whose client is slow, for each new one."""
MOST_STRANGERS = 1024
"""Largest number of strangers' connections. Above it the oldest is closed for each new one, whatever its client does;
that client connects again."""
SLOW_S = 1.0
"""Seconds that a client may take to answer the server's part of the handshake before it counts as slow."""
_LOOKED_AT = 8
"""Number of strangers' connections, the oldest ones, that are searched for a slow one."""


class Connection(Protocol):
    """A connected socket, or what stands for it in an event loop."""

    def fileno(self) -> int: ...


class Stranger:
    """Server's end of a connection whose client has not proved yet that it knows the run's key."""

    def __init__(self, connection: Connection, key: bytes, service: str, end: Callable[[], None]) -> None:
        """service: name of the service in handshakes. end: function that closes the connection."""
        self._connection = connection
        self._handshake = ServerHandshake(key, service)
        self.end = end
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        """Time by `time.monotonic` at which the connection is to be closed."""
        self.has_proved = False
        """Whether the client has proved that it knows the key."""
        self._received = b""
        """Bytes of the client's next message that have arrived."""
        self._challenged_s: float | None = None
        """Time by `time.monotonic` at which the server's part of the handshake was made; None before."""

    @property
    def num_missing(self) -> int:
        """Number of bytes that are missing in the client's next message of the handshake."""
        return self._handshake.needed_bytes - len(self._received)

    def hear(self, data: bytes) -> bytes:
        """Continue the handshake with the client's next bytes, at most `num_missing`, and return what to send to it.
        Raises HandshakeError when the client is none of this run."""
        self._received += data
        if self.num_missing:
            return b""
        message, self._received = self._received, b""
        if self._challenged_s is None:
            challenge = self._handshake.challenge(message)
            self._challenged_s = time.monotonic()
            return challenge
        self._handshake.check(message)
        self.has_proved = True
        return b""

    def is_slow(self) -> bool:
        """Return whether a client has been silent since it connected just now, or was answered SLOW_S seconds ago.
        Bytes that have come but have not been read yet count."""
        if self._challenged_s is not None and time.monotonic() < self._challenged_s + SLOW_S:
            return False
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        return not poll.poll(0)


class Strangers:
    """The strangers of one service, oldest first."""

    def __init__(self) -> None:
        self._strangers: dict[Stranger, None] = {}

    def __len__(self) -> int:
        return len(self._strangers)

    @property
    def oldest(self) -> Stranger | None:
        """The stranger that connected first; None when there is none."""
        return next(iter(self._strangers), None)

    def add(self, stranger: Stranger) -> None:
        """Add a stranger that has just connected, and close an old connection if there are too many. It is one whose
        client is slow, or above MOST_STRANGERS the oldest one."""
        self._strangers[stranger] = None
        if len(self._strangers) <= MAX_STRANGERS:
            return
        oldest = list(itertools.islice(self._strangers, _LOOKED_AT))
        slow = [one for one in oldest if one.is_slow()]
        if not slow and len(self._strangers) > MOST_STRANGERS:
            slow = oldest
        for one in slow[:1]:
            self.end(one)

    def remove(self, stranger: Stranger) -> None:
        """Forget a stranger that has proved to know the key, or whose connection has ended. Idempotent."""
        self._strangers.pop(stranger, None)

    def end(self, stranger: Stranger) -> None:
        """Forget a stranger, and close its connection."""
        self.remove(stranger)
        stranger.end()
