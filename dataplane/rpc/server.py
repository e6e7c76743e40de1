"""Serves the directory (the metadata service) on sockets: reads requests and sends each answer once it is ready.

A request that waits (a claim, or a put without space) does not delay others. Waiting requests of a client are cancelled
when the client asks for it and when its connection ends, so that no rows are leased to a client that has disconnected.
If this process stalls and reads a request only after its client has disconnected, the request is dropped, unless it
undoes an earlier request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import select
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, cast

from ..directory.requests import AGAIN, CANCELLED, TAKE_BACK, WAITING_OPS, read_repeated, reply_error
from ..directory.service import DirectoryService
from ..errors import DataPlaneError
from ..listen_address import join_host
from ..security.authenticated_listener import HANDSHAKE_TIMEOUT_S, Stranger, Strangers, listen
from ..security.few_lines import limit_accept_errors
from ..security.handshake import HandshakeError
from ..security.tls import ServerStream, is_encrypted
from .frames import CANCEL, SERVICE, TOKEN, TOKEN_BYTES, DirectoryAddress, FrameReader, head, identity, set_up_tcp

_logger = logging.getLogger(__name__)

END_TIMEOUT_S = 2.0
SETTLE_S = 0.005
"""Seconds between two checks of the connections that are being closed."""
BACKLOG = 1024
_BUFFER = memoryview(bytearray(1 << 16))
"""Memory into which all connections receive, one after another. For each read, asyncio itself would allocate 256 KiB,
which takes longer than to answer a small request."""


class Listeners:
    """The sockets at which a directory listens. Clients that connect before it serves them wait."""

    def __init__(self, name: str, host: str) -> None:
        """Listen on a Unix socket named after `name`, and at the address `host` (see `listen`) unless it is "".

        The Unix socket is in the abstract namespace, so it leaves no file, even if this process is killed.
        """
        local = f"{name}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + local)
        listener.listen(BACKLOG)
        self.sockets = [listener]
        port = 0
        if host:
            reachable = listen(host)
            reachable.listen(BACKLOG)
            port = reachable.getsockname()[1]
            self.sockets.append(reachable)
        self.address = DirectoryAddress(local, host, port)

    def close(self) -> None:
        """Stop listening in this process. Idempotent."""
        for each in self.sockets:
            each.close()


class DirectoryServer:
    """Server of one directory service on sockets. All methods must be called on the service's event loop."""

    def __init__(self, service: DirectoryService, key: bytes) -> None:
        """key: the run's key (`StoreSpec.key`). Clients and the server prove to each other that they know it."""
        self._service = service
        self._key = key
        self._sessions: set[_Session] = set()
        self._strangers = Strangers[Stranger](SERVICE)
        self._servers: list[asyncio.Server] = []

    async def start(self, name: str, host: str, listeners: Listeners | None = None) -> DirectoryAddress:
        """Serve the clients that connect to `listeners`; None opens them, as `Listeners` does."""
        limit_accept_errors()
        listeners = listeners or Listeners(name, host)
        loop = asyncio.get_running_loop()
        for listener in listeners.sockets:
            if listener.family == socket.AF_UNIX:
                server = await loop.create_unix_server(self._session, sock=listener, backlog=BACKLOG)
            else:
                server = await loop.create_server(self._session, sock=listener, backlog=BACKLOG)
            self._servers.append(server)
        return listeners.address

    async def close(self) -> None:
        """Stop listening, let requests in progress end, and close all connections. Requests have END_TIMEOUT_S seconds
        to be answered, and clients have the same time to read their answers. Idempotent."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        waiting = [task for session in self._sessions for task in session.tasks.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=END_TIMEOUT_S)
        await asyncio.sleep(SETTLE_S)  # Connections that were just accepted become sessions during this pause.
        for session in list(self._sessions):
            session.end()
        deadline = asyncio.get_running_loop().time() + END_TIMEOUT_S
        while self._sessions and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(SETTLE_S)
        for session in list(self._sessions):
            session.abort()  # The client does not read its answers.
        await asyncio.sleep(SETTLE_S)

    def _session(self) -> _Session:
        return _Session(self._service, self._key, self._sessions, self._strangers)


class _Session(asyncio.BufferedProtocol):
    def __init__(
        self, service: DirectoryService, key: bytes, sessions: set[_Session], strangers: Strangers[Stranger]
    ) -> None:
        self.tasks: dict[int, asyncio.Future[Any]] = {}
        """Tasks and futures of the requests that are not answered yet, by request number."""
        self._service = service
        self._key = key
        self._sessions = sessions
        self._strangers = strangers
        self._reader = FrameReader()
        self._poll = select.poll()
        """Poll object that shows whether the peer has closed the connection, even while data that it sent is still
        unread."""
        self._stranger: Stranger | None = None
        """State of the handshake; None once the client has proved that it knows the run's key."""
        self._token = b""
        """Token of the client, with which it can repeat requests over a later connection; b"" if it has none."""
        self._stream: ServerStream | None = None
        """State of TLS on a connection that is encrypted, else None."""
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Ray uses uvloop if it is installed, and uvloop's transports have a class outside asyncio.
        self._transport = cast(asyncio.Transport, transport)
        connection = self._transport.get_extra_info("socket")
        self._poll.register(connection.fileno(), select.POLLRDHUP)
        if connection.family != socket.AF_UNIX:
            set_up_tcp(connection)
        self._deadline = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._transport.abort)
        self._sessions.add(self)
        self._stranger = Stranger(connection, self._key, SERVICE, self._transport.abort)
        self._strangers.add(self._stranger)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(_BUFFER[:nbytes])
        if self._stream is None and self._stranger is not None:
            data = self._admit(self._stranger, data)
        if self._stream is not None and data:
            data = self._decrypted(self._stream, data)
        if not data:
            return
        try:
            frames = self._reader.feed(data)
        except ValueError as error:  # The frame was damaged on the way, is not from Headrace, or is too large.
            self._strangers.log("a connection is closed: %s", error)
            self._send(0, str(error).encode())
            self._transport.close()
            return
        if frames:
            self._answer_all(frames)

    def connection_lost(self, exc: Exception | None) -> None:
        self._poll = select.poll()  # The number of the file descriptor may be reused from now on.
        self._sessions.discard(self)
        if self._stranger is not None:
            self._strangers.remove(self._stranger)
        if self._deadline is not None:
            self._deadline.cancel()
        for task in self.tasks.values():
            task.cancel()

    def end(self) -> None:
        """Close the connection of a stranger at once, and that of a client when it has read its answers."""
        if self._stranger is not None:
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _admit(self, stranger: Stranger, data: bytes) -> bytes:
        """Handle bytes of a connection whose client has not proved yet that it knows the run's key. Returns the bytes
        that follow the handshake; b"" while it continues, and after a failed handshake, which ends the connection."""
        num_missing = stranger.num_missing
        part, rest = data[:num_missing], data[num_missing:]
        try:
            answer = stranger.hear(part)
            if rest and not stranger.has_proved:
                raise HandshakeError("the client did not wait for the server's part of the handshake")
        except HandshakeError as error:
            self._strangers.refuse(stranger, error)
            return b""
        if answer:
            self._transport.write(answer)
        if stranger.has_proved:
            address = self._transport.get_extra_info("peername")
            if is_encrypted(self._key) and isinstance(address, tuple):  # The text of a Unix socket is no tuple.
                self._stream = ServerStream(self._key, f"the client at {join_host(*address[:2])}")
            else:
                self._is_member(stranger)
        return rest

    def _decrypted(self, stream: ServerStream, data: bytes) -> bytes:
        """Return what encrypted bytes say. A connection with bytes that are not the client's is ended."""
        try:
            data = stream.receive(data)
        except ConnectionError as error:
            if isinstance(error, HandshakeError):
                self._strangers.log("a connection to the %s is closed: %s", SERVICE, error)
                self._transport.write(stream.answer())
            self._transport.close()
            return b""
        if answer := stream.answer():
            self._transport.write(answer)
        if stream.ready and self._stranger is not None:
            self._is_member(self._stranger)
        return data

    def _is_member(self, stranger: Stranger) -> None:
        """Begin to take frames from a client that has proved all that it must."""
        self._stranger = None
        self._strangers.remove(stranger)
        if self._deadline is not None:
            self._deadline.cancel()

    def _answer_all(self, frames: Sequence[tuple[int, str, bytes]]) -> None:
        has_gone = bool(self._poll.poll(0))
        cancelled = _cancelled_at_once(frames) if len(frames) > 1 else frozenset()
        for position, (number, op, payload) in enumerate(frames):
            if has_gone and op not in TAKE_BACK:
                continue  # The caller already has the error that reports the missing answer.
            if op == CANCEL:
                self._cancel(number)
            elif op == TOKEN:
                self._token = payload[:TOKEN_BYTES]
            elif position in cancelled:
                self._send(number, CANCELLED)
            else:
                self._answer(number, op, payload)

    def _cancel(self, number: int) -> None:
        """Cancel the request with this number if it is waiting for rows or space. A request that is being carried out
        is answered as usual."""
        task = self.tasks.get(number)
        if isinstance(task, asyncio.Task) and task.get_name() in WAITING_OPS:
            task.cancel()

    def _answer(self, number: int, op: str, payload: bytes) -> None:
        try:
            if op == AGAIN:
                request, op, payload, waited_s = read_repeated(payload)
                reply = self._service.repeat(op, payload, request, waited_s)
            else:
                reply = self._service.answer(op, payload, identity(self._token, number) if self._token else b"")
        except Exception as error:
            reply = _bug(op, error)
        if isinstance(reply, bytes):
            self._send(number, reply)
            return
        if isinstance(reply, asyncio.Future):
            self.tasks[number] = reply
            reply.add_done_callback(functools.partial(self._answered, number, op))
            return
        task = self._loop.create_task(self._answer_later(number, op, reply), name=op)
        self.tasks[number] = task
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    def _answered(self, number: int, op: str, reply: asyncio.Future[bytes]) -> None:
        self.tasks.pop(number, None)
        if not reply.cancelled():
            error = reply.exception()
            self._send(number, reply.result() if error is None else _bug(op, error))

    async def _answer_later(self, number: int, op: str, waiting: Coroutine[Any, Any, bytes]) -> None:
        try:
            reply = await waiting
        except asyncio.CancelledError:
            reply = CANCELLED
        except Exception as error:
            reply = _bug(op, error)
        self._send(number, reply)

    def _send(self, number: int, reply: bytes) -> None:
        if self._transport.is_closing():
            return
        if self._stream is not None:
            self._transport.write(self._stream.answer(head(number, reply), reply))
        else:
            self._transport.writelines((head(number, reply), reply))


def _cancelled_at_once(frames: Sequence[tuple[int, str, bytes]]) -> frozenset[int]:
    """Return the positions in `frames` of requests that are cancelled by a later frame in `frames`."""
    found: set[int] = set()
    numbers: set[int] = set()
    for position in range(len(frames) - 1, -1, -1):
        number, op, _ = frames[position]
        if op == CANCEL:
            numbers.add(number)
        elif number in numbers:
            numbers.remove(number)
            found.add(position)
    return frozenset(found)


def _bug(op: str, error: BaseException) -> bytes:
    """Log an unexpected error, and return a reply that reports it. Without a reply, the caller would wait for an answer
    that never comes."""
    _logger.error("request %r failed", op, exc_info=error)
    return reply_error(DataPlaneError(f"the directory failed: {type(error).__name__}: {error}", op=op))
