"""Lets the members of a torch process group find each other over connections authenticated with the run's key.

torch's TCPStore has no authentication: anyone who reaches its port can impersonate a member or redirect it to another
address. `RendezvousServer` and `RendezvousStore` do what process groups need of a store, after the handshake of
`dataplane/security/handshake.py`.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from torch.distributed import DistNetworkError, DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from ...dataplane.listen_address import join_host
from ...dataplane.rpc.frames import set_up_tcp
from ...dataplane.security.authenticated_listener import AuthenticatedListener, connect_authenticated, listen
from .framed_messages import receive_message, send_message

_logger = logging.getLogger(__name__)

SERVICE = "rendezvous"
"""Name of a rendezvous server in handshakes."""
MAX_MESSAGE_BYTES = 1 << 24
"""Largest number of bytes of a request or a reply. The addresses of a gloo group of several thousand ranks fit into a
message."""
MAX_VALUES_BYTES = 1 << 28
"""Largest number of bytes of all keys and values together."""
MAX_MEMBERS = 1 << 13
"""Largest number of simultaneous connections of members."""
_LOOK_S = 0.5
"""Seconds between two checks of the connection of a member that waits for a key."""
_GRACE_S = 5.0
"""Seconds that a member waits for an answer in addition to the time that the server waits for a key."""


@dataclass(frozen=True, slots=True)
class Request:
    """A member's request to the server."""

    op: str
    """Name of a method of `RendezvousStore`."""
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    """Value that `compare_set` expects to find; otherwise empty."""
    amount: int = 0
    """Number that `add` adds; otherwise 0."""
    wait_s: float = 0.0
    """Seconds for which `get` and `wait` wait until the keys exist; otherwise 0.0."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's answer to one request."""

    value: bytes = b""
    """Result of `get` and `compare_set`; otherwise empty."""
    number: int = 0
    """Result of the other operations; 1 for true."""
    error: str = ""
    """Reason why the request failed; "" when it succeeded."""


class RendezvousServer:
    """Keeps the keys and values through which the members of process groups find each other. Each connection has its
    own thread, because a request may have to wait."""

    def __init__(self, host: str, key: bytes) -> None:
        """Listen on `host` and a free port. key: the run's key. Raises ValueError when the key is empty, and OSError
        when listening fails."""
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        """Number of bytes of all keys and values together."""
        self._awaited: dict[str, list[threading.Event]] = {}
        """Events that are set when a key is written, by key."""
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener = AuthenticatedListener(listen(host), key, SERVICE, self._admit)
        self.port = self._listener.port

    def clear(self, prefix: str = "") -> None:
        """Forget all keys that start with `prefix`. Call it when the process groups that used them no longer exist."""
        self._drop(lambda key: key.startswith(prefix))

    def clear_others(self, name: str) -> None:
        """Forget the keys of all process groups but one, whose members perhaps find each other already. The other
        groups may not exist any more. name: that of the group, with which its keys start."""
        self._drop(lambda key: not key.startswith(f"{name}/"))

    def _drop(self, chosen: Callable[[str], bool]) -> None:
        with self._lock:
            for key in list(filter(chosen, self._values)):
                self._nbytes -= len(key) + len(self._values.pop(key))

    def close(self) -> None:
        """Stop listening, and close the members' connections. Idempotent."""
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # The connection's own thread may have just closed it.
                connection.shutdown(socket.SHUT_RDWR)

    def _admit(self, connection: socket.socket) -> None:
        with self._lock:
            full = len(self._connections) >= MAX_MEMBERS
            if not full:
                self._connections.add(connection)
        if full:
            connection.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="headrace-rendezvous-member", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # The system cannot start another thread.
            _logger.warning("rendezvous: a member was refused: %s", error)
            self._leave(connection)

    def _leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            set_up_tcp(connection)
            while True:
                request = receive_message(connection, Request, MAX_MESSAGE_BYTES)
                send_message(connection, self._answer(request, connection))
        except ValueError as error:
            _logger.warning("rendezvous: a member's connection is closed: %s", error)
        except OSError:  # The member has disconnected.
            pass
        finally:
            self._leave(connection)

    def _answer(self, request: Request, connection: socket.socket) -> Reply:
        if request.op in ("get", "wait") and not self._await(request, connection):
            return Reply(error=f"{', '.join(request.keys[:3])} not set within {request.wait_s:g} s")
        with self._lock:
            if request.op == "wait":
                return Reply()
            if request.op == "check":
                return Reply(number=int(all(key in self._values for key in request.keys)))
            if request.op == "num_keys":
                return Reply(number=len(self._values))
            if len(request.keys) != 1:
                return Reply(error=f"{request.op}: got {len(request.keys)} keys, expected 1")
            return self._answer_about(request.op, request.keys[0], request)

    def _answer_about(self, op: str, key: str, request: Request) -> Reply:
        current = self._values.get(key)
        if op == "get":
            return Reply(error=f"{key} was deleted") if current is None else Reply(current)
        if op == "set":
            return self._write(key, request.value) or Reply()
        if op == "add":
            try:
                total = int(current or b"0") + request.amount
            except ValueError:
                return Reply(error=f"add: {key} is not a number")
            return self._write(key, b"%d" % total) or Reply(number=total)
        if op == "compare_set":
            if (current or b"") == request.expected:
                return self._write(key, request.value) or Reply(request.value)
            return Reply(request.expected if current is None else current)
        if op == "delete":
            if current is not None:
                self._nbytes -= len(key) + len(self._values.pop(key))
            return Reply(number=int(current is not None))
        return Reply(error=f"got operation {op!r}, which the server does not know")

    def _write(self, key: str, value: bytes) -> Reply | None:
        """Set a key, under the lock. Returns None, or a reply with an error if there is no room for the value."""
        old = self._values.get(key)
        grows = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._nbytes + grows > MAX_VALUES_BYTES:
            return Reply(error=f"{key}: no room for {len(value)} bytes beside {self._nbytes}")
        self._nbytes += grows
        self._values[key] = value
        for event in self._awaited.pop(key, ()):
            event.set()
        return None

    def _await(self, request: Request, connection: socket.socket) -> bool:
        """Wait until all keys of the request exist, and return whether they exist in time. Raises ConnectionResetError
        when the member has disconnected."""
        deadline = time.monotonic() + request.wait_s
        for key in request.keys:
            event = self._event(key)
            try:
                while not event.wait(max(0.0, min(deadline - time.monotonic(), _LOOK_S))):
                    if time.monotonic() >= deadline:
                        return False
                    if _has_gone(connection):
                        raise ConnectionResetError
            finally:
                self._forget(key, event)
        return True

    def _event(self, key: str) -> threading.Event:
        event = threading.Event()
        with self._lock:
            if key in self._values:
                event.set()
            else:
                self._awaited.setdefault(key, []).append(event)
        return event

    def _forget(self, key: str, event: threading.Event) -> None:
        with self._lock:
            events = self._awaited.get(key, [])
            if event in events:
                events.remove(event)
            if not events:
                self._awaited.pop(key, None)


class RendezvousStore(Store):
    """torch.distributed store of one member, which asks a RendezvousServer. Thread-safe; one request at a time.

    The object must outlive the process groups that use it: torch keeps only the C++ part of a store, which calls the
    methods here. Every wait ends at the store's timeout (`set_timeout`), or at the one given. The methods raise
    DistStoreError when a key does not exist in time or the server refuses the request, and DistNetworkError when the
    connection is lost.
    """

    def __init__(self, host: str, port: int, key: bytes, timeout_s: float) -> None:
        """Connect to the server. timeout_s: seconds after which this and later waits fail. Raises OSError when the
        server cannot be reached, or does not know the run's key."""
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._host, self._port, self.key = host, port, key
        self._lock = threading.Lock()
        self._clones: list[RendezvousStore] = []
        self._connection = connect_authenticated(host, port, key, SERVICE, timeout_s)
        set_up_tcp(self._connection)

    def close(self) -> None:
        """Close the connections of this store and its clones. Idempotent."""
        for clone in self._clones:
            clone.close()
        with contextlib.suppress(OSError):  # The connection may be closed or lost already.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(Request("set", (key,), value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        return self._ask(Request("get", (key,), wait_s=self._bound_s())).value

    def add(self, key: str, value: int) -> int:
        return self._ask(Request("add", (key,), amount=value)).number

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        old, new = (one.encode() if isinstance(one, str) else one for one in (expected_value, desired_value))
        return self._ask(Request("compare_set", (key,), new, old)).value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        wait_s = self._bound_s() if timeout is None else timeout.total_seconds()
        self._ask(Request("wait", tuple(keys), wait_s=wait_s))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Request("check", tuple(keys))).number)

    def deleteKey(self, key: str) -> bool:  # noqa: N802  # torch calls it by this name
        return bool(self._ask(Request("delete", (key,))).number)

    def delete_key(self, key: str) -> bool:
        return self.deleteKey(key)

    def getNumKeys(self) -> int:  # noqa: N802  # torch calls it by this name
        return self._ask(Request("num_keys")).number

    def num_keys(self) -> int:
        return self.getNumKeys()

    def clone(self) -> RendezvousStore:
        """Return a store with a separate connection. Its waits do not delay the requests of this store."""
        clone = RendezvousStore(self._host, self._port, self.key, self._bound_s())
        self._clones.append(clone)  # Without this reference, torch would keep only the store's C++ part.
        return clone

    def _bound_s(self) -> float:
        return cast(Any, self).timeout.total_seconds()  # torch's type stubs do not have the attribute.

    def _ask(self, request: Request) -> Reply:
        bound_s = (request.wait_s or self._bound_s()) + _GRACE_S
        what = f"rendezvous at {join_host(self._host, self._port)}: {request.op} {', '.join(request.keys[:3])}"
        if not self._lock.acquire(timeout=bound_s):
            raise DistStoreError(f"{what}: another request has used the connection for {bound_s:g} s")
        try:
            self._connection.settimeout(bound_s)
            send_message(self._connection, request)
            reply = receive_message(self._connection, Reply, MAX_MESSAGE_BYTES)
        except (OSError, ValueError) as error:
            self._connection.close()  # A late answer must not be mistaken for the answer to the next request.
            raise DistNetworkError(f"{what}: the connection is lost: {error}") from error
        finally:
            self._lock.release()
        if reply.error:
            raise DistStoreError(f"{what}: {reply.error}")
        return reply


def _has_gone(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
