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
import threading
import time
import weakref

from ..directory.requests import CANCELLED, UNKNOWN, repeated
from ..errors import DataPlaneError, DataPlaneTimeout, DirectoryLost
from ..security.handshake import HandshakeError
from .cancellation import CallCancelled, Cancellation
from .connecting import connected
from .forks import renew_in_forks
from .frames import (
    CANCEL,
    HEADER_BYTES,
    LAST_NUMBER,
    TOKEN,
    Damaged,
    DirectoryAddress,
    check,
    frame,
    head,
    identity,
    new_token,
    other_number,
    read_header,
)
from .links import Undo, call_s, lasting_effect, take_back_s, undoing, unknown_outcome
from .shared_channel import ChannelEnded, SharedChannel, SharedRequest

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
        self._channels: dict[asyncio.AbstractEventLoop, SharedChannel] = {}
        # The idle connections are closed even if `detach` is never called.
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        renew_in_forks(self, SocketLink._renew)
        if connect_s is not None:
            self._idle.append(self._connect("connect", time.monotonic() + connect_s))

    def _renew(self) -> None:
        self._lock = threading.Lock()

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
        request = SharedRequest(op, (op, payload), undo)
        try:
            async with asyncio.timeout(call_s(timeout_s)):
                return await self._ask(request)
        except OSError as error:  # TimeoutError and ConnectionError are OSErrors, too.
            raise self._lost(op, error, started, unknown_outcome(op) if request.is_open else request.lasting) from None

    async def _ask(self, request: SharedRequest) -> bytes:
        """Send a request and return the reply. It is sent again when its connection breaks."""
        broken: OSError | None = None
        for _ in range(MOST_REPEATS + 1):
            try:
                reply = await self._channel(request.op).ask(request)
            except ChannelEnded as error:  # The connection ended before the request was sent.
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

    def _channel(self, op: str) -> SharedChannel:
        """Return the connection of the running event loop. A new one is made when there is none or it has ended."""
        self._check_open(op)
        loop = asyncio.get_running_loop()
        with self._lock:
            channel = self._channels.get(loop)
            if channel is None or channel.ended:
                self._channels = {at: other for at, other in self._channels.items() if not at.is_closed()}
                channel = self._channels[loop] = SharedChannel(loop, self._address, self._key)
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
