"""Carries payloads over one TCP connection for each pair of a sender and a receiver, without a copy on either side.

The messages of the pair go over a connection of their own (`control_link`), so that an update can be ended in the
middle of a payload. Both begin with the handshake that proves the run's key, and are encrypted if the key says so.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

from ....dataplane.security.authenticated_listener import AuthenticatedListener, connect_authenticated, listen

SERVICE = "weight payloads"
"""Name of a sender's payload connections in handshakes."""
_INTRODUCTION = struct.Struct("<QI")
"""First bytes of a connection: number of the update, and rank of the receiver."""
_SLICE_S = 0.05
"""Seconds between two checks, while no bytes move, that the update goes on."""
_CHUNK = 1 << 20
_MOST = 4096


class PayloadListener:
    """Accepts the payload connections of one sender's receivers."""

    def __init__(self, host: str, key: bytes) -> None:
        """Listen on `host`. key: the run's key. Raises ValueError when the key is empty, and OSError when listening
        fails."""
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], socket.socket] = {}
        self._listener = AuthenticatedListener(listen(host), key, SERVICE, self._admit)
        self.port = self._listener.port

    def _admit(self, connection: socket.socket) -> None:
        threading.Thread(target=self._introduce, args=(connection,), daemon=True, name="headrace-payloads").start()

    def _introduce(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SLICE_S * 200)
            told = connection.recv(_INTRODUCTION.size, socket.MSG_WAITALL)
            pair = _INTRODUCTION.unpack(told)
        except (OSError, struct.error):
            connection.close()
            return
        with self._lock:
            old = self._waiting.pop(pair, None)
            self._waiting[pair] = connection
            late = [] if old is None else [old]
            while len(self._waiting) > _MOST:
                late.append(self._waiting.pop(next(iter(self._waiting))))
        for one in late:
            one.close()

    def take(self, update: int, rank: int) -> socket.socket | None:
        """Return the connection of a receiver of an update, or None when it has not connected yet. Connections for
        earlier updates are closed."""
        with self._lock:
            for pair in [pair for pair in self._waiting if pair[0] < update]:
                self._waiting.pop(pair).close()
            return self._waiting.pop((update, rank), None)

    def close(self) -> None:
        """Stop listening, and close the connections that were not taken. Idempotent."""
        self._listener.close()
        with self._lock:
            while self._waiting:
                self._waiting.popitem()[1].close()


def connect_payloads(host: str, port: int, key: bytes, pair: tuple[int, int], timeout_s: float) -> socket.socket:
    """Open the payload connection of a receiver, and return it. Raises OSError if this fails.

    pair: number of the update, and rank of the receiver."""
    connection = connect_authenticated(host, port, key, SERVICE, timeout_s)
    try:
        connection.sendall(_INTRODUCTION.pack(*pair))
    except OSError:
        connection.close()
        raise
    return connection


def send_payload(connection: socket.socket, payload: memoryview, look: Callable[[bool], None]) -> None:
    """Send all bytes of `payload`. look: function that is called again and again, with whether bytes have moved since
    the last call, and may raise an error to end the transfer. Raises OSError when the connection is broken."""
    connection.settimeout(_SLICE_S)
    while payload:
        num = 0
        with contextlib.suppress(TimeoutError):
            num = connection.sendmsg([payload[:_CHUNK]])
        payload = payload[num:]
        look(num > 0)


def receive_payload(connection: socket.socket, target: memoryview, look: Callable[[bool], None]) -> None:
    """Fill `target` with the next bytes. look: as in `send_payload`. Raises OSError when the connection is broken or
    closed by the other end."""
    connection.settimeout(_SLICE_S)
    while target:
        num = -1
        with contextlib.suppress(TimeoutError):
            num = connection.recv_into(target[:_CHUNK])
        if not num:
            raise ConnectionError("the connection was closed by the other end")
        target = target[max(num, 0) :]
        look(num > 0)
