"""Connects to a directory in another process, by its Unix socket on its own host and by TCP from elsewhere.

Each blocking call takes a connection from a pool. The calling thread itself waits on the socket, so that a claim that
waits delays nobody. Calls of an event loop share one connection, however many are in flight.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import weakref
from typing import cast

from ..errors import DirectoryLost
from .frames import HEADER, DirectoryAddress, FrameReader, frame, head
from .links import GRACE_S

CONNECT_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16
_JOIN_BYTES = 1 << 14
"""Number of bytes up to which a payload is copied behind its head, which is cheaper than a second buffer."""


class SocketLink:
    """Carries requests over sockets. Thread-safe. The end of the directory's process ends every call at once."""

    def __init__(self, address: DirectoryAddress, peer: str) -> None:
        """Raise DirectoryLost when nobody listens there."""
        self.peer = peer
        self._address = address
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._idle: list[socket.socket] = []
        self._channels: dict[asyncio.AbstractEventLoop, _Channel] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._idle)  # for a client that nobody closed
        self._idle.append(self._connect("connect"))

    def call(self, op: str, payload: bytes, timeout_s: float) -> bytes:
        started = time.monotonic()
        connection = self._take(op)
        try:
            reply = _exchange(connection, op, payload, started + timeout_s + GRACE_S)
        except OSError as error:
            connection.close()
            raise self._lost(op, error, started) from None
        except BaseException:  # a late answer must not meet another request
            connection.close()
            raise
        self._give(connection)
        return reply

    async def call_async(self, op: str, payload: bytes, timeout_s: float) -> bytes:
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await self._channel(op).ask(op, payload)
        except OSError as error:  # TimeoutError and ConnectionError are such
            raise self._lost(op, error, started) from None

    async def detach_async(self) -> None:
        self.detach()
        await asyncio.sleep(0.001)  # in which transports close their sockets

    def detach(self) -> None:
        """End calls in flight, and all later ones, with DirectoryLost. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, {}
        self._finalizer()
        for loop, channel in channels.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(channel.abort)

    # -------------------------------------------------------------- connections

    def _take(self, op: str) -> socket.socket:
        with self._lock:
            if self._pid != os.getpid():  # forked: the connections are the parent's
                self._pid = os.getpid()
                _close_all(self._idle)
            if self._idle and not self._closed:
                return self._idle.pop()
        return self._connect(op)

    def _give(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and self._pid == os.getpid():
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, op: str) -> socket.socket:
        if self._closed:
            raise DirectoryLost("this client is closed", op=op, peer=self.peer, elapsed_s=0.0)
        started = time.monotonic()
        try:
            connection = _connected(self._address)
        except OSError as error:
            raise self._lost(op, error, started) from None
        return connection

    def _channel(self, op: str) -> _Channel:
        """Return the running loop's connection."""
        loop = asyncio.get_running_loop()
        with self._lock:
            channel = self._channels.get(loop)
            if channel is None:
                self._channels = {loop: at for loop, at in self._channels.items() if not loop.is_closed()}
        if channel is None:
            # Connecting blocks for a moment, once a loop; a connection to this host needs no more than a system call.
            channel = _Channel(loop, self._connect(op))
            with self._lock:
                self._channels[loop] = channel
        return channel

    def _lost(self, op: str, error: OSError, started: float) -> DirectoryLost:
        if isinstance(error, TimeoutError):
            what = "the directory did not answer"
        elif isinstance(error, ConnectionRefusedError):
            what = "the directory's process has died or its data plane was closed"
        else:
            what = "the directory's process has died or closed the connection"
        return DirectoryLost(what, op=op, peer=self.peer, elapsed_s=time.monotonic() - started)


def _connected(address: DirectoryAddress) -> socket.socket:
    """Open a blocking connection and show the token. The Unix socket is tried first; on other hosts its name is
    unknown."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect("\0" + address.local)
        except ConnectionRefusedError:
            if not address.host:
                raise
            connection.close()
            connection = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(frame(0, address.token))
    except BaseException:
        connection.close()
        raise
    return connection


def _exchange(connection: socket.socket, op: str, payload: bytes, deadline: float) -> bytes:
    """Send one request and return its reply. Raises TimeoutError at `deadline`, ConnectionError when the peer ends."""
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    start = head(1, len(payload), op)
    if len(payload) <= _JOIN_BYTES:
        connection.sendall(start + payload)
    else:
        connection.sendall(start)
        connection.sendall(payload)
    data = connection.recv(_READ_BYTES)
    while len(data) < HEADER.size:
        data += _more(connection, data, deadline)
    nbytes = HEADER.unpack_from(data)[0]
    if len(data) == HEADER.size + nbytes:
        return data[HEADER.size :]
    reply = bytearray(nbytes)
    found = len(data) - HEADER.size
    reply[:found] = data[HEADER.size :]
    view = memoryview(reply)
    while found < nbytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        count = connection.recv_into(view[found:])
        if not count:
            raise ConnectionResetError
        found += count
    return bytes(reply)


def _more(connection: socket.socket, data: bytes, deadline: float) -> bytes:
    """Receive bytes that follow `data`, which is empty only if the peer has closed."""
    if not data:
        raise ConnectionResetError
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    more = connection.recv(_READ_BYTES)
    if not more:
        raise ConnectionResetError
    return more


def _close_all(connections: list[socket.socket]) -> None:
    while connections:
        connections.pop().close()


class _Channel(asyncio.Protocol):
    """Is one event loop's connection. Requests carry numbers, and replies come in any order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self._loop = loop
        self._socket = connection
        self._ready: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._reader = FrameReader()
        self._next = 1
        self._ended = False

    async def ask(self, op: str, payload: bytes) -> bytes:
        """Send a request and return the reply. Raises ConnectionError when the connection ends."""
        if self._ready is None:
            self._ready = asyncio.ensure_future(self._open())
        await asyncio.shield(self._ready)
        if self._ended or self._transport is None:
            raise ConnectionResetError
        number, self._next = self._next, self._next + 1 & 0xFFFFFFFF
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[number] = future
        try:
            self._transport.writelines((head(number, len(payload), op), payload))
            return await future
        finally:
            del self._waiting[number]

    async def _open(self) -> None:
        self._socket.setblocking(False)
        if self._socket.family == socket.AF_UNIX:
            await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        else:
            await self._loop.create_connection(lambda: self, sock=self._socket)

    def abort(self) -> None:
        """End the connection. Must run on the channel's loop."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop, which Ray takes where it is, has its own class
        if self._ended:  # the client was closed meanwhile
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        for number, _, reply in self._reader.feed(data):
            future = self._waiting.get(number)
            if future is not None and not future.done():  # else nobody waits any more
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError())
