"""The handshake: both ends prove that they know the key, and attacks on it get nowhere."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.dataplane.security.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    HandshakeError,
    ServerHandshake,
    new_key,
    prove_to_server,
    prove_to_server_async,
)
from headrace.tests.dataplane.security.far_end import prove_to_client

KEY = new_key()


def both(client: ClientHandshake, server: ServerHandshake) -> list[bytes]:
    """Carry out a handshake, and return the three messages."""
    challenge = server.challenge(client.hello)
    proof = client.answer(challenge)
    server.check(proof)
    return [client.hello, challenge, proof]


def test_both_ends_know_the_key_and_it_never_travels() -> None:
    messages = both(ClientHandshake(KEY, "directory"), ServerHandshake(KEY, "directory"))
    assert [len(message) for message in messages] == [HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES]
    assert KEY not in b"".join(messages)


def test_a_server_without_the_key_is_found_out_before_the_client_proves_anything() -> None:
    client = ClientHandshake(KEY, "directory")
    with pytest.raises(HandshakeError, match="not the directory of this run"):
        client.answer(ServerHandshake(new_key(), "directory").challenge(client.hello))


def test_a_client_without_the_key_is_refused() -> None:
    server = ServerHandshake(KEY, "directory")
    challenge = server.challenge(ClientHandshake(KEY, "directory").hello)
    with pytest.raises(HandshakeError, match="did not prove"):
        server.check(b"\0" * PROOF_BYTES)
    with pytest.raises(HandshakeError, match="did not prove"):
        server.check(challenge[NONCE_BYTES:])  # its own proof, sent back


def test_recorded_messages_are_worthless_for_another_connection() -> None:
    hello, challenge, proof = both(ClientHandshake(KEY, "directory"), ServerHandshake(KEY, "directory"))
    server = ServerHandshake(KEY, "directory")
    server.challenge(hello)
    with pytest.raises(HandshakeError):
        server.check(proof)
    with pytest.raises(HandshakeError):
        ClientHandshake(KEY, "directory").answer(challenge)


def test_a_proof_for_one_service_is_none_for_another() -> None:
    client, unit = ClientHandshake(KEY, "directory"), ServerHandshake(KEY, "storage unit")
    with pytest.raises(HandshakeError, match="not the directory"):
        client.answer(unit.challenge(client.hello))


def test_messages_out_of_order_are_refused() -> None:
    with pytest.raises(HandshakeError):
        ServerHandshake(KEY, "directory").check(b"\0" * PROOF_BYTES)
    with pytest.raises(HandshakeError, match="first bytes"):
        ServerHandshake(KEY, "directory").challenge(bytes(HELLO_BYTES))


@given(st.data())
def test_one_changed_byte_anywhere_fails_the_handshake(data: st.DataObject) -> None:
    which = data.draw(st.integers(0, 2))
    client, server = ClientHandshake(KEY, "directory"), ServerHandshake(KEY, "directory")

    def changed(number: int, message: bytes) -> bytes:
        if number != which:
            return message
        at = data.draw(st.integers(0, len(message) - 1))
        return message[:at] + bytes([message[at] ^ data.draw(st.integers(1, 255))]) + message[at + 1 :]

    with pytest.raises(HandshakeError):
        challenge = changed(1, server.challenge(changed(0, client.hello)))
        server.check(changed(2, client.answer(challenge)))


def connected_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def in_thread(call: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failed


def test_the_handshake_over_sockets_leaves_what_follows_it_unread() -> None:
    near, far = connected_pair()
    with near, far:
        thread, failed = in_thread(lambda: prove_to_client(far, KEY, "unit"))
        prove_to_server(near, KEY, "unit", time.monotonic() + 10)
        near.sendall(b"request")
        thread.join(10)
        assert not failed and far.recv(100) == b"request"


def test_a_challenge_in_drops_ends_at_the_deadline_however_busy_the_server_seems() -> None:
    near, far = connected_pair()
    with near, far:
        thread, failed = in_thread(lambda: prove_to_server(near, KEY, "unit", time.monotonic() + 0.3))
        for _ in range(20):
            far.sendall(b"x")
            time.sleep(0.02)
        thread.join(10)
        assert isinstance(failed[0], TimeoutError)


def test_a_truncated_handshake_is_an_end_of_the_connection() -> None:
    near, far = connected_pair()
    with near:
        thread, failed = in_thread(lambda: prove_to_server(near, KEY, "unit", time.monotonic() + 10))
        with far:
            challenge = ServerHandshake(KEY, "unit").challenge(far.recv(HELLO_BYTES))
            far.sendall(challenge[:-1])
        thread.join(10)
        assert isinstance(failed[0], ConnectionError)


def prove_by_asyncio(connection: socket.socket) -> None:
    async def prove() -> None:
        connection.setblocking(False)
        await prove_to_server_async(asyncio.get_running_loop(), connection, KEY, "unit")

    asyncio.run(prove())


@pytest.mark.parametrize(
    "prove", [lambda near: prove_to_server(near, KEY, "unit", time.monotonic() + 10), prove_by_asyncio]
)
def test_a_challenge_in_pieces_is_read_alone_and_what_follows_stays(prove: Callable[[socket.socket], None]) -> None:
    near, far = connected_pair()
    with near, far:
        far.settimeout(10)
        thread, failed = in_thread(lambda: prove(near))
        server = ServerHandshake(KEY, "unit")
        challenge = server.challenge(far.recv(HELLO_BYTES))
        far.sendall(challenge[:5])
        time.sleep(0.1)  # so that the client reads these bytes alone
        far.sendall(challenge[5:] + b"what follows")
        server.check(far.recv(PROOF_BYTES))
        thread.join(10)
        near.settimeout(10)
        assert not failed and near.recv(100) == b"what follows"


def test_no_secret_is_part_of_the_text_of_an_object() -> None:
    """A dataclass shows its fields in logs and errors, unless a field says otherwise."""
    root = Path(headrace.__file__).parent
    files = [path for folder in ("actors", "bench", "dataplane", "trainers") for path in (root / folder).rglob("*.py")]
    pattern = re.compile(r"^    (?:key: bytes|secret: str).*", re.MULTILINE)
    fields = [line for path in files for line in pattern.findall(path.read_text())]
    assert len(fields) >= 5 and all("repr=False" in line for line in fields), fields
