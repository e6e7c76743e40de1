"""Carries requests to the directory (metadata service) in another process over sockets.

Each blocking call takes a connection from a pool, and the calling thread itself waits on the socket, so that a claim
that waits delays no other call. All calls of an event loop share one connection. A connection that has ended is
replaced before anything is sent over it, so that its end is not mistaken for the end of the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import select
import socket
import ssl
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import cast

from ..directory.requests import CANCELLED, UNKNOWN, repeated
from ..errors import DataPlaneError, DataPlaneTimeout, DirectoryLost
from ..listen_address import join_host
from ..security.handshake import HandshakeError
from ..security.tls import context, is_encrypted, server_name, tls_error
from .cancellation import CallCancelled, Cancellation
from .connecting import connected, connected_async
from .frames import (
    CANCEL,
    HEADER_BYTES,
    LAST_NUMBER,
    TOKEN,
    Damaged,
    DirectoryAddress,
    FrameReader,
    check,
    frame,
    head,
    identity,
    new_token,
    other_number,
    read_header,
)
from .links import Undo, call_s, lasting_effect, take_back_s, undoing, unknown_outcome, wait_out

_READ_BYTES = 1 << 16
_JOIN_BYTES = 1 << 14
"""Largest payload in bytes that is copied into one buffer with its frame's head, because one send is then cheaper than
two."""


MOST_REPEATS = 3
"""Largest number of times that a request is repeated. The request itself may be what ends the directory."""


class SocketLink:
    """Link that carries requests to the directory (the metadata service) over sockets. Thread-safe.

    When a connection breaks before the reply, the request is repeated over a new one. If the directory's process has
    died and is replaced, the new one gives the reply of the dead one. If it is not replaced, every call ends at once
    with DirectoryLost.
    """

    def __init__(self, address: DirectoryAddress, key: bytes, peer: str, *, connect_s: float | None) -> None:
        """Create a link to the directory at `address`, whose run has the key `key`.

        connect_s: seconds for which this thread may block to connect now; None connects with the first call. Raises
        DirectoryLost when no directory of the run listens there, or when it does not answer in this time.
        """
        self.peer = peer
        self._address = address
        self._key = key
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._token = new_token()
        self._silent: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        """Connections over which the token has not been sent yet."""
        self._idle: list[socket.socket] = []
        self._numbers = itertools.count()
        self._channels: dict[asyncio.AbstractEventLoop, _Channel] = {}
        # The idle connections are closed even if `detach` is never called.
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        if connect_s is not None:
            self._idle.append(self._connect("connect", time.monotonic() + connect_s))

    def call(
        self,
        op: str,
        payload: bytes,
        timeout_s: float,
        undo: Undo | None = None,
        cancellation: Cancellation | None = None,
    ) -> bytes:
        started = time.monotonic()
        deadline = started + call_s(timeout_s)
        sent, broken = (op, payload), None
        for _ in range(MOST_REPEATS + 1):
            try:
                reply = self._call_once(op, sent, started, deadline, undo, cancellation)
            except _Broken as error:
                sent, broken = error.repeated, error
                if time.monotonic() > deadline:
                    break
            except DirectoryLost:  # No process goes on.
                if broken is None:
                    raise
                break
            else:
                if broken is None or reply != UNKNOWN:
                    return reply
                break
        assert broken is not None
        raise self._lost(op, broken.cause, started, unknown_outcome(op))

    def _call_once(
        self,
        op: str,
        request: tuple[str, bytes],
        started: float,
        deadline: float,
        undo: Undo | None,
        cancellation: Cancellation | None,
    ) -> bytes:
        """Send a request, given as the op and payload to send, and return the reply. Raises _Broken if the connection
        breaks before the reply. op: operation, for errors."""
        number = self._number()
        connection = self._send(number, op, request, started, deadline)
        token = self._token
        try:
            with (cancellation or Cancellation()).applies(functools.partial(_cancel, connection, number, deadline)):
                reply = _receive(connection, number, deadline)
        except TimeoutError as error:
            raise self._lost(op, error, started, self._take_back(number, op, connection, undo)) from None
        except OSError as error:
            connection.close()
            if _is_break(error):
                again = repeated(identity(token, number), *request, time.monotonic() - started)
                raise _Broken(error, again) from None
            raise self._lost(op, error, started, unknown_outcome(op)) from None
        except BaseException:
            self._take_back(number, op, connection, undo)
            raise
        self._give(connection)
        if reply == CANCELLED:
            raise CallCancelled(op)
        return reply

    async def call_async(self, op: str, payload: bytes, timeout_s: float, undo: Undo | None = None) -> bytes:
        started = time.monotonic()
        request = _Request(op, (op, payload), undo)
        try:
            async with asyncio.timeout(call_s(timeout_s)):
                return await self._ask(request)
        except OSError as error:  # TimeoutError and ConnectionError are OSErrors, too.
            raise self._lost(op, error, started, unknown_outcome(op) if request.is_open else request.lasting) from None

    async def _ask(self, request: _Request) -> bytes:
        """Send a request and return the reply. It is sent again when its connection breaks."""
        broken: OSError | None = None
        for _ in range(MOST_REPEATS + 1):
            try:
                reply = await self._channel(request.op).ask(request)
            except _Ended as error:  # The connection ended before the request was sent.
                broken = broken or error
            except OSError as error:
                if not request.is_open or not _is_break(error):
                    raise
                broken = error
                request.sent = repeated(request.identity, *request.sent, time.monotonic() - request.started)
            else:
                if reply != UNKNOWN:
                    return reply
                request.is_open = True
                break
        assert broken is not None
        raise broken

    async def detach_async(self) -> None:
        self.detach()
        await asyncio.sleep(0.001)  # Transports close their sockets during this pause.

    def detach(self) -> None:
        """Disconnect. Calls of event loops that are in flight, and all later calls, raise DirectoryLost; blocking calls
        in flight still get their answers. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, {}
        self._finalizer()
        for loop, channel in channels.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(channel.abort)

    # ---------------- These methods pool and open the connections.

    def _number(self) -> int:
        """Return the number of the next request. A late reply to an earlier request has another number."""
        return 1 + next(self._numbers) % LAST_NUMBER

    def _send(self, number: int, op: str, request: tuple[str, bytes], started: float, deadline: float) -> socket.socket:
        """Send a request over a pooled connection, or over a new one if the pooled one has ended. Returns the
        connection.

        A request that could not be sent completely has not been carried out, so it may be sent again.
        """
        while True:
            connection = self._take()
            pooled = connection is not None
            connection = connection or self._connect(op, deadline)
            try:
                greeting = frame(0, self._token, TOKEN) if connection in self._silent else b""
                self._silent.discard(connection)
                _send(connection, number, *request, deadline, greeting)
                return connection
            except OSError as error:
                connection.close()
                if not pooled or isinstance(error, TimeoutError):
                    raise self._lost(op, error, started) from None
            except BaseException:
                connection.close()
                raise

    def _take_back(self, number: int, op: str, connection: socket.socket, undo: Undo | None) -> str:
        """Cancel the request that was sent over this connection, or undo it if it has been carried out.

        Returns the text to append to the call's error: what `lasting_effect` returns if the directory answered in time,
        else what `unknown_outcome` returns. If the directory did not answer, the connection is closed: the directory
        then drops the request if it has not read it yet, and a lease that the request obtained runs out, because it is
        not renewed.
        """
        deadline = time.monotonic() + take_back_s()
        try:
            _send(connection, number, CANCEL, b"", deadline)
            reply = _receive(connection, number, deadline)
            request = undoing(undo, reply)
            if request is not None:
                number = self._number()
                _send(connection, number, *request, deadline)
                _receive(connection, number, deadline)
        except OSError:
            connection.close()
            return unknown_outcome(op)
        except BaseException:
            connection.close()
            raise
        self._give(connection)
        return lasting_effect(op, undo, reply)

    def _take(self) -> socket.socket | None:
        """Return an idle connection from the pool that is still open; None when there is none."""
        while True:
            with self._lock:
                if self._pid != os.getpid():  # After a fork, the connections belong to the parent.
                    self._pid = os.getpid()
                    self._token = new_token()
                    _close_all(self._idle)
                if not self._idle or self._closed:
                    return None
                connection = self._idle.pop()
            if not _is_readable(connection):
                return connection
            connection.close()  # An idle connection becomes readable only when it has ended.

    def _give(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and self._pid == os.getpid():
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, op: str, deadline: float) -> socket.socket:
        self._check_open(op)
        started = time.monotonic()
        try:
            connection = connected(self._address, self._key, deadline)
            self._silent.add(connection)
        except OSError as error:
            raise self._lost(op, error, started) from None
        return connection

    def _channel(self, op: str) -> _Channel:
        """Return the connection of the running event loop. A new one is made when there is none or it has ended."""
        self._check_open(op)
        loop = asyncio.get_running_loop()
        with self._lock:
            channel = self._channels.get(loop)
            if channel is None or channel.ended:
                self._channels = {at: other for at, other in self._channels.items() if not at.is_closed()}
                channel = self._channels[loop] = _Channel(loop, self._address, self._key)
        return channel

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise DirectoryLost("this client is closed", op=op, peer=self.peer, elapsed_s=0.0)

    def _lost(self, op: str, error: OSError, started: float, outcome: str = "") -> DataPlaneError:
        elapsed_s = time.monotonic() - started
        if isinstance(error, _Incomplete):
            return DataPlaneTimeout(f"{error}{outcome}", op=op, peer=self.peer, elapsed_s=elapsed_s)
        if isinstance(error, TimeoutError):
            what = "the directory did not answer"
        elif isinstance(error, HandshakeError | Damaged):
            what = str(error)
        elif isinstance(error, ConnectionRefusedError):
            what = "the directory's process has died or its data plane was closed"
        else:
            what = "the directory's process has died or closed the connection"
        return DirectoryLost(what + outcome, op=op, peer=self.peer, elapsed_s=elapsed_s)


# ---------------- Blocking calls send one request after another over a connection.


class _Broken(ConnectionError):
    """The connection broke after a request was sent, and before its reply."""

    def __init__(self, cause: OSError, repeated: tuple[str, bytes]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.repeated = repeated
        """Op and payload with which the request is repeated."""


def _is_break(error: OSError) -> bool:
    """Return whether an error shows that the peer's process or the network broke the connection."""
    return isinstance(error, ConnectionError) and not isinstance(error, Damaged | HandshakeError)


class _Incomplete(TimeoutError):
    """A time limit ended while the directory's reply was arriving, so the directory is slow rather than dead."""

    def __init__(self, found: int, nbytes: int) -> None:
        super().__init__(f"the time limit ended after {found} of {nbytes} bytes of the directory's reply")


def _is_readable(connection: socket.socket) -> bool:
    """Return whether there is something to read on an idle connection, be it data or the end of the connection."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _send(
    connection: socket.socket, number: int, op: str, payload: bytes, deadline: float, greeting: bytes = b""
) -> None:
    """Send one request, after the greeting of a new connection. Raises TimeoutError at `deadline`, and ConnectionError
    when the peer has closed the connection."""
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    start = greeting + head(number, payload, op)
    if len(payload) <= _JOIN_BYTES:
        connection.sendall(start + payload)
    else:
        connection.sendall(start)
        connection.sendall(payload)


def _cancel(connection: socket.socket, number: int, deadline: float) -> None:
    """Cancel the request that was sent over this connection. Its thread receives the answer, or the error of a broken
    connection."""
    with contextlib.suppress(OSError):
        _send(connection, number, CANCEL, b"", deadline)


def _receive(connection: socket.socket, number: int, deadline: float) -> bytes:
    """Receive the reply to the request `number`. Raises TimeoutError at `deadline`, ConnectionError when the peer
    closes the connection, and Damaged when what arrives is not that reply.

    If a reply arrives only in part or is damaged, the connection is closed, because the beginning of the next reply
    could not be found. Raises _Incomplete at `deadline` if the rest was still to come.
    """
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    data = connection.recv(_READ_BYTES)
    try:
        while len(data) < HEADER_BYTES:
            data += _more(connection, data, deadline)
        nbytes, answered, _, checksum = read_header(data)
        reply = data[HEADER_BYTES:]
        if len(reply) < nbytes:
            reply = _rest(connection, reply, nbytes, deadline)
        check(checksum, b"", reply)
        if answered != number:
            raise other_number(answered, reply)
        return reply
    except BaseException:
        connection.close()
        raise


def _rest(connection: socket.socket, data: bytes, nbytes: int, deadline: float) -> bytes:
    """Receive the rest of a reply of `nbytes` bytes that begins with `data`, and return the whole reply."""
    reply, found = bytearray(nbytes), len(data)
    reply[:found] = data
    view = memoryview(reply)
    while found < nbytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            count = connection.recv_into(view[found:])
        except TimeoutError:
            raise _Incomplete(found, nbytes) from None
        if not count:
            raise ConnectionResetError
        found += count
    return bytes(reply)


def _more(connection: socket.socket, data: bytes, deadline: float) -> bytes:
    """Receive more bytes of a reply whose first bytes are `data`. Raises ConnectionResetError if the peer has closed
    the connection. An empty `data` means that it had closed the connection before."""
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


# ---------------- All calls of an event loop share one connection.


class _Ended(ConnectionError):
    """The connection ended before the request was sent."""


@dataclass(slots=True)
class _Request:
    """One request of an asyncio call, which may be tried on several connections until it is sent."""

    op: str
    """Operation, for errors."""
    sent: tuple[str, bytes]
    """Op and payload to send."""
    undo: Undo | None
    started: float = field(default_factory=time.monotonic)
    """Time (`time.monotonic()`) at which the call began."""
    identity: bytes = b""
    """Identity of the request when it was sent last."""
    is_open: bool = False
    """Whether the request was sent, has no reply yet and has not been undone."""
    lasting: str = ""
    """Text that `lasting_effect` returns for a request that was interrupted."""


class _Channel(asyncio.BufferedProtocol):
    """Connection of one event loop to the directory. Requests carry numbers, and replies come in any order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: DirectoryAddress, key: bytes) -> None:
        self.ended = False
        """True once the connection has ended, so that nothing can be sent any more."""
        self._loop = loop
        self._address = address
        self._key = key
        self._end = f"the directory at {join_host(address.host, address.port)}"
        self._ready: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._undoing: set[asyncio.Task[None]] = set()
        """Tasks that cancel or undo interrupted requests. They are kept here because the event loop itself keeps no
        reference."""
        self._reader = FrameReader()
        self._token = new_token()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._poll = select.poll()
        """Poll object that shows whether the directory has closed the connection."""
        self._next = 1
        self._damage: ConnectionError | None = None
        """Error by which this end gave the connection up; None if it did not."""

    async def ask(self, request: _Request) -> bytes:
        """Send a request and return the reply. Raises _Ended when the request was not sent because the connection has
        ended, and ConnectionError when the connection ends before the reply."""
        if self._ready is None:
            self._ready = self._loop.create_task(self._open())
            self._ready.add_done_callback(_seen)
        await asyncio.shield(self._ready)
        if self._poll.poll(0):  # The event loop has not noticed the end of the connection yet.
            self.abort()
        if self.ended or self._transport is None:
            raise _Ended
        number, self._next = self._next, self._next % LAST_NUMBER + 1
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[number] = future
        request.is_open, request.identity = True, identity(self._token, number)
        try:
            greeting = frame(0, self._token, TOKEN) if number == 1 else b""
            self._transport.writelines((greeting + head(number, request.sent[1], request.sent[0]), request.sent[1]))
            reply = await future
        except asyncio.CancelledError:
            await self._abandon(number, future, request)
            raise
        except BaseException:
            self._waiting.pop(number, None)
            raise
        del self._waiting[number]
        request.is_open = False
        return reply

    async def _abandon(self, number: int, future: asyncio.Future[bytes], request: _Request) -> None:
        """Cancel a request, or undo it if it has been carried out. Waits `take_back_s` seconds at most for the
        directory's answer; an answer that arrives later is still handled."""
        if self._waiting[number] is not future:  # The reply came between the cancellation and this moment.
            future = self._waiting[number]
        elif future.cancelled() and self._transport is not None:
            future = self._waiting[number] = self._loop.create_future()
            if self.ended:
                future.set_exception(ConnectionResetError())
            else:
                self._transport.write(head(number, b"", CANCEL))
        task = self._loop.create_task(self._take_back(number, future, request))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)
        await wait_out(task, take_back_s())

    async def _take_back(self, number: int, future: asyncio.Future[bytes], request: _Request) -> None:
        try:
            reply = await future
            undo = undoing(request.undo, reply)
            request.lasting = lasting_effect(request.op, request.undo, reply)
            if undo is not None:
                await self.ask(_Request(undo[0], undo, None))
            request.is_open = False
        except ConnectionError:
            pass  # A granted lease expires because it is not renewed, and reserved space expires, too.
        finally:
            self._waiting.pop(number, None)

    async def _open(self) -> None:
        try:
            connection = await connected_async(self._address, self._key)
            if connection.family == socket.AF_UNIX:
                await self._loop.create_unix_connection(lambda: self, sock=connection)
            elif is_encrypted(self._key):
                settings, name = context(self._key, server=False), server_name(self._key)
                await self._loop.create_connection(lambda: self, sock=connection, ssl=settings, server_hostname=name)
            else:
                await self._loop.create_connection(lambda: self, sock=connection)
        except ssl.SSLError as error:
            self.ended = True
            raise tls_error(error, self._end, ready=False) from None
        except BaseException:
            self.ended = True
            raise

    def abort(self) -> None:
        """Close the connection at once. Must run on the channel's event loop."""
        self.ended = True
        if self._transport is not None:
            self._transport.abort()
        elif self._ready is not None:
            self._ready.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Ray uses uvloop if it is installed, and uvloop's transports have a class outside asyncio.
        self._transport = cast(asyncio.Transport, transport)
        if self.ended:  # The client was closed in the meantime.
            self._transport.abort()
        else:
            self._poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        try:
            for number, _, reply in self._reader.feed(data):
                future = self._waiting.get(number)
                if future is None:
                    raise other_number(number, reply)
                if future.cancelled():  # The task that waits has not run yet. It needs the reply to undo the request.
                    future = self._waiting[number] = self._loop.create_future()
                if not future.done():
                    future.set_result(reply)
        except Damaged as error:
            self._damage = error
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        if isinstance(exc, ssl.SSLError):
            self._damage = tls_error(exc, self._end, ready=True)
        self._poll = select.poll()  # The number of the file descriptor may be reused from now on.
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._damage or ConnectionResetError())


def _seen(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a finished task, so that asyncio does not log it as an error that was never retrieved."""
    if not task.cancelled():
        task.exception()
