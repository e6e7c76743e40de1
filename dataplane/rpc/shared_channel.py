"""Connection to the directory that all calls of one event loop share."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import cast

from ..listen_address import join_host
from ..security.tls import context, is_encrypted, server_name, tls_error
from .connecting import connected_async
from .frames import (
    CANCEL,
    LAST_NUMBER,
    TOKEN,
    Damaged,
    DirectoryAddress,
    FrameReader,
    frame,
    head,
    identity,
    new_token,
    other_number,
)
from .links import Undo, lasting_effect, take_back_s, undoing, wait_out

_READ_BYTES = 1 << 16


class ChannelEnded(ConnectionError):
    """The connection ended before the request was sent."""


@dataclass(slots=True)
class SharedRequest:
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
    """True if the request was sent, has no reply yet and has not been undone."""
    lasting: str = ""
    """Text that `lasting_effect` returns for a request that was interrupted."""


class SharedChannel(asyncio.BufferedProtocol):
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

    async def ask(self, request: SharedRequest) -> bytes:
        """Send a request and return the reply. Raises ChannelEnded when the request was not sent because the connection
        has ended, and ConnectionError when the connection ends before the reply."""
        if self._ready is None:
            self._ready = self._loop.create_task(self._open())
            self._ready.add_done_callback(_seen)
        await asyncio.shield(self._ready)
        if self._poll.poll(0):  # The event loop has not noticed the end of the connection yet.
            self.abort()
        if self.ended or self._transport is None:
            raise ChannelEnded
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

    async def _abandon(self, number: int, future: asyncio.Future[bytes], request: SharedRequest) -> None:
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

    async def _take_back(self, number: int, future: asyncio.Future[bytes], request: SharedRequest) -> None:
        try:
            reply = await future
            undo = undoing(request.undo, reply)
            request.lasting = lasting_effect(request.op, request.undo, reply)
            if undo is not None:
                await self.ask(SharedRequest(undo[0], undo, None))
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
