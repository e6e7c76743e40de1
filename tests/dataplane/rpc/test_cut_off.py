"""Calls that are cut off (cancelled, interrupted, out of time) leave nothing leased, reserved or readable."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.directory import requests
from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.errors import DirectoryLost
from headrace.dataplane.factory import connect, connect_async, open_data_plane
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.rpc import links, socket_link
from headrace.dataplane.rpc.frames import SERVICE, frame
from headrace.dataplane.rpc.shared_channel import SharedChannel
from headrace.dataplane.security.handshake import prove_to_server
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.rpc.served import Served, config
from headrace.tests.waiting import wait_until

SCHEMA = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, (1 << 20,)), Field("y", Kind.PER_SAMPLE, torch.float32)])
"""A field of 1 MiB per row, and a small one."""
STORE = {"kind": "shm", "capacity_mib": 8}


def rows(count: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(count, 1 << 20, dtype=torch.uint8)}


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(store=STORE)
    yield served
    served.close()


@pytest.fixture(params=["over sockets", "in process"])
def handle(request: pytest.FixtureRequest) -> Iterator[DataPlaneHandle]:
    """A data plane of 8 MiB, reached over either link."""
    if request.param == "over sockets":
        yield request.getfixturevalue("served").handle
    else:
        with open_data_plane(config(store=STORE), run_id=fresh_run_id(), in_process=True) as plane:
            yield plane.handle


@pytest.fixture
def client(handle: DataPlaneHandle) -> Iterator[DataPlaneClient]:
    with connect(handle) as client:
        client.register("p", SCHEMA, ("a",))
        yield client


@pytest.fixture
def far(served: Served) -> Iterator[DataPlaneClient]:
    """A client over sockets."""
    with connect(served.handle) as client:
        client.register("p", SCHEMA, ("a",))
        yield client


def nothing_is_held(client: DataPlaneClient) -> bool:
    status = client.status()
    return not (status.leases or status.bytes_reserved or status.waiting_claims or status.waiting_puts)


# ------------------------------------------------------------------ while the directory waits


def test_cancelled_claims_leave_their_queue(handle: DataPlaneHandle, client: DataPlaneClient) -> None:
    async def use() -> None:
        async with connect_async(handle) as twin:
            for _ in range(3):
                task = asyncio.create_task(twin.claim("p", "a", ["y"], 4, timeout_s=30))
                await asyncio.to_thread(wait_until, lambda: client.status().waiting_claims == 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert client.status().waiting_claims == 0
            client.put("p", [f"k.{n}" for n in range(12)], {"y": torch.zeros(12)})
            assert client.status().leased_rows == 0
            assert len(await twin.claim("p", "a", ["y"], 12, timeout_s=5)) == 12

    asyncio.run(use())


def test_a_cancelled_put_leaves_the_queue_for_room(handle: DataPlaneHandle, client: DataPlaneClient) -> None:
    client.put("p", [f"a.{n}" for n in range(7)], rows(7))

    async def use() -> None:
        async with connect_async(handle) as twin:
            task = asyncio.create_task(twin.put("p", [f"b.{n}" for n in range(6)], rows(6), timeout_s=30))
            await asyncio.to_thread(wait_until, lambda: client.status().waiting_puts == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.status().waiting_puts == 0

    asyncio.run(use())
    client.put("p", ["c.0"], {"y": torch.zeros(1)}, timeout_s=5)
    client.clear("p")
    client.put("p", [f"d.{n}" for n in range(6)], rows(6), timeout_s=5)


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt also where a shell that started the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def waits_for_its_answer() -> bool:
    """Return whether a blocking call of the main thread has sent its request and waits, over either link."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        if frame.f_code.co_name in ("_receive", "result"):
            return True
        frame = frame.f_back
    return False


def interrupt_when(ready: Callable[[], bool]) -> threading.Thread:
    """Press Ctrl-C, so to speak, once `ready` and the main thread waits. A request that is interrupted before costs the
    connection, because it is unknown how much of it was sent."""

    def press() -> None:
        wait_until(lambda: ready() and waits_for_its_answer())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupted_claim_leaves_its_queue(handle: DataPlaneHandle, client: DataPlaneClient) -> None:
    with connect(handle) as other:
        thread = interrupt_when(lambda: other.status().waiting_claims == 1)
        with pytest.raises(KeyboardInterrupt):
            client.claim("p", "a", ["y"], 4, timeout_s=30)
        thread.join()
        assert client.status().waiting_claims == 0
        client.put("p", [f"k.{n}" for n in range(4)], {"y": torch.zeros(4)})
        assert client.status().leased_rows == 0
        assert len(client.claim("p", "a", ["y"], 4, timeout_s=5)) == 4


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), -1])
def test_time_limits_are_finite(client: DataPlaneClient, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="finite number of seconds >= 0"):
        client.claim("p", "a", ["y"], 1, timeout_s=timeout_s)
    client.put("p", ["a.0"], {"y": torch.zeros(1)})
    assert nothing_is_held(client)


# ------------------------------------------------------------------ after the directory has acted


OPS = {
    "claim": (
        lambda twin: twin.claim("p", "a", ["y"], 4),
        lambda client: client.status().leased_rows == 4,
    ),
    "reserve": (
        lambda twin: twin.put("p", ["k.0"], rows(1)),
        lambda client: client.status().bytes_reserved > 0,
    ),
    "commit": (
        lambda twin: twin.put("p", ["k.0"], rows(1)),
        lambda client: client.status().rows == 5,
    ),
}
"""Op -> (the call that asks it, whether the directory has carried it out)."""


@pytest.mark.parametrize("late", [False, True], ids=["the answer comes", "the answer comes late"])
@pytest.mark.parametrize("op", OPS)
def test_what_was_granted_to_a_cancelled_call_is_given_back(
    served: Served, far: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, op: str, late: bool
) -> None:
    """The directory's answers are held back, so that it has acted when the call is cancelled."""
    far.put("p", [f"old.{n}" for n in range(4)], {"y": torch.zeros(4)})
    call, has_acted = OPS[op]
    held: list[tuple[Any, bytes]] = []
    is_held, asked, received = False, SharedChannel.ask, SharedChannel.data_received

    def ask(channel: Any, *request: Any) -> Any:
        nonlocal is_held
        is_held |= op in (request[0], getattr(request[0], "op", ""))
        return asked(channel, *request)

    def receive(channel: Any, data: bytes) -> None:
        if is_held:
            held.append((channel, data))
        else:
            received(channel, data)

    monkeypatch.setattr(SharedChannel, "ask", ask)
    monkeypatch.setattr(SharedChannel, "data_received", receive)
    if late:
        monkeypatch.setattr(links, "GRACE_S", 0.25)
        monkeypatch.setattr("headrace.dataplane.client.operations.ABORT_TIMEOUT_S", 0.1)

    async def use() -> None:
        nonlocal is_held
        async with connect_async(served.handle) as twin:
            task = asyncio.create_task(call(twin))
            await asyncio.to_thread(wait_until, lambda: has_acted(far))
            task.cancel()
            if late:
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await asyncio.sleep(0)
            is_held = False
            monkeypatch.undo()
            for channel, data in held:
                channel.data_received(data)
            if not late:
                with pytest.raises(asyncio.CancelledError):
                    await task
            await asyncio.to_thread(wait_until, lambda: nothing_is_held(far))
            assert far.status().rows == 4, "nothing of the put can be read"
            assert len(await twin.claim("p", "a", ["y"], 4, timeout_s=5)) == 4
            assert len(await twin.put("p", ["k.0"], rows(1), timeout_s=5)) == 1

    asyncio.run(use())


def test_fields_of_a_cancelled_put_go_and_rows_of_before_stay(handle: DataPlaneHandle, client: DataPlaneClient) -> None:
    client.put("p", ["a.0", "a.1"], {"y": torch.ones(2)})
    link: Any = client._link
    called = link.call

    def call(op: str, *arguments: Any) -> bytes:
        reply = called(op, *arguments)
        if op == "commit":
            assert status_rows() == 3
            raise KeyboardInterrupt
        return reply

    def status_rows() -> int:
        with connect(handle) as other:
            return other.status().rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "call", call)
        with pytest.raises(KeyboardInterrupt):
            client.put("p", ["a.1", "b.0"], rows(2))
    assert sorted(client.lookup("p", ["a.0", "a.1"], ["y"]).keys) == ["a.0", "a.1"]
    status = client.status()
    assert status.rows == 2 and status.ready == {"x": 0, "y": 2}
    client.put("p", ["a.1", "b.0"], rows(2))


# ------------------------------------------------------------------ stalls


@pytest.mark.long
def test_calls_that_failed_in_a_stall_take_no_effect_afterwards(
    served: Served, far: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.put("p", ["old.0"], {"y": torch.ones(1)})
    far.put("p", ["old.1"], {"y": torch.ones(1)})  # from now on it has credit: a put is one call
    monkeypatch.setattr(links, "GRACE_S", 0.3)
    monkeypatch.setattr("headrace.dataplane.client.operations.ABORT_TIMEOUT_S", 0.1)
    errors: list[DirectoryLost] = []

    def fails(call: Callable[..., Any], *arguments: Any) -> threading.Thread:
        def run() -> None:
            # What needs a connection of its own is not sent at all, as the directory does not answer the handshake.
            with pytest.raises(DirectoryLost, match="did not answer( .op|; it is not known whether)") as caught:
                call(*arguments, timeout_s=0.1)
            errors.append(caught.value)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    async def twin_fails() -> None:
        async with connect_async(served.handle) as twin:
            await twin.status()
            with served.stalled():
                for thread in (
                    fails(far.put, "p", ["new.0"], {"y": torch.ones(1)}),
                    fails(far.claim, "p", "a", ["y"], 2),
                    fails(far.clear, "p"),
                ):
                    thread.join(10)
                with pytest.raises(DirectoryLost, match="it is not known whether"):
                    await twin.claim("p", "a", ["y"], 1, timeout_s=0.1)
            monkeypatch.undo()
            await asyncio.to_thread(wait_until, lambda: nothing_is_held(far))
            assert (await twin.status()).rows == 2

    asyncio.run(twin_fails())
    assert {error.op for error in errors} == {"put", "claim", "clear"}
    assert far.put("p", ["new.0"], {"y": torch.ones(1)}).keys == ("new.0",)
    assert len(far.claim("p", "a", ["y"], 3, timeout_s=5)) == 3


def test_a_call_that_cannot_be_undone_says_that_it_took_effect(
    served: Served, far: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is carried out, but its answer comes after its time, while the client waits for it to be cancelled."""
    far.put("p", ["a.0"], {"y": torch.ones(1)})
    receive, late = socket_link._receive, [True]

    def receive_late(*arguments: Any) -> bytes:
        if late:
            late.clear()
            with connect(served.handle) as other:
                wait_until(lambda: other.status().rows == 0)
            raise TimeoutError
        return receive(*arguments)

    monkeypatch.setattr(socket_link, "_receive", receive_late)
    with pytest.raises(DirectoryLost, match="did not answer; the call took effect .op=clear"):
        far.clear("p")
    assert far.status().rows == 0


def test_a_call_in_the_process_that_cannot_be_undone_says_that_it_took_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, abandon = threading.Event(), links._Call.abandon

    def open_and_abandon(call: links._Call) -> None:
        gate.set()
        abandon(call)

    with (
        open_data_plane(config(store=STORE), run_id=fresh_run_id(), in_process=True) as plane,
        connect(plane.handle) as client,
    ):
        client.register("p", SCHEMA, ("a",))
        monkeypatch.setattr(links._Call, "abandon", open_and_abandon)
        monkeypatch.setattr(links, "call_s", lambda timeout_s: 0.05)
        link: Any = client._link
        link._loop.call_soon_threadsafe(gate.wait)
        with pytest.raises(DirectoryLost, match="did not answer; the call took effect .op=unregister"):
            client.unregister("p")
        monkeypatch.undo()
        assert "p" not in client.status().partitions


def test_requests_of_a_client_that_has_gone_are_dropped(served: Served, far: DataPlaneClient) -> None:
    """As after a stall, in which a client died: its request and the end of its connection lie in the socket."""
    far.put("p", ["a.0", "a.1"], {"y": torch.ones(2)})
    claim = requests.encode(requests.Claim(ClaimRows("p", "a", ("y",), 2), 60.0))
    connections = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for connection in connections:
        connection.connect("\0" + served.address.local)
        prove_to_server(connection, served.handle.store.key, SERVICE, time.monotonic() + 10)
    with served.stalled():
        for op, payload in (("claim", claim), ("clear", requests.encode(requests.SomeRows("p", None)))):
            with connections.pop() as gone:
                gone.sendall(frame(1, payload, op))
    wait_until(lambda: len(served.server._sessions) == 1)
    status = far.status()
    assert (status.rows, status.leases, status.waiting_claims) == (2, 0, 0)


@pytest.mark.parametrize("replace", [False, True])
def test_a_put_whose_connection_breaks_is_taken_back(
    far: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    """The directory has committed it, and the answer does not come."""
    sent: list[str] = []
    really_send, really_receive = socket_link._send, socket_link._receive

    def send(connection: Any, number: int, op: str, *rest: Any) -> None:
        sent.append(op)
        really_send(connection, number, op, *rest)

    def receive(connection: Any, *rest: Any) -> bytes:
        reply = really_receive(connection, *rest)
        if sent[-1] == "commit":
            connection.close()
            raise ConnectionResetError
        return reply

    monkeypatch.setattr(socket_link, "_send", send)
    monkeypatch.setattr(socket_link, "_receive", receive)
    words = "; it is not known whether the put took effect .op=put" if replace else "closed the connection .op"
    with pytest.raises(DirectoryLost, match=words):
        far.put("p", ["k.0"], {"y": torch.ones(1)}, replace=replace)
    assert far.status().rows == replace, "values that were replaced could not be brought back"


def test_a_put_waits_once_for_a_directory_that_stands_still(
    served: Served, far: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):  # so that it has space in advance
        far.put("p", [f"a.{number}"], {"y": torch.ones(1)})
    monkeypatch.setattr(links, "GRACE_S", 1.0)
    monkeypatch.setattr("headrace.dataplane.client.operations.ABORT_TIMEOUT_S", 0.5)
    with served.stalled():
        started = time.monotonic()
        with pytest.raises(DirectoryLost, match="not known whether the put took effect") as caught:
            far.put("p", ["b.0"], {"y": torch.ones(1)}, timeout_s=0.1)
        waited = time.monotonic() - started
    assert waited < 2.2, "0.1 s, the grace, and half a second for the attempt to undo it"
    assert caught.value.elapsed_s is not None and 0 <= waited - caught.value.elapsed_s < 0.9, "it counts the grace, too"


def test_a_late_answer_meets_no_other_request(
    served: Served, far: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.put("p", ["a.0"], {"y": torch.ones(1)})
    monkeypatch.setattr(links, "GRACE_S", 0.2)
    sent, receive, found = threading.Event(), socket_link._receive, []

    def waits(*arguments: Any) -> bytes:
        sent.set()
        return receive(*arguments)

    thread = threading.Thread(target=lambda: found.append(far.lookup("p", ["a.0"], ["y"]).keys))
    link: Any = far._link
    link._idle.insert(0, link._connect("connect", time.monotonic() + 10))  # for the next request
    with served.stalled():
        with pytest.raises(DirectoryLost, match="did not answer"):
            far.status(timeout_s=0.1)
        monkeypatch.undo()
        monkeypatch.setattr(socket_link, "_receive", waits)
        thread.start()
        assert sent.wait(10), "the next request is sent before the late answer"
    thread.join(10)
    assert found == [("a.0",)]
    for _ in range(3):
        assert far.lookup("p", ["a.0"], ["y"]).keys == ("a.0",)


def test_requests_whose_cancellation_came_with_them_are_not_carried_out(served: Served, far: DataPlaneClient) -> None:
    """The request and its cancellation are both in the socket when the directory reads it, as after a stall."""

    async def use() -> None:
        async with connect_async(served.handle) as twin:
            await twin.status()
            with served.stalled():
                task = asyncio.create_task(twin.register("q", SCHEMA))
                await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.sleep(0.01)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert "q" not in (await twin.status()).partitions

    asyncio.run(use())


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupted_call_keeps_its_connection(served: Served, far: DataPlaneClient) -> None:
    link: Any = far._link
    (before,) = link._idle
    with connect(served.handle) as other:
        thread = interrupt_when(lambda: other.status().waiting_claims == 1)
        with pytest.raises(KeyboardInterrupt):
            far.claim("p", "a", ["y"], 4, timeout_s=30)
        thread.join()
    assert link._idle == [before]
    assert far.status().rows == 0
