"""Accepts connections, and hands over those whose clients have proved that they know the run's key.

Until then a client is called a stranger. A stranger costs one descriptor and at most HELLO_BYTES bytes of memory, it
has HANDSHAKE_TIMEOUT_S seconds, and there are never more than MOST_STRANGERS for one service. This holds for each
service, whether a separate thread (`AuthenticatedListener`) or an event loop (the directory's server, the endpoint for
agents) reads its connections. What strangers cause in the log is limited by `few_lines.py`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from ..listen_address import join_host, listening, tcp_socket
from .few_lines import FewLines
from .handshake import HandshakeError, ServerHandshake, prove_to_server
from .tls import as_socket, is_encrypted, named, secured, wrapped

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds after which a connection is closed if its client has not proved that it knows the run's key."""
MAX_STRANGERS = 128
"""Number of strangers' connections above which each new one closes an old one with a slow client."""
MOST_STRANGERS = 1024
"""Largest number of strangers' connections. Above this number, each new connection closes the oldest one, even if its
client is not slow. That client connects again."""
SLOW_S = 1.0
"""Seconds that a client may take to answer the server's part of the handshake before it counts as slow."""
_LOOKED_AT = 8
"""Number of the oldest strangers' connections that are searched for a slow client."""


class Connection(Protocol):
    """A connected socket, or its counterpart in an event loop."""

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
        """Time by `time.monotonic` at which the server's part of the handshake was returned; None before that."""

    @property
    def num_missing(self) -> int:
        """Number of bytes that are missing in the client's next message of the handshake."""
        return self._handshake.needed_bytes - len(self._received)

    def hear(self, data: bytes) -> bytes:
        """Continue the handshake with the client's next bytes, at most `num_missing`, and return what to send to it.
        Raises HandshakeError when the client does not belong to this run."""
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

    def replace(self, connection: Connection, end: Callable[[], None]) -> None:
        """Take another object in the place of the connection, and of the function that closes it."""
        self._connection, self.end = connection, end

    def is_slow(self) -> bool:
        """Return whether the server waits for a client's bytes. If it answered the client before, it has waited SLOW_S
        seconds. A client with bytes that have arrived is not slow, even if they have not been read yet."""
        if self._challenged_s is not None and time.monotonic() < self._challenged_s + SLOW_S:
            return False
        return not has_unread(self._connection)


def has_unread(connection: Connection) -> bool:
    """Return whether bytes, or the end, of an open connection have arrived that have not been read yet."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class Closable(Protocol):
    """A connection that `Strangers` may close when there are too many."""

    def is_slow(self) -> bool: ...

    def end(self) -> None: ...


S = TypeVar("S", bound=Closable)


class Strangers(Generic[S]):
    """The strangers of one service, oldest first."""

    def __init__(self, service: str) -> None:
        """service: name of the service in the log."""
        self._service = service
        self._strangers: dict[S, None] = {}
        self._few = FewLines()

    def __len__(self) -> int:
        return len(self._strangers)

    @property
    def oldest(self) -> S | None:
        """The stranger that connected first; None when there is none."""
        return next(iter(self._strangers), None)

    def add(self, stranger: S) -> None:
        """Add a stranger that has just connected, and close an old connection if there are too many. The closed
        connection has a slow client or, above MOST_STRANGERS, is the oldest."""
        self._strangers[stranger] = None
        if len(self._strangers) <= MAX_STRANGERS:
            return
        oldest = list(itertools.islice(self._strangers, _LOOKED_AT))
        slow = [one for one in oldest if one.is_slow()]
        if not slow and len(self._strangers) > MOST_STRANGERS:
            slow = oldest
        for one in slow[:1]:
            self.end(one)

    def remove(self, stranger: S) -> None:
        """Forget a stranger that has proved to know the key, or whose connection has ended. Idempotent."""
        self._strangers.pop(stranger, None)

    def end(self, stranger: S) -> None:
        """Forget a stranger, and close its connection."""
        self.remove(stranger)
        stranger.end()

    def refuse(self, stranger: S, error: HandshakeError) -> None:
        """Forget a stranger, close its connection, and log why."""
        self.end(stranger)
        self.log("a connection to the %s was refused: %s", self._service, error)

    def log(self, text: str, *arguments: object) -> None:
        """Log a line about a connection. Lines that would come too fast are counted in the next one."""
        if (left_out := self._few.passes()) is not None:
            _logger.warning(f"{text}%s", *arguments, left_out)


_logger = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 64
"""Largest number of connections that are accepted before open ones are read again."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.05
_BACKLOG = 1024
_CLOSE_TIMEOUT_S = 5.0


def listen(host: str) -> socket.socket:
    """Open a listening socket on `host`, at a free port of the range that this process has to use (see `Listening`).
    Without a range, it is any free port. Raises OSError if this fails, and ValueError if the range has no free port."""
    own = listening()
    for port in (0,) if own.ports is None else own.ports.shuffled():
        listener = tcp_socket(host)
        try:
            if port:  # The port may have old connections that are not over yet.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. Without it, the second of two small messages waits 40 ms for a receipt.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if not port or error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"cannot listen on {join_host(host, port)}: {error.strerror}") from error
    raise own.exhausted(host)


def connect_authenticated(host: str, port: int, key: bytes, service: str, timeout_s: float) -> socket.socket:
    """Connect to an AuthenticatedListener and carry out the handshake, and return the connected blocking socket. It is
    encrypted if the key says so.

    Connects again when the listener closes the connection in the middle of the handshake, as it does when it has too
    many strangers. Raises HandshakeError when the server there does not know the key, and OSError when no server
    listens there or `timeout_s` seconds are over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.create_connection((host, port), max(deadline - time.monotonic(), 1e-3))
        try:
            # TCP_NODELAY sends the bytes after the proof at once.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove_to_server(connection, key, service, deadline)
            return secured(connection, key, service, deadline) if is_encrypted(key) else connection
        except HandshakeError:
            connection.close()
            raise
        except (ConnectionResetError, BrokenPipeError):
            connection.close()
            if time.monotonic() + _PAUSE_S >= deadline:
                raise
            time.sleep(_PAUSE_S)
        except BaseException:
            connection.close()
            raise


class AuthenticatedListener:
    """Listening socket with a thread that carries out the server's part of each handshake."""

    def __init__(
        self, listener: socket.socket, key: bytes, service: str, admit: Callable[[socket.socket], None]
    ) -> None:
        """Take ownership of the listening socket `listener`, and start the thread.

        key: the run's key (`StoreSpec.key`). service: name of the service in handshakes. admit: function that is
        called in the thread with each connection (a blocking socket) whose client has proved that it knows the key;
        it must return at once, and owns the connection. Raises ValueError, and closes `listener`, when the key is
        empty.
        """
        if not key:
            listener.close()
            raise ValueError(f"{service}: got no key, expected the key of the run's data plane")
        self.host, self.port = listener.getsockname()[:2]
        self._listener = listener
        self._key = key
        self._service = service
        self._admit = admit
        self._strangers = Strangers[Stranger](service)
        self._pid = os.getpid()
        listener.setblocking(False)
        self._stop, self._stopped = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"headrace-{service.replace(' ', '-')}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close the strangers' connections. Connections that were handed over stay open.
        Idempotent; a no-op in a process that was forked from the listener's."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):  # The socket may be closed already.
            self._stop.send(b"x")
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._stop.close()

    # ---------------- The listener's thread runs these methods.

    def _run(self) -> None:
        try:
            while True:
                connects = False
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fileobj is self._stopped:
                        return
                    if key.fileobj is self._listener:
                        connects = True
                    else:
                        self._hear(cast(socket.socket, key.fileobj), key.data)
                # Connections are accepted last, so that a client with bytes here already does not count as slow.
                if connects:
                    self._accept()
                self._end_late()
        finally:
            while (stranger := self._strangers.oldest) is not None:
                self._strangers.end(stranger)
            self._selector.close()
            self._listener.close()
            self._stopped.close()

    def _wait_s(self) -> float | None:
        oldest = self._strangers.oldest
        return None if oldest is None else max(0.0, oldest.deadline - time.monotonic())

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    continue  # The client has disconnected.
                self._strangers.log("no connection to the %s can be accepted: %s", self._service, error)
                if (oldest := self._strangers.oldest) is not None:
                    self._strangers.end(oldest)
                else:
                    time.sleep(_PAUSE_S)  # The listening socket stays readable, so the loop would spin without a pause.
                return
            connection.setblocking(False)
            stranger = Stranger(connection, self._key, self._service, functools.partial(self._end, connection))
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            self._strangers.add(stranger)

    def _end_late(self) -> None:
        now = time.monotonic()
        while (oldest := self._strangers.oldest) is not None and oldest.deadline <= now:
            self._strangers.end(oldest)

    def _hear(self, connection: socket.socket, stranger: Stranger) -> None:
        """Read a stranger's next bytes, no more than the handshake needs, and continue the handshake."""
        if isinstance(connection, ssl.SSLSocket):
            self._show_certificates(connection, stranger)
            return
        try:
            received = connection.recv(stranger.num_missing)
            if not received:
                raise ConnectionResetError
            answer = stranger.hear(received)
            if answer:
                connection.send(answer)  # The answer is so short that the kernel takes all of it.
        except BlockingIOError:
            return
        except HandshakeError as error:
            self._strangers.refuse(stranger, error)
        except OSError:  # The client has disconnected.
            self._strangers.end(stranger)
        else:
            if not stranger.has_proved:
                return
            self._selector.unregister(connection)
            if is_encrypted(self._key):
                self._encrypt(connection, stranger)
                return
            self._strangers.remove(stranger)
            connection.setblocking(True)
            self._admit(connection)

    def _encrypt(self, connection: socket.socket, stranger: Stranger) -> None:
        """Begin TLS with a client that knows the run's key. It stays a stranger until it has shown its certificate."""
        encrypted = wrapped(connection, self._key, server=True)
        stranger.replace(encrypted, functools.partial(self._end, encrypted))
        self._selector.register(encrypted, selectors.EVENT_READ, stranger)
        self._show_certificates(encrypted, stranger)

    def _show_certificates(self, connection: ssl.SSLSocket, stranger: Stranger) -> None:
        try:
            end = f"the client at {join_host(*connection.getpeername()[:2])}"
            with named(end, ready=False):
                connection.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLWantWriteError:  # What the server has to say fits into the kernel's memory, so this is an attack.
            self._strangers.end(stranger)
        except HandshakeError as error:
            self._strangers.refuse(stranger, error)
        except OSError:  # The client has disconnected.
            self._strangers.end(stranger)
        else:
            self._strangers.remove(stranger)
            self._selector.unregister(connection)
            self._admit(as_socket(connection, end))

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
