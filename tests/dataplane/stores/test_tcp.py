"""The store `tcp`: units that stop, die, fill up or are attacked; bytes that move; processes that fork."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.block_store import StoreSpec, holder_of
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import CapacityExceeded, DataPlaneTimeout, IntegrityError, RowsCleared, StoreLost
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.rpc.frames import header
from headrace.dataplane.security.authenticated_listener import listen
from headrace.dataplane.security.handshake import new_key
from headrace.dataplane.stores.tcp.link import UnitDied, UnitLink
from headrace.dataplane.stores.tcp.unit import StorageUnit
from headrace.dataplane.stores.tcp.wire import (
    ENDING,
    LOCAL_BUFFER_BYTES,
    STILL,
    SUM,
    Connection,
    Cut,
    Fill,
    Free,
    Get,
    Put,
    Reserve,
    column,
    encode,
    locations,
    raw_checksum,
)
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.process_pool import kill, suspend
from headrace.tests.waiting import wait_until

KEY = new_key()
SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("image", Kind.RAGGED, torch.uint8, ndim=2)])


@pytest.fixture
def unit() -> Iterator[StorageUnit]:
    """A unit in this process, with room for 1 MiB."""
    unit = StorageUnit(fresh_run_id(), "unit-0", KEY, "127.0.0.1", 1 << 20)
    yield unit
    unit.close()


@pytest.fixture
def link(unit: StorageUnit) -> Iterator[UnitLink]:
    link = UnitLink(unit.address, KEY)
    yield link
    link.close()


def soon() -> float:
    return time.monotonic() + 10


def put(link: UnitLink, block_id: int, *blocks: bytes, wait_s: float = 0.0) -> tuple[bytes, ...]:
    request = encode(Put(block_id, tuple(len(block) for block in blocks), wait_s))
    return locations(link.ask("put", "put", request, [memoryview(block) for block in blocks], soon()))


def get(link: UnitLink, *ranges: tuple[int, int, int], check: bool = False) -> bytes:
    """Read (block id, first byte, bytes) each. With `check`, both ends compute a checksum of the bytes meanwhile."""
    ids = sorted({block_id for block_id, _, _ in ranges})
    block = column([ids.index(block_id) for block_id, _, _ in ranges])
    request = Get(column(ids), block, column([at for _, at, _ in ranges]), column([n for _, _, n in ranges]), check)
    with link.answer(link.send("get", "get", encode(request), (), soon())) as (connection, _, raw_bytes):
        data, ending = bytearray(raw_bytes - ENDING.size), bytearray(ENDING.size)
        pieces = [memoryview(data)[:1000], memoryview(data)[1000:]]
        checksum = connection.receive_summed(pieces, soon())
        connection.receive_into([memoryview(ending)], soon())
    assert checksum == raw_checksum([memoryview(data)])
    assert ENDING.unpack(ending) == (STILL, checksum if check else 0)
    return bytes(data)


def free(link: UnitLink, *block_ids: int) -> None:
    link.ask("clear", "free", encode(Free(column(block_ids))), (), soon())


# ------------------------------------------------------------------ one unit


def test_a_unit_gives_back_any_ranges_in_the_order_asked_for(unit: StorageUnit, link: UnitLink) -> None:
    blocks = [bytes([number]) * 64 + bytes(range(64)) for number in range(3)]
    assert len(set(put(link, 7, *blocks))) == 3
    ranges = [(9, 64, 64), (7, 0, 1), (8, 127, 1), (7, 0, 1), (8, 5, 0)]
    assert get(link, *ranges) == bytes(range(64)) + b"\0" + b"\x3f" + b"\0"


@pytest.mark.parametrize("check", [False, True])
def test_a_thousand_ranges_and_more_take_several_calls_and_come_whole(
    unit: StorageUnit, link: UnitLink, check: bool
) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 << 18, dtype=np.uint8).tobytes()
    put(link, 1, data)
    starts = np.random.default_rng(1).integers(0, (1 << 18) - 300, 5000).tolist()
    ranges = [(1, start, 300) for start in starts]
    assert get(link, *ranges, check=check) == b"".join(data[at : at + 300] for at in starts)
    assert get(link, (1, 7, (1 << 18) - 7), (1, 0, 1 << 18), check=check) == data[7:] + data


def test_freed_blocks_are_gone_and_their_room_is_used_again(unit: StorageUnit, link: UnitLink) -> None:
    for number in range(100):
        put(link, number, bytes(1 << 19))
        free(link, number)
    with pytest.raises(RowsCleared, match="block 7 was freed"):
        get(link, (7, 0, 1))


def test_a_block_that_was_deleted_before_it_came_is_refused(unit: StorageUnit, link: UnitLink) -> None:
    free(link, 5, 6)
    with pytest.raises(RowsCleared, match="block 6 was freed before it was written"):
        put(link, 6, bytes(64))
    with pytest.raises(RowsCleared, match="block 5 was freed before"):
        put(link, 4, bytes(64), bytes(64))
    assert unit._pool.usage_bytes() == 0
    put(link, 7, bytes(64))


def test_a_put_waits_for_room_and_says_why_there_is_none(unit: StorageUnit, link: UnitLink) -> None:
    number = 0
    with pytest.raises(CapacityExceeded, match="largest free range"):
        for number in range(100):
            put(link, number, bytes(1 << 20))
    other = UnitLink(unit.address, KEY)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(put, link, 200, bytes(1 << 20), wait_s=10.0)
        free(other, 0)
        assert len(waiting.result(10)) == 1
    other.close()
    assert number > 15


def test_a_writer_on_the_host_asks_for_room_and_cuts_it(unit: StorageUnit, link: UnitLink) -> None:
    room = link.ask("put", "reserve", encode(Reserve(3, 256, 0.0)), (), soon())
    unit._memory.put(3, room, [np.full(200, 9, np.uint8)], [0], 1.0)
    link.ask("put", "cut", encode(Cut(3, (128, 64))), (), soon())
    assert get(link, (4, 0, 64)) == bytes([9]) * 64 and unit._pool.usage_bytes() == 192
    free(link, 3)
    with pytest.raises(RowsCleared, match="block 3 was freed before it was written"):
        link.ask("put", "cut", encode(Cut(3, (64,))), (), soon())


def test_bytes_that_were_overwritten_while_they_were_sent_are_not_used(
    unit: StorageUnit, link: UnitLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(link, 1, bytes(64))
    places, asked = unit._pool.places, []

    def then_freed(block_ids: list[int]) -> Any:
        asked.append(block_ids)
        if len(asked) == 2:
            unit._pool.free(1, b"")
        return places(block_ids)

    monkeypatch.setattr(unit._pool, "places", then_freed)
    with pytest.raises(AssertionError):
        get(link, (1, 0, 64))


def test_a_client_that_dies_within_a_put_leaves_no_bytes(unit: StorageUnit, link: UnitLink) -> None:
    connection = link._connected(soon())
    request = encode(Put(1, (1 << 16,), 0.0))
    connection.send("put", request, [memoryview(bytes(1000))], soon(), later_bytes=(1 << 16) - 1000)
    wait_until(lambda: unit._pool.usage_bytes() > 0)
    connection.close()
    wait_until(lambda: unit._pool.usage_bytes() == 0)


def begun_fill(link: UnitLink, start: int, nbytes: int, sent: int) -> Connection:
    """A connection over which the first bytes of a part of the room of block 1 were sent, and not the rest."""
    connection = link._connected(soon())
    request = encode(Fill(1, start))
    connection.send("fill", request, [memoryview(bytes(sent))], soon(), later_bytes=nbytes - sent)
    return connection


def test_room_that_is_filled_by_several_connections_is_not_used_again_before_the_last(
    unit: StorageUnit, link: UnitLink
) -> None:
    size = 1 << 16
    link.ask("put", "reserve", encode(Reserve(1, 2 * size, 0.0)), (), soon())
    late = begun_fill(link, size, size, 1000)
    wait_until(lambda: len(unit._memory._marks) == 1)
    link.ask("put", "fill", encode(Fill(1, 0)), [memoryview(bytes([7]) * size)], soon())
    free(link, 1)
    assert unit._pool.unfreed_bytes() == 2 * size, "the other connection is still writing"
    late.send_raw([memoryview(bytes(size - 1000))], soon())
    reply = late.receive(soon())
    assert reply is not None and reply[0] == "freed" and unit._pool.usage_bytes() == 0 and not unit._memory._marks
    late.close()
    with pytest.raises(RowsCleared, match="block 1 was freed before it was written"):
        link.ask("put", "fill", encode(Fill(1, 0)), [memoryview(bytes(64))], soon())


def test_a_part_that_is_sent_again_over_another_connection_is_kept(unit: StorageUnit, link: UnitLink) -> None:
    size = 1 << 16
    link.ask("put", "reserve", encode(Reserve(1, size, 0.0)), (), soon())
    broken = begun_fill(link, 0, size, 1000)
    wait_until(lambda: len(unit._memory._marks) == 1)
    link.ask("put", "fill", encode(Fill(1, 0)), [memoryview(bytes([7]) * size)], soon())
    link.ask("put", "cut", encode(Cut(1, (size,))), (), soon())
    broken.close()  # The unit may notice only now that the client has left it.
    wait_until(lambda: not unit._memory._marks)
    assert get(link, (1, size - 64, 64)) == bytes([7]) * 64
    free(link, 1)
    assert unit._pool.usage_bytes() == unit._pool.unfreed_bytes() == 0


def test_a_lack_of_slots_is_a_lack_of_room(unit: StorageUnit, link: UnitLink, monkeypatch: pytest.MonkeyPatch) -> None:
    link.ask("put", "reserve", encode(Reserve(1, 128, 0.0)), (), soon())
    monkeypatch.setattr(unit._pool, "_take_slot", lambda: None)
    with pytest.raises(CapacityExceeded, match="no slots for 2 blocks"):
        link.ask("put", "cut", encode(Cut(1, (64, 64))), (), soon())
    assert unit._pool.usage_bytes() == 0


@pytest.mark.parametrize("op", ["put", "fill"])
def test_bytes_whose_checksum_does_not_fit_are_not_kept(unit: StorageUnit, link: UnitLink, op: str) -> None:
    request = encode(Put(1, (64,), 0.0, True) if op == "put" else Fill(1, 0, True))
    if op == "fill":
        link.ask("put", "reserve", encode(Reserve(1, 64, 0.0)), (), soon())
    wrong = [memoryview(bytes(64)), memoryview(SUM.pack(raw_checksum([memoryview(bytes(64))]) ^ 1))]
    with pytest.raises(IntegrityError, match="the bytes of a put were damaged on the way"):
        link.ask("put", op, request, wrong, soon())
    if op == "fill":  # Another part may be sent again, so the end of the put frees the room.
        free(link, 1)
    assert unit._pool.usage_bytes() == 0


def test_requests_that_are_not_valid_end_the_connection_and_nothing_else(unit: StorageUnit, link: UnitLink) -> None:
    put(link, 1, bytes(64))
    far = 1 << 62
    for op, request in (
        ("get", encode(Get(column([1]), column([0]), column([1]), column([64])))),
        ("get", encode(Get(column([1]), column([0]), column([far]), column([far])))),
        ("get", encode(Get(column([1]), column([-1]), column([0]), column([1])))),
        ("get", encode(Get(column([1]), column([0, 0]), column([0]), column([1])))),
        ("get", encode(Get(b"123", b"", b"", b""))),
        ("put", encode(Put(2, (64,), 0.0))),
        ("put", encode(Put(2, (0,), 0.0))),
        ("put", encode(Put(2, (), 0.0))),
        ("reserve", encode(Reserve(-27, 64, 0.0))),
        ("reserve", encode(Reserve(2, -1, 0.0))),
        ("reserve", encode(Reserve(2, 64, float("nan")))),
        ("reserve", encode(Reserve(1 << 63, 64, 0.0))),
        ("fill", encode(Fill(1, 128))),
        ("fill", encode(Fill(1, -1))),
        ("fill", encode(Fill(1, 0, True))),
        ("cut", encode(Cut(1, (64, 64)))),
        ("cut", encode(Cut(1, (63,)))),
        ("free", b"\xc1"),
        ("os.system", b""),
    ):
        with pytest.raises(StoreLost, match="unit-0"):
            link.ask("get", op, request, (), soon())
    assert get(link, (1, 0, 64)) == bytes(64) and unit._pool.usage_bytes() == 64


# ------------------------------------------------------------------ strangers


def test_who_does_not_know_the_key_gets_nothing(unit: StorageUnit) -> None:
    with pytest.raises(StoreLost, match="is not the storage unit of this run: it does not know the run's key"):
        put(UnitLink(unit.address, new_key()), 1, bytes(64))


def test_a_client_that_is_closed_while_it_connects_leaves_no_connection(unit: StorageUnit, link: UnitLink) -> None:
    connects, connections = link._connected, []

    def closed_meanwhile(deadline: float) -> Connection:
        connections.append(connects(deadline))
        link.close()
        return connections[0]

    link._connected = closed_meanwhile  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StoreLost, match="this client is closed"):
        link.check_alive("get", soon())
    assert connections[0].socket.fileno() == -1


def test_a_message_in_drops_and_a_mad_size(unit: StorageUnit, link: UnitLink) -> None:
    connection = link._connected(soon())
    sent: list[bytes] = []

    class Drops:
        def sendmsg(self, pieces: list[memoryview]) -> int:
            sent.append(bytes(pieces[0][:1]))
            return connection.socket.sendmsg([memoryview(sent[-1])])

        setsockopt = connection.socket.setsockopt

    real, dropper = connection.socket, Connection.__new__(Connection)
    vars(dropper).update(vars(connection), socket=Drops())
    dropper.send("put", encode(Put(1, (64,), 0.0)), [memoryview(bytes(64))], soon())
    reply = connection.receive(soon())
    assert reply is not None and reply[0] == "done" and len(sent) > 80
    real.sendall(header(1 << 40, 1, 0, 0))
    reply = connection.receive(soon())
    assert reply is not None and reply[0] == "refused" and b"a frame of 1099511627776 bytes" in reply[1]
    connection.close()


# ------------------------------------------------------------------ planes whose units are processes


def rows(count: int, value: int = 0, length: int = 100) -> dict[str, Any]:
    return {
        "ids": [torch.full((length,), value, dtype=torch.int32) for _ in range(count)],
        "image": [torch.full((number % 3, 50), value, dtype=torch.uint8) for number in range(count)],
    }


@pytest.fixture(scope="module")
def plane() -> Iterator[DataPlane]:
    """Two units, each a process; the directory is in this one."""
    store = StoreConfig(kind="tcp", capacity_mib=16, num_units=2)
    config = DataPlaneConfig(store=store, timeout_s=10, block_rows=8)
    with open_data_plane(config, run_id=fresh_run_id(), in_process=True) as plane:
        yield plane


@pytest.fixture
def client(plane: DataPlane, request: pytest.FixtureRequest) -> Iterator[DataPlaneClient]:
    """Over sockets."""
    with connect(plane.handle.over_sockets()) as client:
        client.register(request.node.name, SCHEMA, ("a",))
        yield client
        client.unregister(request.node.name)


@pytest.mark.processes
def test_a_shuffled_read_moves_the_rows_asked_for(
    client: DataPlaneClient, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, moved = request.node.name, [0]
    keys = [f"k.{number}" for number in range(64)]
    wide = {
        "ids": [torch.full((5000,), number, dtype=torch.int32) for number in range(64)],
        "image": [torch.full((40, 50), number, dtype=torch.uint8) for number in range(64)],
    }
    meta = client.put(name, keys, wide)
    receive_into = Connection.receive_into

    def counted(connection: Connection, pieces: Any, deadline: float) -> None:
        moved[0] += sum(piece.nbytes for piece in pieces)
        receive_into(connection, pieces, deadline)

    monkeypatch.setattr(Connection, "receive_into", counted)
    chosen = [63, 0, 17, 40]
    batch = client.get(meta.select(chosen))
    assert batch.jagged("ids").values.reshape(4, 5000)[:, 7].tolist() == chosen
    wanted_bytes = 4 * (5000 * 4 + 40 * 50)
    assert wanted_bytes < moved[0] < 1.1 * wanted_bytes + 4000, "and the index of the images of four blocks"


@pytest.mark.processes
@pytest.mark.parametrize("checksums", [False, True])
def test_a_large_put_goes_over_several_connections(
    plane: DataPlane, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, checksums: bool
) -> None:
    monkeypatch.setattr("headrace.dataplane.stores.tcp.store.STRIPE_BYTES", 50_000)
    monkeypatch.setattr("headrace.dataplane.stores.tcp.store.STRIPES", 3)
    filled, send, together = [], Connection.send, threading.Barrier(3, timeout=10)

    def counted(connection: Connection, op: str, *arguments: Any, **options: Any) -> None:
        filled.append((op, id(connection)))
        if op == "fill":
            together.wait()  # No connection is used again before all three are in use.
        send(connection, op, *arguments, **options)

    monkeypatch.setattr(Connection, "send", counted)
    handle = plane.handle.over_sockets()
    address = {**handle.store.address, "checksums": checksums}
    with connect(dataclasses.replace(handle, store=dataclasses.replace(handle.store, address=address))) as client:
        client.register(request.node.name, SCHEMA)
        values = [torch.arange(number, number + 5000, dtype=torch.int32) for number in range(64)]
        images = [torch.full((40, 50), number, dtype=torch.uint8) for number in range(64)]
        meta = client.put(request.node.name, [f"k.{n}" for n in range(64)], {"ids": values, "image": images})
        assert [op for op, _ in filled if op in ("put", "cut")] == ["cut"]
        assert len({connection for op, connection in filled if op == "fill"}) == 3
        batch = client.get(meta)
        assert torch.equal(batch.jagged("ids").values, torch.cat(values))
        assert torch.equal(batch.ragged("image").values, torch.cat([image.flatten() for image in images]))
        client.unregister(request.node.name)
        assert client.status().store_bytes == client.status().bytes_used


@pytest.mark.processes
def test_a_stopped_unit_is_named_and_goes_on_where_it_was(
    plane: DataPlane, client: DataPlaneClient, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dataplane.stores.counting_host.FREE_TIMEOUT_S", 0.5)
    name = request.node.name
    kept = client.put(name, ["kept.0"], rows(1, 5))
    meta = client.put(name, [f"k.{number}" for number in range(16)], rows(16, 1))
    pids = [pid for what, pid in plane.processes().items() if what.startswith("unit")]
    for pid in pids:
        suspend(pid)
    try:
        with pytest.raises(DataPlaneTimeout, match=r"had not answered in full.*unit-\d pid=\d+"):
            client.get(meta, timeout_s=0.3)  # A short time limit is no sign of a death.
        with pytest.raises(DataPlaneTimeout, match="had not answered in full"):
            client.put(name, ["late.0"], rows(1), timeout_s=0.5)
        monkeypatch.setattr("headrace.dataplane.stores.deadline.SILENT_S", 0.2)
        with pytest.raises(StoreLost, match=r"did not answer for 0\.[345] s.*unit-\d pid=\d+"):
            client.get(meta, timeout_s=0.3)
        client.clear(name, meta.keys, timeout_s=30)
        assert client.status(timeout_s=30).bytes_unfreed > 0
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: client.status().bytes_unfreed == 0)
    with pytest.raises(RowsCleared, match="k.0"):
        client.get(meta)
    assert client.get(kept).jagged("ids").values.unique().tolist() == [5]
    wait_until(lambda: client.status().store_bytes == client.status().bytes_used)


@pytest.mark.processes
def test_writers_of_a_host_use_its_units_in_turn(
    plane: DataPlane, client: DataPlaneClient, request: pytest.FixtureRequest
) -> None:
    with connect(plane.handle) as near:
        metas = [near.put(request.node.name, [f"k.{number}"], rows(1)) for number in range(4)]
    assert sorted(holder_of(meta.blocks[0].location) for meta in metas) == [0, 0, 1, 1]


@pytest.mark.processes
def test_a_dead_unit_is_noticed_without_any_reader() -> None:
    store = StoreConfig(kind="tcp", capacity_mib=4, num_units=2)
    config = DataPlaneConfig(store=store, timeout_s=10)
    with (
        open_data_plane(config, run_id=fresh_run_id(), process=True) as plane,
        connect(plane.handle.over_sockets()) as client,
    ):
        client.register("p", SCHEMA)
        for number in range(2):
            client.put("p", [f"k.{number}"], rows(1, number, length=400_000))
        kill(plane.processes()["unit-0"])
        client.put("p", ["new.0"], rows(1, 0, length=400_000), timeout_s=5)  # The dead unit's room is free.
        assert client.status().lost_rows == 1


def test_a_slow_answer_is_a_timeout_that_says_how_far_it_came(
    unit: StorageUnit, link: UnitLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(link, 1, bytes(1 << 19))
    places, looks, go_on = unit._pool.places, [0], threading.Event()

    def second_is_slow(block_ids: list[int]) -> Any:
        looks[0] += 1
        if looks[0] == 2:  # The bytes of the block are sent, and the one after them is not.
            go_on.wait(10)
        return places(block_ids)

    monkeypatch.setattr(unit._pool, "places", second_is_slow)
    request = encode(Get(column([1]), column([0]), column([0]), column([1 << 19])))
    with pytest.raises(DataPlaneTimeout, match=r"of the reply were received .*op=get.*unit-0") as late:
        deadline = time.monotonic() + 0.5
        sent = link.send("get", "get", request, (), deadline, expected=(1 << 19) + 1)
        with link.answer(sent) as (connection, _, raw_bytes):
            connection.receive_into([memoryview(bytearray(raw_bytes))], deadline)
    got, expected = map(int, re.findall(r"(\d+) of (\d+) bytes", str(late.value))[0])
    assert got == expected - ENDING.size > 1 << 19
    go_on.set()


@pytest.mark.processes
def test_a_forked_process_has_connections_of_its_own() -> None:
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=16), timeout_s=10)
    with (
        open_data_plane(config, run_id=fresh_run_id(), process=True) as plane,
        connect(plane.handle.over_sockets()) as client,
    ):
        client.register("p", SCHEMA)
        use_in_a_fork(client)


def use_in_a_fork(client: DataPlaneClient) -> None:
    name = "p"
    meta = client.put(name, ["a.0"], rows(1, 3))
    assert client.get(meta).num_rows == 1
    child = os.fork()
    if not child:
        try:
            values = client.get(meta).jagged("ids").values.unique().tolist()
            client.put(name, ["b.0"], rows(1, 4))
            os._exit(0 if values == [3] else 1)
        except BaseException:
            os._exit(2)
    for _ in range(20):
        assert client.get(meta).jagged("ids").values.unique().tolist() == [3]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.get_keys(name, ["b.0"], ["ids"]).jagged("ids").values.unique().tolist() == [4]


@pytest.mark.processes
def test_the_death_of_a_unit_takes_its_rows_and_no_others() -> None:
    store = StoreConfig(kind="tcp", capacity_mib=16, num_units=2)
    config = DataPlaneConfig(store=store, timeout_s=10, block_rows=1)
    with (
        open_data_plane(config, run_id=fresh_run_id(), in_process=True) as plane,
        connect(plane.handle.over_sockets()) as far,
        connect(plane.handle) as near,
    ):
        far.register("p", SCHEMA, ("a",))
        metas = [far.put("p", [f"k.{number}"], rows(1, number)) for number in range(8)]
        units = [int.from_bytes(meta.blocks[0].location[:2]) for meta in metas]
        assert set(units) == {0, 1}, "puts are spread over the units"
        kill(plane.processes()["unit-0"])
        lost = [f"k.{number}" for number in range(8) if units[number] == 0]
        everything = near.lookup("p", [f"k.{number}" for number in range(8)])
        for meta, unit, client in zip(metas, units, [far, near] * 4, strict=True):
            if unit == 1:
                assert client.get(meta).num_rows == 1
                continue
            with pytest.raises(StoreLost, match="has died.*unit-0 pid="):
                client.get(meta)
        with pytest.raises(StoreLost, match=r"4 of 8 rows are lost: .*has died") as error:
            far.get(everything)
        assert error.value.keys == tuple(lost)
        status = near.status("p")
        assert (status.lost_rows, status.ready["ids"], status.blocks) == (4, 4, 4), "their bytes are given back"
        claimed = near.claim("p", "a", ["ids"], 8, at_least=1)
        assert set(claimed.keys) == {f"k.{number}" for number in range(8)} - set(lost)
        with pytest.raises(StoreLost, match="4 of 8 rows were lost") as error:
            near.get_keys("p", everything.keys, ["ids"])
        listing = near.rows("p")
        assert near.clear("p", listing.keys[listing.lost]) == 4 and list(error.value.keys) == lost
        for number in range(4):
            assert far.get(far.put("p", [f"new.{number}"], rows(1))).num_rows == 1
            assert near.get(near.put("p", [f"near.{number}"], rows(1))).num_rows == 1
        assert far.clear("p") == 12
        assert far.status().store_bytes == 0


def test_a_client_of_a_plane_that_has_gone_is_told_so() -> None:
    from headrace.dataplane.stores.tcp.wire import UnitAddress

    listener = socket.create_server(("127.0.0.1", 0))
    address = UnitAddress("unit-9", 1, "127.0.0.1", listener.getsockname()[1], "elsewhere", "/nowhere")
    listener.close()
    link = UnitLink(address, KEY)
    with pytest.raises(UnitDied, match="no process listens at its address .*unit-9"):
        put(link, 1, bytes(64))
    assert "key" not in repr(StoreSpec("tcp", "r", {}))


def test_a_unit_that_dies_amid_a_request_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes the connections of a killed process before its listener, which is no longer served."""
    listeners: list[socket.socket] = []

    def kept(*args: Any, **kwargs: Any) -> socket.socket:
        listener = listen(*args, **kwargs)
        listeners.append(listener.dup())
        return listener

    monkeypatch.setattr("headrace.dataplane.stores.tcp.unit.listen", kept)
    unit = StorageUnit(fresh_run_id(), "unit-0", KEY, "127.0.0.1", 1 << 20)
    link = UnitLink(unit.address, KEY)
    put(link, 1, bytes(64))

    def broken(self: Connection, deadline: float, **_: Any) -> None:
        unit.close()
        threading.Timer(0.1, listeners[0].close).start()
        raise ConnectionResetError

    monkeypatch.setattr(Connection, "receive", broken)
    with pytest.raises(UnitDied, match="has died: no process listens at its address .*unit-0"):
        get(link, (1, 0, 64))
    link.close()


def test_a_connection_that_breaks_is_no_death(
    unit: StorageUnit, link: UnitLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(link, 1, bytes(64))

    def broken(self: Connection, deadline: float, **_: Any) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "receive", broken)
        with pytest.raises(StoreLost, match="the connection broke .*unit-0") as lost:
            get(link, (1, 0, 64))
    assert not isinstance(lost.value, UnitDied)
    assert get(link, (1, 0, 64)) == bytes(64)


@pytest.mark.processes
def test_rows_that_share_tokens_are_read_in_ranges_or_as_a_part() -> None:
    """Without checksums, few rows are read by their pieces, and a whole group by its part."""
    schema = Schema([Field("routes", Kind.PER_TOKEN, torch.uint8, (12, 8), shared=True)])
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=32))
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 99, (400, 12, 8), dtype=np.uint8)
    rows = [np.concatenate([prompt, rng.integers(0, 99, (100 + n, 12, 8), dtype=np.uint8)]) for n in range(6)]
    with open_data_plane(config, run_id=fresh_run_id(), in_process=True) as plane:
        with connect(plane.handle.over_sockets()) as client:
            client.register("train", schema, group_size=6)
            meta = client.put(
                "train", [f"a.{n}" for n in range(6)], {"routes": [torch.from_numpy(row) for row in rows]}
            )
            for asked in ([4], [0], [5, 1], [3, 3, 2], list(range(6)), [5, 4, 3, 2, 1, 0]):
                column = client.get(meta.select(asked)).jagged("routes")
                found = np.split(column.values.numpy(), np.cumsum(column.lengths)[:-1])
                for row, values in zip(asked, found, strict=True):
                    np.testing.assert_array_equal(values, rows[row])


def test_only_connections_within_a_host_have_small_buffers() -> None:
    """A connection between hosts keeps the kernel's own, because a window of a fixed size would slow it down."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for source, small in (("127.0.0.1", True), ("127.0.0.2", False)):
            plain = socket.create_connection(server.getsockname(), source_address=(source, 0))
            connection = Connection(plain)
            options = (socket.SO_SNDBUF, socket.SO_RCVBUF)
            sizes = [connection.socket.getsockopt(socket.SOL_SOCKET, option) for option in options]
            connection.close()
            # Linux reports twice what was set, for its bookkeeping.
            assert (sizes == [2 * LOCAL_BUFFER_BYTES] * 2) == small, (source, sizes)
