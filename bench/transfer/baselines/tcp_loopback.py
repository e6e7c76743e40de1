"""The TCP baseline sends all bytes in one raw stream over loopback and receives one byte of acknowledgement."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence

import numpy as np
from tensordict import TensorDict

from ..contenders import Share
from ..digests import Digests
from ..workloads import Load
from .byte_parts import digest, parts_of

TIMEOUT_S = 60.0
_PUT, _GET = 0, 1
_REQUEST = struct.Struct("<BQQ")
"""Format of a request: kind, start and stop."""


class TcpServer:
    """Keeps the last stream that it received and sends ranges of it, with a thread per connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._held = np.empty(0, np.uint8)
        threading.Thread(target=self._accept, name="tcp-baseline", daemon=True).start()

    def close(self) -> None:
        self._held = np.empty(0, np.uint8)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which a close alone leaves waiting
        except OSError:
            return  # closed before
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the listener is closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = bytearray(_REQUEST.size)
        with connection:
            while _receive(connection, memoryview(request)):
                kind, start, stop = _REQUEST.unpack(request)
                if kind == _GET:
                    connection.sendall(self._held[start:stop].data)
                    continue
                if len(self._held) != stop:  # otherwise the warm memory of the last put is used again
                    self._held = np.ones(stop, np.uint8)
                _receive(connection, self._held.data)
                connection.sendall(b"\1")


class TcpEndpoint:
    """The TCP baseline in a worker process, with one connection to the server."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parts: list[np.ndarray] = []
        self._buffer = np.empty(0, np.uint8)

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> int:
        self._parts = self._parts or parts_of(load)
        nbytes = sum(map(len, self._parts))
        self._socket.sendall(_REQUEST.pack(_PUT, 0, nbytes))
        for part in self._parts:
            self._socket.sendall(part.data)
        if self._socket.recv(1) != b"\1":
            raise ConnectionError("the TCP baseline's server closed the connection")
        return nbytes

    def get(self, token: int, share: Share, fields: Sequence[str] | None) -> np.ndarray:
        start, stop = share.byte_range(token)
        if len(self._buffer) != stop - start:
            self._buffer = np.ones(stop - start, np.uint8)
        self._socket.sendall(_REQUEST.pack(_GET, start, stop))
        if not _receive(self._socket, self._buffer.data):
            raise ConnectionError("the TCP baseline's server closed the connection")
        return self._buffer

    def expected(self, load: Load, share: Share) -> Digests:
        joined = np.concatenate(parts_of(load))
        start, stop = share.byte_range(len(joined))
        return digest([joined[start:stop]])

    def fingerprint(self, got: np.ndarray) -> Digests:
        return digest([got])

    def close(self) -> None:
        self._socket.close()
        self._parts, self._buffer = [], np.empty(0, np.uint8)


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill `into` with received bytes; returns False when the other side has closed the connection."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if not count:
            return False
        at += count
    return True
