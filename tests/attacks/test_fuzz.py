"""Each port gets damaged frames, without the run's key and with it: a few in each test run, 100,000 in a drill."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from headrace.dataplane.security.handshake import CHALLENGE_BYTES, HELLO_BYTES, ClientHandshake
from headrace.tests.attacks.mutations import mutated
from headrace.tests.attacks.ports import PORTS, AttackedPort, frames_of, member, received, send, stranger

FRAMES = int(os.environ.get("HEADRACE_FUZZ_FRAMES", "100000"))
"""Frames that each port gets, half of them without the key."""
SEED = os.environ.get("HEADRACE_FUZZ_SEED")
"""A seed that a failed drill printed; unset: a new one."""
UNPROVED_AT_ONCE = 5
"""Damaged frames in one connection without the key."""
GROWTH_BYTES = 96 << 20
"""Largest number of bytes by which this process, which is the server, the client and the attacker, may grow."""


def send_without_the_key(port: AttackedPort, dice: random.Random, frames: list[tuple[bytes, bytes]]) -> None:
    """Open one connection, and send a damaged handshake, or none, and damaged frames behind it."""
    with stranger(port) as connection:
        damaged = b"".join(mutated(dice, b"".join(dice.choice(frames))) for _ in range(UNPROVED_AT_ONCE))
        client = ClientHandshake(port.key, port.service)
        kind = dice.randrange(3)
        if kind == 0:
            send(connection, mutated(dice, client.hello) + damaged)
        elif kind == 1:
            send(connection, damaged)
        else:
            send(connection, client.hello)
            proof = client.answer(_exactly(connection, CHALLENGE_BYTES))
            wrong = proof
            while wrong[: len(proof)] == proof:
                wrong = mutated(dice, proof)
            send(connection, wrong + damaged)
        send(connection, bytes(HELLO_BYTES))  # so that what is short is not waited for
        assert len(received(connection)) in (0, CHALLENGE_BYTES), "nothing but the server's part of the handshake"


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        assert more, "a proper hello is answered"
        data += more
    return data


def send_with_the_key(port: AttackedPort, dice: random.Random, frames: list[tuple[bytes, bytes]]) -> None:
    """Open one connection with the handshake, and send frames of which each is a real client's but for one mutation.
    That of the last one may be in its header, behind which the server cannot know where the next frame begins."""
    with member(port) as connection:
        chosen = [dice.choice(frames) for _ in range(port.at_once)]
        if dice.random() < 0.8:  # as a client begins, so that what follows is not the first that the server hears
            send(connection, b"".join(frames[0]))
        whole = dice.random() < 0.2
        for header, body in chosen[:-1] if whole else chosen:
            send(connection, port.framed(header, mutated(dice, body)))
        if whole:
            send(connection, mutated(dice, b"".join(chosen[-1])))
            with contextlib.suppress(OSError):  # refused already
                connection.shutdown(socket.SHUT_WR)  # it may announce more than there is
        port.settle(connection)


def memory_bytes() -> tuple[int, int]:
    """Return the size of this process's address space, and of what of it is resident."""
    with open("/proc/self/statm") as file:
        size, resident = map(int, file.read().split()[:2])
    return size * os.sysconf("SC_PAGE_SIZE"), resident * os.sysconf("SC_PAGE_SIZE")


def texts(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Take the errors that were logged, without what their tracebacks keep alive."""
    found = {f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}" for record in caplog.records}
    caplog.clear()
    return found


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """Limits the memory of this process, so that what would take gigabytes fails and the machine keeps them."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes()[0] + (2 << 30), old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


def attacked(name: str, num_frames: int, caplog: pytest.LogCaptureFixture) -> int:
    """Send a port so many damaged frames, half of them without the key, while a real client works. Returns the bytes by
    which this process has grown after 200 rounds; raises AssertionError for exceptions that are no refusals."""
    seed = int(SEED) if SEED else random.SystemRandom().randrange(1 << 32)
    print(f"{name}: HEADRACE_FUZZ_SEED={seed}", file=sys.stderr)
    dice, started = random.Random(seed), time.monotonic()
    caplog.set_level(logging.ERROR)
    port = PORTS[name]()
    try:
        frames = frames_of(port)
        before, told = 0, set[str]()
        unproved = proved = rounds = 0
        while min(unproved, proved) < num_frames // 2:
            if unproved < num_frames // 2:
                send_without_the_key(port, dice, frames)
                unproved += UNPROVED_AT_ONCE
            if proved < num_frames // 2:
                send_with_the_key(port, dice, frames)
                proved += port.at_once
            rounds += 1
            if rounds % 100 == 0:
                port.work()
                told |= texts(caplog)
            if rounds == 200:
                before = memory_bytes()[1]
        port.work()
        grown = memory_bytes()[1] - before if before else 0
    finally:
        port.close()
    print(
        f"{name}: {num_frames} frames in {time.monotonic() - started:.0f} s, grown by {grown >> 20} MiB",
        file=sys.stderr,
    )
    errors = told | texts(caplog)
    assert not errors, f"{len(errors)} exceptions that are no refusals, such as {sorted(errors)[:12]}"
    return grown


@pytest.mark.parametrize("name", PORTS)
def test_a_few_damaged_frames(name: str, caplog: pytest.LogCaptureFixture) -> None:
    attacked(name, 300, caplog)


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("name", PORTS)
def test_damaged_frames(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert FRAMES >= 4000, "memory is compared after 200 rounds"
    assert attacked(name, FRAMES, caplog) < GROWTH_BYTES
