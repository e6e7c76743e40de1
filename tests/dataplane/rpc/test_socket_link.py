"""The link over sockets keeps order, waits, keys and ends of either side, and parses frames. The server is a thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.directory import requests
from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.directory.requests import body_of
from headrace.dataplane.errors import ClaimTimeout, DataPlaneError, DataPlaneTimeout, DirectoryLost
from headrace.dataplane.factory import connect, connect_async
from headrace.dataplane.rpc import links, server
from headrace.dataplane.rpc.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    SERVICE,
    DirectoryAddress,
    FrameReader,
    frame,
    head,
    header,
)
from headrace.dataplane.rpc.socket_link import SocketLink
from headrace.dataplane.security.authenticated_listener import MAX_STRANGERS
from headrace.dataplane.security.handshake import HELLO_BYTES, new_key, prove_to_server
from headrace.tests.dataplane.rpc.served import Served
from headrace.tests.dataplane.security.far_end import prove_to_client
from headrace.tests.waiting import wait_until


def test_a_frame_of_a_mad_size_is_refused_before_it_is_buffered() -> None:
    reader = FrameReader()
    whole = frame(1, b"body", "put")
    with pytest.raises(ValueError, match="a frame of 1099511627776 bytes, expected 3 to 4294967296"):
        reader.feed(whole + header(1 << 40, 2, 3, 0) + b"put" + b"x" * 1000)
    assert len(reader) == 0
    assert reader.feed(whole) == [(1, "put", b"body")]


def test_a_message_that_no_reader_would_take_is_not_sent() -> None:
    assert len(head(1, b"", "put", raw_bytes=MAX_FRAME_BYTES - 3)) == HEADER_BYTES + 3
    with pytest.raises(ValueError, match="put: got a message of 4294967296 bytes, expected less"):
        head(1, b"", "put", raw_bytes=MAX_FRAME_BYTES)


KEY = new_key()
SCHEMA = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, (1000,)), Field("y", Kind.PER_SAMPLE, torch.float32)])


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def client(served: Served) -> Iterator[DataPlaneClient]:
    with connect(served.handle) as client:
        client.register("p", SCHEMA, ("a",))
        yield client


def put(client: DataPlaneClient, *keys: str) -> None:
    client.put("p", keys, {"x": torch.ones(len(keys), 1000, dtype=torch.uint8)})


def test_frames_come_whole_however_they_arrive() -> None:
    sent = [(1, "put", b"x" * 300), (2, "", b""), (4_000_000_000, "claim", b"yz")]
    data = b"".join(frame(number, body, op) for number, op, body in sent)
    for step in (1, 7, 100, len(data)):
        reader, found = FrameReader(), []
        for at in range(0, len(data), step):
            found += reader.feed(data[at : at + step])
        assert found == sent and len(reader) == 0


def test_a_waiting_claim_delays_no_other_call(served: Served, client: DataPlaneClient) -> None:
    waiting = [threading.Thread(target=client.claim, args=("p", "a", ("x",), 1)) for _ in range(8)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: client.status().waiting_claims == 8)
    started = time.monotonic()
    for _ in range(100):
        client.status()
    assert time.monotonic() - started < 2
    put(client, *(f"k.{n}" for n in range(8)))
    for thread in waiting:
        thread.join(5)
        assert not thread.is_alive()


def test_an_event_loop_has_one_connection_for_all_its_calls(served: Served, client: DataPlaneClient) -> None:
    async def use() -> None:
        async with connect_async(served.handle) as twin:
            claims = [asyncio.create_task(twin.claim("p", "a", ("x",), 1)) for _ in range(64)]
            await asyncio.sleep(0.05)
            assert (await twin.status()).waiting_claims == 64
            connections = len(served.server._sessions)
            await asyncio.gather(*(asyncio.to_thread(put, client, f"k.{n}") for n in range(64)))
            found = await asyncio.gather(*claims)
            assert sorted(meta.keys[0] for meta in found) == sorted(f"k.{n}" for n in range(64))
            assert connections <= 4, "one of each link's own, and one of this loop"

    asyncio.run(use())


def test_large_requests_and_replies(served: Served) -> None:
    with connect(served.handle) as client:
        wide = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, (1 << 20,))])
        client.register("wide", wide)
        values = torch.randint(0, 256, (9, 1 << 20), dtype=torch.uint8)
        receipt = client.put("wide", [f"k.{n}" for n in range(9)], {"x": values})
        assert torch.equal(client.get(receipt).tensor("x"), values)


def test_clients_of_other_hosts_come_over_tcp(served: Served) -> None:
    elsewhere = dataclasses.replace(served.address, local="no such name here")
    with connect(dataclasses.replace(served.handle, address=elsewhere)) as client:
        client.register("p", SCHEMA)
        put(client, "a.0")
        (connection,) = client._link._idle  # type: ignore[attr-defined]
        assert connection.family == socket.AF_INET
        assert client.lookup("p", ["a.0"]).fields == ("x",)


def test_who_does_not_know_the_key_is_refused(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DirectoryLost, match="is not the directory of this run: it does not know the run's key"):
        SocketLink(served.address, new_key(), "directory", connect_s=5)
    with socket.create_connection((served.address.host, served.address.port), 5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n" * 100)
        raw.settimeout(5)
        try:
            assert raw.recv(1) == b"", "no answer to who does not begin the handshake"
        except ConnectionResetError:
            pass
    wait_until(lambda: "refused" in caplog.text)
    assert repr(served.handle.store.key) not in repr(served.handle)


def test_closing_ends_strangers_and_clients_that_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a connection would be found by the garbage collector, long after the directory."""
    monkeypatch.setattr(server, "END_TIMEOUT_S", 0.2)
    served = Served()
    address = (served.address.host, served.address.port)
    strangers = [socket.create_connection(address, 5) for _ in range(50)]
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(address)
        prove_to_server(silent, served.handle.store.key, SERVICE, time.monotonic() + 5)
        silent.setblocking(False)
        asked = b"".join(frame(number, b"", "no such operation") for number in range(1, 40_000))
        while asked:
            try:
                asked = asked[silent.send(asked) :]
            except BlockingIOError:
                time.sleep(0.001)
        wait_until(lambda: any(one._transport.get_write_buffer_size() > 0 for one in served.server._sessions))
        served.close()
        assert not served.server._sessions
    for stranger in strangers:
        stranger.close()


def test_the_end_of_the_directory_ends_every_call_at_once(served: Served, client: DataPlaneClient) -> None:
    failed: list[DirectoryLost] = []

    def claim() -> None:
        try:
            client.claim("p", "a", ("x",), 1)
        except DirectoryLost as error:
            failed.append(error)

    thread = threading.Thread(target=claim)
    thread.start()

    async def claim_async() -> None:
        async with connect_async(served.handle) as twin:
            task = asyncio.create_task(twin.claim("p", "a", ("x",), 1))
            await asyncio.sleep(0.05)
            served.loop.call_soon_threadsafe(abort)
            started = time.monotonic()
            with pytest.raises(DirectoryLost, match="pid=7"):
                await task
            assert time.monotonic() - started < 1

    def abort() -> None:
        for listener in served.server._servers:
            listener.close()
        for session in list(served.server._sessions):
            session._transport.abort()

    wait_until(lambda: client.status().waiting_claims == 1)
    asyncio.run(claim_async())
    thread.join(2)
    assert "claim" in str(failed[0]) and "pid=7" in str(failed[0]) and failed[0].elapsed_s is not None
    with pytest.raises(DirectoryLost):
        client.status()
    with pytest.raises(DirectoryLost, match="connect"):
        connect(served.handle)


def test_a_directory_that_does_not_answer_is_lost_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GRACE_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # a name of the system's choice
        listener.listen()
        address = DirectoryAddress(listener.getsockname()[1:].decode(), "", 0)
        link = SocketLink(address, KEY, "directory pid=7", connect_s=None)
        started = time.monotonic()
        with pytest.raises(DirectoryLost, match="did not answer.*pid=7"):
            link.call("status", b"", 0.1)

        async def ask() -> None:
            with pytest.raises(DirectoryLost, match="did not answer"):
                await link.call_async("status", b"", 0.1)
            await link.detach_async()

        asyncio.run(ask())
        assert 0.3 < time.monotonic() - started < 2


def test_a_reply_that_the_time_limit_cuts_off_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GRACE_S", 0.1)
    near, far = socket.socketpair()
    with near, far:
        monkeypatch.setattr(SocketLink, "_connect", lambda *_: near)
        link = SocketLink(DirectoryAddress("nowhere", "", 0), KEY, "directory pid=7", connect_s=None)
        far.sendall(header(100, 1, 0, 0) + bytes(10))
        with pytest.raises(DataPlaneTimeout, match="ended after 10 of 100 bytes of the directory's reply.*op=status"):
            link.call("status", b"", 0.1)


def test_what_a_client_waits_for_ends_with_its_connection(served: Served, client: DataPlaneClient) -> None:
    dying = connect(served.handle)
    link: Any = dying._link
    (connection,) = link._idle
    connection.sendall(frame(1, requests.encode(requests.Claim(ClaimRows("p", "a", ("x",), 1), 60.0)), "claim"))
    wait_until(lambda: client.status().waiting_claims == 1)
    dying.close()
    wait_until(lambda: client.status().waiting_claims == 0)
    put(client, "a.0")
    assert client.claim("p", "a", ("x",), 1, timeout_s=1).keys == ("a.0",)
    with pytest.raises(DirectoryLost, match="this client is closed"):
        dying.status()


# ------------------------------------------------------------------ connections that end, and full backlogs


def test_a_broken_connection_is_not_a_death(served: Served, client: DataPlaneClient) -> None:
    link: Any = client._link
    for connection in link._idle:
        connection.shutdown(socket.SHUT_RDWR)
    assert client.status().rows == 0

    async def use() -> None:
        async with connect_async(served.handle) as twin:
            await twin.status()
            link: Any = twin._link
            (channel,) = link._channels.values()
            channel._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # as a reset by a middlebox
            assert (await twin.status()).rows == 0
            (channel,) = link._channels.values()
            channel._transport.abort()
            await asyncio.sleep(0)
            assert (await twin.status()).rows == 0

    asyncio.run(use())


def test_a_pooled_connection_that_the_other_side_closed_is_not_used(served: Served) -> None:
    """Over TCP, what is sent to a closed end is lost without an error."""
    elsewhere = dataclasses.replace(served.address, local="no such name here")
    with connect(dataclasses.replace(served.handle, address=elsewhere)) as client:
        assert client.status().rows == 0
        (session,) = served.server._sessions
        served.loop.call_soon_threadsafe(session._transport.close)
        wait_until(lambda: not served.server._sessions)
        assert client.status().rows == 0


def test_connections_over_tcp_are_kept_alive(served: Served) -> None:
    elsewhere = dataclasses.replace(served.address, local="no such name here")

    async def use() -> None:
        async with connect_async(dataclasses.replace(served.handle, address=elsewhere)) as twin:
            await twin.status()
            link: Any = twin._link
            (channel,) = link._channels.values()
            (session,) = served.server._sessions
            for transport in (channel._transport, session._transport):
                end = transport.get_extra_info("socket")
                assert end.family == socket.AF_INET
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0

    asyncio.run(use())


def full_listener() -> tuple[socket.socket, DirectoryAddress]:
    """A Unix socket whose backlog is full, and its address."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # a name of the system's choice
    listener.listen(0)
    name = listener.getsockname()
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(name)
    return listener, DirectoryAddress(name[1:].decode(), "", 0)


def test_a_connect_waits_while_the_backlog_is_full() -> None:
    listener, address = full_listener()
    connected: list[SocketLink] = []
    thread = threading.Thread(target=lambda: connected.append(SocketLink(address, KEY, "directory", connect_s=10)))
    thread.start()
    with listener:
        listener.settimeout(10)
        accepted = [listener.accept()[0] for _ in range(2)]  # the one that fills the backlog, and the link's
        prove_to_client(accepted[1], KEY, SERVICE)
        thread.join(10)
        for connection in accepted:
            connection.close()
    assert connected
    connected[0].detach()


def test_a_connect_on_a_full_backlog_ends_in_time_and_blocks_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GRACE_S", 0.1)
    listener, address = full_listener()
    with listener:
        with pytest.raises(DirectoryLost, match="did not answer"):
            SocketLink(address, KEY, "directory", connect_s=0.3)

        async def use() -> None:
            link = SocketLink(address, KEY, "directory", connect_s=None)
            asking = asyncio.create_task(link.call_async("status", b"", 0.3))
            ticks = 0
            while not asking.done():
                await asyncio.sleep(0.005)
                ticks += 1
            with pytest.raises(DirectoryLost, match="did not answer"):
                await asking
            assert ticks > 5
            await link.detach_async()

        asyncio.run(use())


@pytest.mark.long
def test_many_clients_connect_while_the_directory_is_busy(served: Served) -> None:
    connected: list[SocketLink] = []

    def connect_one() -> None:
        connected.append(SocketLink(served.address, served.handle.store.key, "directory", connect_s=60))

    threads = [threading.Thread(target=connect_one) for _ in range(1200)]
    with served.stalled():
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(60)
    assert len(connected) == 1200
    for link in connected:
        link.detach()


def test_refusals_fill_no_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        with socket.create_connection((served.address.host, served.address.port), 30) as stranger:
            stranger.sendall(bytes(HELLO_BYTES))
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    assert 1 <= caplog.text.count("a connection to the directory was refused") < 25


def test_strangers_are_few_and_keep_nobody_out(served: Served, client: DataPlaneClient) -> None:
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    for stranger in strangers:
        stranger.connect("\0" + served.address.local)
    wait_until(lambda: len(served.server._strangers) <= MAX_STRANGERS and len(served.server._sessions) > MAX_STRANGERS)
    strangers[0].settimeout(10)
    assert strangers[0].recv(1) == b"", "the oldest is closed long before its ten seconds"
    with connect(served.handle) as other:
        assert other.status().rows == client.status().rows == 0
    for stranger in strangers:
        stranger.close()


# ------------------------------------------------------------------ bugs


def test_a_bug_in_the_directory_is_told_not_waited_for(
    served: Served, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served.service, "_directory", None)
    with pytest.raises(DataPlaneError, match="the directory failed: AttributeError"):
        body_of(client._link.call("lookup", requests.encode(requests.Lookup("p", b"", None)), 5), "lookup", 0.0)
    assert "AttributeError" in caplog.text
    monkeypatch.undo()
    with pytest.raises(ClaimTimeout):
        client.claim("p", "a", ("y",), 1, timeout_s=0.01)
