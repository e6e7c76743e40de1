"""Stores with processes at their own protocol: blocks in and out, freed ones, dead and late peers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from headrace.dataplane.block_store import Want
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import DataPlaneTimeout, IntegrityError, RowsCleared, StoreLost
from headrace.dataplane.factory import connect, open_data_plane
from headrace.dataplane.meta import BlockRef
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.rows import BYTES, block_of
from headrace.tests.dataplane.stores.written import NEXT_BLOCK, assert_hold, free, layout_of, parts_of, write
from headrace.tests.process_pool import kill, suspend
from headrace.tests.waiting import wait_until

pytestmark = pytest.mark.processes
CAPACITY = 1 << 20


def open_host(kind: str) -> Any:
    run_id = fresh_run_id()
    if kind == "mooncake":
        from headrace.dataplane.stores.mooncake_store import MooncakeHost

        return MooncakeHost(run_id, CAPACITY)
    if kind == "ray":
        from headrace.dataplane.stores.ray_objects import RayObjectsHost

        return RayObjectsHost(run_id, CAPACITY)
    from headrace.dataplane.stores.simple import SimpleHost

    return SimpleHost(run_id, 2, CAPACITY)


def open_store(spec: Any) -> Any:
    if spec.kind == "mooncake":
        from headrace.dataplane.stores.mooncake_store import MooncakeStore

        return MooncakeStore(spec)
    if spec.kind == "ray":
        from headrace.dataplane.stores.ray_objects import RayObjectsStore

        return RayObjectsStore(spec)
    from headrace.dataplane.stores.simple import SimpleStore

    return SimpleStore(spec)


def peers_of(spec: Any) -> list[tuple[str, int]]:
    """(name, pid) of the store's processes."""
    if spec.kind == "mooncake":
        return [(spec.address["name"], spec.address["pid"])]
    if spec.kind == "ray":
        return list(zip(spec.address["names"], spec.address["pids"], strict=True))
    return [(unit[1], unit[2]) for unit in spec.address["units"]]


ACTORS = ("ray", "simple")


@pytest.fixture(scope="module", params=[*ACTORS, "mooncake"])
def name_of_store(request: pytest.FixtureRequest) -> str:
    request.getfixturevalue("ray_session" if request.param in ACTORS else "mooncake_library")
    return request.param


@pytest.fixture(scope="module")
def host(name_of_store: str) -> Iterator[Any]:
    host = open_host(name_of_store)
    yield host
    host.close()
    host.close()
    assert host.usage_bytes() == 0


@pytest.fixture
def store(host: Any) -> Iterator[Any]:
    store = open_store(host.spec)
    yield store
    store.close()
    store.close()


def test_blocks_and_parts_come_back_exact_in_any_order(host: Any, store: Any) -> None:
    wants = [write(host, store) for _ in range(6)]
    assert_hold(store, *wants[::-1])
    one, two, three = (want.block for want in wants[:3])
    assert_hold(store, wants[2], Want(three, (3,)), wants[2], Want(one, (2, 1)), Want(two, (0, 3)), Want(two, (1, 4)))
    assert store.get([], 10.0) == []
    assert host.usage_bytes() == 6 * one.layout.nbytes
    free(host, *wants)
    assert host.usage_bytes() == 0


def test_freed_blocks_are_refused_at_once_and_others_stay(host: Any, store: Any) -> None:
    wants = [write(host, store) for _ in range(4)]
    free(host, wants[1])
    free(host, wants[1])
    for asked in (wants, [Want(wants[1].block, (1,))]):
        started = time.monotonic()
        with pytest.raises(RowsCleared, match=str(wants[1].block.block_id)):
            store.get(asked, 10.0)
        assert time.monotonic() - started < 1.0, "no retries for what is gone"
    rest = [wants[0], wants[2], wants[3]]
    assert_hold(store, *rest)
    free(host, *rest)


def test_views_outlive_their_block(host: Any, store: Any) -> None:
    want = write(host, store)
    (views,) = store.get([want], 10.0)
    free(host, want)
    other = write(host, store)
    if host.spec.kind == "mooncake":
        with pytest.raises(RowsCleared):
            store.settle([want])
    else:
        store.settle([want])
    np.testing.assert_array_equal(views[2], parts_of(want.block.block_id)[2])
    free(host, other)


def test_block_that_arrives_after_its_reservation_ended_is_not_kept(host: Any, store: Any) -> None:
    block_id = next(NEXT_BLOCK)
    layout = layout_of()
    late = Want(BlockRef(block_id, (block_id % 2).to_bytes(2) if host.spec.kind == "simple" else b"\0\0", layout), (0,))
    location = host.allocate(block_id, layout.nbytes)
    host.free(block_id, location)
    if host.spec.kind == "ray":
        with pytest.raises(RowsCleared):
            store.put(block_id, location, parts_of(block_id), layout.offsets, 10.0)
    else:
        store.put(block_id, location, parts_of(block_id), layout.offsets, 10.0)
        free(host, write(host, store))  # sweeps what came late
    with pytest.raises(RowsCleared):
        store.get([late], 10.0)


def test_threads_share_a_store(host: Any, store: Any) -> None:
    wants = [write(host, store) for _ in range(8)]

    def read(turn: int) -> None:
        for _ in range(10):
            turned = wants[turn:] + wants[:turn]
            assert_hold(store, *turned)
            if host.spec.kind == "mooncake":
                rewrite(store, turned[0])  # written before: the first write stays

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    free(host, *wants)


def test_wrong_size_in_the_store_is_an_integrity_error(host: Any, store: Any) -> None:
    want = write(host, store)
    wrong = replace(want.block, layout=layout_of((100, 0, 400_000, 7, 0)))
    with pytest.raises(IntegrityError, match="400000" if host.spec.kind == "mooncake" else "300000"):
        store.get([Want(wrong, (2,))], 10.0)
    free(host, want)


@pytest.mark.parametrize("kind", ACTORS)
def test_stopped_then_killed_process_is_named_within_the_bound(kind: str, ray_session: None) -> None:
    host = open_host(kind)
    store = open_store(host.spec)
    wants = [write(host, store) for _ in range(2)]
    peers = peers_of(host.spec)
    name, pid = peers[wants[0].block.block_id % len(peers)]
    suspend(pid)
    started = time.monotonic()
    try:
        with pytest.raises(DataPlaneTimeout, match=rf"{name} pid={pid}") as caught:
            store.get(wants[:1], 1.0)  # A short time limit is no sign of a death.
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 0.9 < time.monotonic() - started < 2.0 and caught.value.elapsed_s
    assert_hold(store, *wants)
    kill(pid)
    for act in (
        lambda: store.get(wants[:1], 20.0),
        lambda: store.get(wants[:1], 20.0),
        lambda: rewrite(store, wants[0]),
    ):
        started = time.monotonic()
        with pytest.raises(StoreLost, match=rf"{name} pid={pid}"):
            act()
        assert time.monotonic() - started < 5.0, "a dead process is noticed, not waited for"
    started = time.monotonic()
    free(host, *wants)
    host.free(wants[0].block.block_id, b"")
    assert time.monotonic() - started < 5.0
    host.look()
    assert list(host.dead) == [wants[0].block.block_id % len(peers)] and name in host.dead[list(host.dead)[0]]
    wait_until(lambda: not host.unfreed_bytes(), "the blocks of a dead process are gone")
    if kind == "simple":
        number = next(number for number in NEXT_BLOCK if number % 2 == wants[1].block.block_id % 2)
        assert_hold(store, write(host, store, block_id=number))  # on the other unit
    store.close()
    host.close()
    host.close()


def test_a_process_ends_with_its_raylet(name_of_store: str, host: Any) -> None:
    """Ray leaves the actors of a host alone that was cut off."""
    for name, _ in peers_of(host.spec) if name_of_store in ACTORS else ():
        actor = ray.get_actor(name, namespace="headrace")
        names = ray.get(actor.__ray_call__.remote(lambda _: [thread.name for thread in threading.enumerate()]))
        assert "parent watch" in names, "it is among its threads"


def test_a_process_that_was_stopped_during_a_clear_is_told_again(
    name_of_store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("counting_host", "mooncake_store"):
        monkeypatch.setattr(f"headrace.dataplane.stores.{module}.FREE_TIMEOUT_S", 0.5)
    host = open_host(name_of_store)
    store = open_store(host.spec)
    wants = [write(host, store) for _ in range(4)]
    stopped = wants[::2] if name_of_store == "simple" else wants  # one of two units
    peers = peers_of(host.spec)
    name, pid = peers[wants[0].block.block_id % len(peers)]
    suspend(pid)
    try:
        free(host, *wants)
        waiting = sum(want.block.layout.nbytes for want in stopped)
        assert host.unfreed_bytes() == host.usage_bytes() == waiting and f"pid={pid}" in host.shortage()
        if name_of_store in ACTORS:
            assert name in host.shortage() and name in caplog.text
            assert len([record for record in caplog.records if "did not free" in record.message]) == 1
            assert waiting > CAPACITY // 4 and host.allocate(next(NEXT_BLOCK), 100) is None, "memory stays bounded"
            late = next(NEXT_BLOCK)
            assert host.allocate(late, 0) == b"", "so that a block that may still come is freed with the others"
            host.free(late, b"")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not host.unfreed_bytes())
    assert host.usage_bytes() == 0 and host.shortage() == ""
    for want in wants:
        with pytest.raises(RowsCleared):
            store.get([want], 10.0)
    later = write(host, store)
    assert_hold(store, later)
    free(host, later)
    store.close()
    host.close()


def rewrite(store: Any, want: Want) -> None:
    block = want.block
    store.put(block.block_id, block.location, parts_of(block.block_id), block.layout.offsets, 20.0)


@pytest.mark.parametrize("kind", ACTORS)
def test_closed_host_leaves_no_process(kind: str, ray_session: None) -> None:
    host = open_host(kind)
    pids = [pid for _, pid in peers_of(host.spec)]
    host.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_storage_units_of_a_cluster_are_actors_on_its_nodes(ray_session: None) -> None:
    """On several hosts `auto` is `tcp`, with a unit on every node; a dead one takes its rows, and no file is left."""
    config = DataPlaneConfig(store=StoreConfig(capacity_mib=8, num_units=2), timeout_s=20, block_rows=1)
    plane = open_data_plane(config, run_id=fresh_run_id(), one_host=False)
    units: Any = plane.handle.store.address["units"]
    assert plane.handle.store.kind == "tcp" and len(units) == 2
    assert {unit[2] for unit in units} == {ray.util.get_node_ip_address()}
    client = connect(plane.handle.over_sockets())
    client.register("p", BYTES)
    metas = [client.put("p", [f"k.{number}"], block_of(number, 1)) for number in range(4)]
    assert [client.get(meta).tensor("x").unique().tolist() for meta in metas] == [[0], [1], [2], [3]]
    kill(units[0][1])
    lost = [meta for meta in metas if not int.from_bytes(meta.blocks[0].location[:2])]
    with pytest.raises(StoreLost, match="unit-0 pid="):
        client.get(lost[0])
    client.put("p", ["new.0"], block_of(7, 1))
    assert client.status("p").lost_rows == len(lost) == 2
    here = ray.get_runtime_context().get_node_id()
    plane.ensure_unit(here)  # unit-1 is there
    assert client.forget_unit(here) == {"p": tuple(f"k.{number}" for number in range(4)) + ("new.0",)}
    for _ in range(2):
        plane.ensure_unit(here)
    assert client.put("p", ["new.0"], block_of(7, 1)).blocks[0].location[:2] == b"\0\2"
    kill(client._operations.store._units[2].address.pid)  # type: ignore[attr-defined]
    plane.ensure_unit(here)  # nobody has noticed the death
    assert client.status().lost_rows == 1 and client.forget_unit() == {"p": ("new.0",)}
    assert client.put("p", ["new.0"], block_of(7, 1)).blocks[0].location[:2] == b"\0\3"
    assert client.clear("p", timeout_s=20) == 1
    client.close()
    plane.close()
    assert not list(Path("/dev/shm").glob(f"*{plane.handle.run_id}*"))
