"""Attacks on the handshakes of all ports are refused and lose nothing, while a real client keeps working."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataplane.security.handshake import CHALLENGE_BYTES, HELLO_BYTES, MAGIC, PROOF_BYTES, ClientHandshake
from headrace.tests.attacks.ports import PORTS, AttackedPort, frames_of, member, received, recorded, send, stranger

MEMORY_BYTES = 16 << 20
"""Largest number of bytes that an attack may make this process take, the attacker's and the client's own included."""
MOST_STRANGERS = 1024


@pytest.fixture(params=PORTS)
def port(request: pytest.FixtureRequest) -> Iterator[AttackedPort]:
    """Opens each port in turn, and checks that its client can work before and after each attack, in bounded memory."""
    port = PORTS[request.param]()
    try:
        port.work()
        tracemalloc.start(1)
        yield port
        port.work()
        _, peak = tracemalloc.get_traced_memory()
        assert peak < MEMORY_BYTES
        assert port.num_strangers() <= MOST_STRANGERS
    finally:
        tracemalloc.stop()
        port.close()


def test_what_was_said_before_is_worthless(port: AttackedPort) -> None:
    said = recorded(port)
    hello, proof, rest = (
        said[:HELLO_BYTES],
        said[HELLO_BYTES : HELLO_BYTES + PROOF_BYTES],
        said[HELLO_BYTES + PROOF_BYTES :],
    )
    with stranger(port) as again:
        send(again, hello)
        challenge = again.recv(CHALLENGE_BYTES)
        send(again, proof + rest)
        assert len(challenge) == CHALLENGE_BYTES and received(again) == b""
    with stranger(port) as at_once:
        send(at_once, said)
        assert len(received(at_once)) in (0, CHALLENGE_BYTES)
    with stranger(port) as echo:  # the server's own proof, sent back
        send(echo, hello)
        send(echo, echo.recv(CHALLENGE_BYTES)[-PROOF_BYTES:])
        assert received(echo) == b""


def test_truncated_handshakes(port: AttackedPort) -> None:
    hello = ClientHandshake(port.key, port.service).hello
    for length in (0, 1, len(MAGIC), HELLO_BYTES - 1):
        with stranger(port) as short:
            send(short, hello[:length])
    for length in (0, 1, PROOF_BYTES - 1):
        with stranger(port) as short:
            client = ClientHandshake(port.key, port.service)
            send(short, client.hello)
            send(short, client.answer(short.recv(CHALLENGE_BYTES))[:length])
            port.work()


def test_reordered_messages(port: AttackedPort) -> None:
    frames = [header + body for header, body in frames_of(port)]
    client = ClientHandshake(port.key, port.service)
    for first in (frames[0] * 40, bytes(PROOF_BYTES) + client.hello, b"\0" * HELLO_BYTES):
        with stranger(port) as reordered:
            send(reordered, first)
            assert received(reordered) == b"", "closed without an answer"
    with stranger(port) as early:
        send(early, client.hello)
        answer = early.recv(CHALLENGE_BYTES)
        send(early, b"".join(frames))  # in place of the proof
        send(early, client.answer(answer))
        assert received(early) == b""


def test_oversized_messages(port: AttackedPort) -> None:
    with stranger(port) as flood:
        send(flood, MAGIC + os.urandom(4 << 20))
        assert len(received(flood)) in (0, CHALLENGE_BYTES)
    with member(port) as known:  # who knows the key cannot announce what is too much, either
        send(known, b"\xff" * 64)
        answer = received(known)
        assert not answer or (b"damaged on the way" in answer and len(answer) < 200), "a sentence says why it is closed"


def test_pickles_are_not_run(port: AttackedPort, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    payload = pickle.dumps(Payload())
    with stranger(port) as unknown:
        send(unknown, payload)
        send(unknown, payload * 10)
    for prefix in (b"", struct.pack("<I", len(payload)), struct.pack("<QIB", len(payload), 1, 0)):
        with member(port) as known:
            send(known, prefix + payload)
    port.work()
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the payload can run"


def test_slow_ones_keep_nobody_waiting(port: AttackedPort) -> None:
    ended = threading.Event()

    def drip() -> None:
        with contextlib.ExitStack() as stack:
            slow = [stack.enter_context(stranger(port)) for _ in range(20)]
            for byte in ClientHandshake(port.key, port.service).hello:
                for connection in slow:
                    send(connection, bytes([byte]))
                if ended.wait(0.01):
                    return

    attacker = threading.Thread(target=drip)
    attacker.start()
    for _ in range(10):
        port.work()
    member(port).close()
    ended.set()
    attacker.join(30)


@pytest.mark.long
def test_a_thousand_at_once(port: AttackedPort) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            one = stack.enter_context(stranger(port))
            if number % 2:
                send(one, ClientHandshake(port.key, port.service).hello)
            if number % 100 == 0:
                port.work()
        member(port).close()
        port.work()
