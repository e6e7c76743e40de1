"""Stores with Ray actors at their own protocol: blocks in and out, freed ones, dead and late peers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from headrace.codecs.blocks import BlockLayout
from headrace.dataplane.block_store import Want
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import IntegrityError, RowsCleared, StoreLost
from headrace.dataplane.factory import connect, open_data_plane
from headrace.dataplane.meta import BlockRef
from headrace.dataplane.stores import counting_host as unfreed
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.rows import BYTES, block_of
from headrace.tests.process_pool import kill, suspend

SIZES = (100, 0, 300_000, 7)
CAPACITY = 1 << 20


def open_host(kind: str) -> Any:
    run_id = fresh_run_id()
    if kind == "ray":
        from headrace.dataplane.stores.ray_objects import RayObjectsHost

        return RayObjectsHost(run_id, CAPACITY)
    from headrace.dataplane.stores.simple import SimpleHost

    return SimpleHost(run_id, 2, CAPACITY)


def open_store(spec: Any) -> Any:
    if spec.kind == "ray":
        from headrace.dataplane.stores.ray_objects import RayObjectsStore

        return RayObjectsStore(spec)
    from headrace.dataplane.stores.simple import SimpleStore

    return SimpleStore(spec)


def peers_of(spec: Any) -> list[tuple[str, int]]:
    """(name, pid) of the store's processes."""
    if spec.kind == "ray":
        return list(zip(spec.address["names"], spec.address["pids"], strict=True))
    return [(unit[1], unit[2]) for unit in spec.address["units"]]


@pytest.fixture(scope="module", params=["ray", "simple"])
def host(request: pytest.FixtureRequest, ray_session: None) -> Iterator[Any]:
    host = open_host(request.param)
    yield host
    host.close()
    assert host.usage_bytes() == 0


@pytest.fixture
def store(host: Any) -> Iterator[Any]:
    store = open_store(host.spec)
    yield store
    store.close()


NEXT_BLOCK = iter(range(1, 1 << 30))


def parts_of(block_id: int, sizes: tuple[int, ...] = SIZES) -> list[np.ndarray]:
    generator = np.random.default_rng(block_id)
    return [generator.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def write(host: Any, store: Any) -> Want:
    block_id = next(NEXT_BLOCK)
    layout = BlockLayout(fields=("x",), num_rows=1, num_tokens=0, part_bytes=SIZES)
    location = host.allocate(block_id, layout.nbytes)
    location = store.put(block_id, location, parts_of(block_id), layout.offsets, 10.0)
    return Want(BlockRef(block_id, location, layout), (0, 1, 2, 3))


def assert_hold(store: Any, wants: list[Want]) -> None:
    for want, views in zip(wants, store.get(wants, 10.0), strict=True):
        assert sorted(views) == sorted(want.parts)
        for part, view in views.items():
            np.testing.assert_array_equal(view, parts_of(want.block.block_id)[part])
            assert not view.flags.writeable
    store.settle(wants)


def test_blocks_and_parts_come_back_exact_in_any_order(host: Any, store: Any) -> None:
    wants = [write(host, store) for _ in range(6)]
    assert_hold(store, wants[::-1])
    assert_hold(store, [wants[2], wants[2], Want(wants[3].block, (3,)), Want(wants[0].block, (2, 1))])
    assert store.get([], 10.0) == []
    assert host.usage_bytes() == 6 * wants[0].block.layout.nbytes
    host.free_many([(want.block.block_id, want.block.location) for want in wants])
    assert host.usage_bytes() == 0


def test_freed_blocks_are_refused_at_once_and_others_stay(host: Any, store: Any) -> None:
    wants = [write(host, store) for _ in range(4)]
    host.free(wants[1].block.block_id, wants[1].block.location)
    host.free(wants[1].block.block_id, wants[1].block.location)
    started = time.monotonic()
    with pytest.raises(RowsCleared):
        store.get(wants, 10.0)
    assert time.monotonic() - started < 1.0
    rest = [wants[0], wants[2], wants[3]]
    assert_hold(store, rest)
    host.free_many([(want.block.block_id, want.block.location) for want in rest])


def test_views_outlive_their_block(host: Any, store: Any) -> None:
    want = write(host, store)
    (views,) = store.get([want], 10.0)
    host.free(want.block.block_id, want.block.location)
    other = write(host, store)
    store.settle([want])
    np.testing.assert_array_equal(views[2], parts_of(want.block.block_id)[2])
    host.free(other.block.block_id, other.block.location)


def test_block_that_arrives_after_its_reservation_ended_is_not_kept(host: Any, store: Any) -> None:
    block_id = next(NEXT_BLOCK)
    layout = BlockLayout(fields=("x",), num_rows=1, num_tokens=0, part_bytes=SIZES)
    late = Want(BlockRef(block_id, (block_id % 2).to_bytes(2) if host.spec.kind == "simple" else b"\0\0", layout), (0,))
    location = host.allocate(block_id, 1000)
    host.free(block_id, location)
    if host.spec.kind == "ray":
        with pytest.raises(RowsCleared):
            store.put(block_id, location, parts_of(block_id), layout.offsets, 10.0)
    else:
        store.put(block_id, location, parts_of(block_id), layout.offsets, 10.0)
        other = write(host, store)
        host.free(other.block.block_id, other.block.location)  # sweeps what came late
    with pytest.raises(RowsCleared):
        store.get([late], 10.0)


def test_threads_share_a_store(host: Any, store: Any) -> None:
    wants = [write(host, store) for _ in range(4)]
    failures = []

    def read() -> None:
        try:
            for _ in range(10):
                assert_hold(store, wants)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    host.free_many([(want.block.block_id, want.block.location) for want in wants])


def test_wrong_size_in_the_store_is_an_integrity_error(host: Any, store: Any) -> None:
    want = write(host, store)
    block = BlockRef(
        want.block.block_id,
        want.block.location,
        BlockLayout(fields=("x",), num_rows=1, num_tokens=0, part_bytes=(100, 0, 299_999, 7)),
    )
    with pytest.raises(IntegrityError, match="300000"):
        store.get([Want(block, (2,))], 10.0)
    host.free(want.block.block_id, want.block.location)


@pytest.mark.parametrize("kind", ["ray", "simple"])
def test_stopped_then_killed_process_is_named_within_the_bound(kind: str, ray_session: None) -> None:
    host = open_host(kind)
    store = open_store(host.spec)
    wants = [write(host, store) for _ in range(2)]
    peers = peers_of(host.spec)
    name, pid = peers[wants[0].block.block_id % len(peers)]
    suspend(pid)
    started = time.monotonic()
    try:
        with pytest.raises(StoreLost, match=rf"{name} pid={pid}") as caught:
            store.get(wants[:1], 1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 0.9 < time.monotonic() - started < 2.0 and caught.value.elapsed_s
    assert_hold(store, wants)
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
    host.free_many([(want.block.block_id, want.block.location) for want in wants])
    host.free(wants[0].block.block_id, b"")
    assert time.monotonic() - started < 5.0
    deadline = time.monotonic() + 30
    while host.unfreed_bytes() and time.monotonic() < deadline:
        pass
    assert host.unfreed_bytes() == 0, "the blocks of a dead process are gone"
    if kind == "simple":
        host_other = write_to(host, store, like=wants[1].block.block_id)
        assert_hold(store, [host_other])
    store.close()
    host.close()
    host.close()


@pytest.mark.parametrize("kind", ["ray", "simple"])
def test_a_process_that_was_stopped_during_a_clear_is_told_again(
    kind: str, ray_session: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unfreed, "FREE_TIMEOUT_S", 0.5)
    host = open_host(kind)
    store = open_store(host.spec)
    wants = [write(host, store) for _ in range(4)]
    stopped = wants[::2] if kind == "simple" else wants  # one of two units
    peers = peers_of(host.spec)
    name, pid = peers[wants[0].block.block_id % len(peers)]
    suspend(pid)
    try:
        host.free_many([(want.block.block_id, want.block.location) for want in wants])
        waiting = sum(want.block.layout.nbytes for want in stopped)
        assert host.unfreed_bytes() == host.usage_bytes() == waiting
        assert name in host.shortage() and name in caplog.text
        assert len([record for record in caplog.records if "did not free" in record.message]) == 1
        assert waiting > CAPACITY // 4 and host.allocate(next(NEXT_BLOCK), 100) is None, "memory stays bounded"
        late = next(NEXT_BLOCK)
        assert host.allocate(late, 0) == b"", "so that a block that may still come is freed with the others"
        host.free(late, b"")
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 30
    while host.unfreed_bytes() and time.monotonic() < deadline:
        pass
    assert host.unfreed_bytes() == host.usage_bytes() == 0 and host.shortage() == ""
    for want in wants:
        with pytest.raises(RowsCleared):
            store.get([want], 10.0)
    later = write(host, store)
    assert_hold(store, [later])
    host.free(later.block.block_id, later.block.location)
    store.close()
    host.close()


def rewrite(store: Any, want: Want) -> None:
    block = want.block
    store.put(block.block_id, block.location, parts_of(block.block_id), block.layout.offsets, 20.0)


def write_to(host: Any, store: Any, like: int) -> Want:
    """A block on the same unit as block `like` (of two)."""
    if (next(NEXT_BLOCK) + 1) % 2 != like % 2:
        next(NEXT_BLOCK)
    want = write(host, store)
    assert want.block.block_id % 2 == like % 2
    return want


@pytest.mark.parametrize("kind", ["ray", "simple"])
def test_closed_host_leaves_no_process(kind: str, ray_session: None) -> None:
    host = open_host(kind)
    pids = [pid for _, pid in peers_of(host.spec)]
    host.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


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
    assert client.clear("p", timeout_s=20) == 5
    client.close()
    plane.close()
    assert not list(Path("/dev/shm").glob(f"*{plane.handle.run_id}*"))
