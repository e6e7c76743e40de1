"""The listener that admits connections once their clients have proved that they know the run's key."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from headrace.dataplane.security import authenticated_listener, few_lines
from headrace.dataplane.security.authenticated_listener import (
    MAX_STRANGERS,
    AuthenticatedListener,
    connect_authenticated,
    listen,
)
from headrace.dataplane.security.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    HandshakeError,
    new_key,
)
from headrace.tests.waiting import wait_until

KEY = new_key()
SERVICE = "tests"


class Admitted:
    """A listener, and the connections that it has handed over."""

    def __init__(self) -> None:
        self.connections: queue.Queue[socket.socket] = queue.Queue()
        self.listener = AuthenticatedListener(listen("127.0.0.1"), KEY, SERVICE, self.connections.put)
        self.address = ("127.0.0.1", self.listener.port)

    def connect(self, key: bytes = KEY) -> socket.socket:
        return connect_authenticated(*self.address, key, SERVICE, 30)


@pytest.fixture
def admitted() -> Iterator[Admitted]:
    admitted = Admitted()
    yield admitted
    admitted.listener.close()


def test_who_knows_the_key_is_admitted_and_what_it_sends_next_is_left_to_the_service(admitted: Admitted) -> None:
    with admitted.connect() as near:
        near.sendall(b"request")
        with admitted.connections.get(timeout=30) as far:
            far.settimeout(30)
            assert far.recv(100) == b"request"
            far.sendall(b"reply")
            assert near.recv(100) == b"reply"
    assert len(admitted.listener._strangers) == 0


def test_who_does_not_know_the_key_is_told_apart_by_both_ends(
    admitted: Admitted, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(HandshakeError, match="not the tests of this run"):
        admitted.connect(new_key())
    with socket.create_connection(admitted.address, 30) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):  # what it sent was not read to its end
            assert stranger.recv(100) == b""
    wait_until(lambda: "a connection to the tests was refused: the client's first bytes" in caplog.text)
    with socket.create_connection(admitted.address, 30) as forger:
        forger.sendall(ClientHandshake(KEY, SERVICE).hello)
        assert len(forger.recv(CHALLENGE_BYTES)) == CHALLENGE_BYTES
        forger.sendall(bytes(PROOF_BYTES))
        assert forger.recv(1) == b""
    assert admitted.connections.empty()
    with pytest.raises(ValueError, match="tests: got no key, expected the key of the run's data plane"):
        AuthenticatedListener(listen("127.0.0.1"), b"", SERVICE, admitted.connections.put)


def test_refusals_fill_no_log(admitted: Admitted, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        with socket.create_connection(admitted.address, 30) as stranger:
            stranger.sendall(bytes(HELLO_BYTES))
            assert stranger.recv(100) == b""
    assert 1 <= caplog.text.count("a connection to the tests was refused") < 25


def test_lines_that_were_left_out_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service says so in its next line, and so does asyncio's log, which has a line for each place in a queue."""
    now = [0.0]
    monkeypatch.setattr(few_lines.time, "monotonic", lambda: now[0])
    few_lines.limit_accept_errors()
    few_lines.limit_accept_errors()
    log = logging.getLogger("asyncio")
    now[0] = 1e9
    for _ in range(1024):
        log.error("socket.accept() out of system resource\nsocket: %s", "x")
    log.error("something else")
    now[0] += few_lines.LOG_EVERY_S
    log.error("socket.accept() out of system resource")
    first, other, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("socket.accept() out of") and other == "something else"
    assert last == "socket.accept() out of system resource (and 1023 lines like it before)"
    log.filters[:] = []


def test_strangers_are_few_and_keep_nobody_out(admitted: Admitted) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(admitted.address, 30)) for _ in range(300)]
        assert strangers[0].recv(1) == b"", "the oldest is closed long before its ten seconds"
        wait_until(lambda: len(admitted.listener._strangers) <= MAX_STRANGERS)
        stack.enter_context(admitted.connect())
        stack.enter_context(admitted.connections.get(timeout=30))


def test_a_stranger_who_takes_its_time_is_closed(admitted: Admitted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticated_listener, "HANDSHAKE_TIMEOUT_S", 0.1)
    with socket.create_connection(admitted.address, 30) as stranger:
        stranger.sendall(ClientHandshake(KEY, SERVICE).hello[:-1])
        assert stranger.recv(1) == b""
    assert len(admitted.listener._strangers) == 0


def test_a_client_whose_handshake_is_cut_off_connects_again() -> None:
    with listen("127.0.0.1") as crowded:
        port = crowded.getsockname()[1]
        found: list[socket.socket] = []
        client = threading.Thread(
            target=lambda: found.append(connect_authenticated("127.0.0.1", port, KEY, SERVICE, 30))
        )
        client.start()
        for _ in range(2):  # as for strangers above the largest number
            crowded.accept()[0].close()
        connections: queue.Queue[socket.socket] = queue.Queue()
        listener = AuthenticatedListener(crowded.dup(), KEY, SERVICE, connections.put)
        client.join(30)
        listener.close()
    with found[0] as near, connections.get(timeout=30) as far:
        near.sendall(b"request")
        assert far.recv(100) == b"request"


def test_nobody_there_is_told_at_once_and_a_silent_server_in_time() -> None:
    with listen("127.0.0.1") as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TimeoutError):
            connect_authenticated("127.0.0.1", port, KEY, SERVICE, 0.2)
    with pytest.raises(ConnectionRefusedError):
        connect_authenticated("127.0.0.1", port, KEY, SERVICE, 600)


def test_closing_ends_strangers_and_the_thread_and_not_who_was_admitted(admitted: Admitted) -> None:
    with admitted.connect() as near, admitted.connections.get(timeout=30) as far:
        with socket.create_connection(admitted.address, 30) as stranger:
            wait_until(lambda: len(admitted.listener._strangers) == 1)
            admitted.listener.close()
            admitted.listener.close()
            assert stranger.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(admitted.address, 30)
        far.sendall(b"still there")
        assert near.recv(100) == b"still there"
    assert not any(thread.name == f"headrace-{SERVICE}" for thread in threading.enumerate())
