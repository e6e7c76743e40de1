"""The data plane's contract between processes: directory, producers and consumers apart, and any of them may die."""

from __future__ import annotations

import concurrent.futures
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.errors import ClaimTimeout, DataPlaneError, DirectoryLost, KeysNotFound, RowsCleared, StoreLost
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.meta import KVBatchMeta
from headrace.testing.data_plane import SCHEMA, assert_rows, fresh_run_id
from headrace.tests.dataplane.planes import as_seen, store_config
from headrace.tests.dataplane.rows import BYTES, FIRST, block_of, columns, keys_of
from headrace.tests.dataplane.workers import leave, start
from headrace.tests.process_pool import has_ended, kill
from headrace.tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_session")


def open_apart(kind: str, **settings: Any) -> DataPlane:
    """A data plane whose directory is an actor."""
    config = DataPlaneConfig(
        store=store_config(kind, capacity_mib=64), trusted_network=True, **{"timeout_s": 20, **settings}
    )
    return as_seen(kind, open_data_plane(config, run_id=fresh_run_id()))


@pytest.fixture(scope="module")
def apart(kind: str, ray_session: None) -> Iterator[DataPlane]:
    """One for most tests. Its end leaves no process and no file."""
    plane = open_apart(kind, integrity="verify", lease_s=2, reserve_s=2, block_rows=32)
    yield plane
    client = connect(plane.handle)
    pids = [directory_pid(plane), store_process(plane)[0]]
    plane.close()
    wait_until(lambda: all(has_ended(pid) for pid in pids))
    assert not list(Path("/dev/shm").glob(f"*{plane.handle.run_id}*"))
    started = time.monotonic()
    with pytest.raises(DirectoryLost):
        client.status()
    assert time.monotonic() - started < 10
    client.close()


@pytest.fixture(scope="module")
def idle_workers(ray_session: None) -> Iterator[list[Any]]:
    """Processes that go from one store's tests to the next."""
    idle: list[Any] = []
    yield idle
    for worker in idle:
        ray.kill(worker)


@pytest.fixture(scope="module")
def workers(apart: DataPlane, idle_workers: list[Any]) -> Iterator[list[Any]]:
    """Four processes. Tests that kill one take it off the end of the list, and come last."""
    workers = start(apart.handle, idle_workers, "worker0", "worker1", "worker2", "worker3")
    yield workers
    idle_workers.extend(leave(workers))


@pytest.fixture
def driver(apart: DataPlane, partition: str) -> Iterator[Any]:
    client = connect(apart.handle, name="driver")
    client.register(partition, SCHEMA, ("train",), group_size=4)
    yield client
    client.clear(partition)
    status = client.status()
    assert (status.bytes_used, status.bytes_reserved, status.store_bytes) == (0, 0, 0), "a test left bytes behind"
    client.close()


def directory_pid(plane: DataPlane) -> int:
    found = re.search(r"pid=(\d+)", plane.handle.peer)
    assert found
    return int(found[1])


def store_process(plane: DataPlane) -> tuple[int, str, type[DataPlaneError]]:
    """(pid, how errors name it, their class) of the process without which the store cannot continue."""
    address: Any = plane.handle.store.address
    if plane.handle.store.kind == "simple":
        return address["units"][0][2], address["units"][0][1], StoreLost
    if plane.handle.store.kind == "tcp":
        return address["units"][0][1], address["units"][0][0], StoreLost
    if plane.handle.store.kind == "ray":
        return address["pids"][0], address["names"][0], StoreLost
    if plane.handle.store.kind == "mooncake":
        return address["pid"], address["name"], StoreLost
    return directory_pid(plane), plane.handle.actor_name, DirectoryLost


def kill_worker(worker: Any) -> None:
    """End a Worker's process without its having a say."""
    kill(cast(int, ray.get(worker.pid.remote(), timeout=20)))


# ------------------------------------------------------------------ at work


@pytest.mark.also_over("ray", "simple", "mooncake")
def test_concurrent_producers_and_consumers_pass_each_row_once(driver: Any, partition: str, workers: list[Any]) -> None:
    consuming = [worker.consume.remote(partition, 96, 12) for worker in workers[2:]]
    producing = [
        worker.produce.remote(partition, range(n * 100, n * 100 + 24), 4) for n, worker in enumerate(workers[:2])
    ]
    assert ray.get(producing, timeout=60) == [96, 96]
    first, second = ray.get(consuming, timeout=60)
    assert not set(first) & set(second), "a row went to two consumers"
    assert sorted(first + second) == sorted(keys_of(range(24)) + keys_of(range(100, 124)))
    assert driver.clear(partition) == 192


def test_claim_is_woken_within_50_ms_without_polling(driver: Any, partition: str, workers: list[Any]) -> None:
    producer, consumer = workers[0], workers[2]
    delays = []
    for attempt in range(9):
        keys = keys_of(range(attempt, attempt + 1))
        claiming = consumer.claim.remote(partition, 4)
        ray.get(producer.put.remote(partition, keys[:3]))
        wait_until(lambda: driver.status().waiting_claims == 1)
        _, put_at = ray.get(producer.put.remote(partition, keys[3:]))
        meta, claimed_at, calls = ray.get(claiming, timeout=20)
        assert sorted(meta.keys) == keys and calls == 1
        delays.append(claimed_at - put_at)
    assert statistics.median(delays) < 0.05, delays


def test_driver_moves_receipts_only(driver: Any, partition: str, workers: list[Any]) -> None:
    keys = keys_of(range(64))
    ray.get([workers[n // 2].put.remote(partition, keys[n * 64 : n * 64 + 64], n) for n in range(4)])
    before = driver.stats.directory_bytes
    meta = driver.claim(partition, "train", FIRST, 256, whole_groups=True)
    shards = [shard.to_bytes() for shard in meta.split(2)]
    ray.get(
        [worker.read.remote(KVBatchMeta.from_bytes(shard)) for worker, shard in zip(workers[2:], shards, strict=True)]
    )
    driver.release(meta, "train", "done")
    moved = driver.stats.directory_bytes - before + sum(len(shard) for shard in shards)
    assert moved / 256 < 100, f"{moved / 256:.0f} bytes per row through the driver"
    assert (driver.stats.bytes_put, driver.stats.bytes_got) == (0, 0)


# ------------------------------------------------------------------ deaths


@pytest.mark.also_over("ray", "simple", "mooncake")
def test_worker_killed_within_a_put_and_a_claim_leaves_no_trace(
    driver: Any, partition: str, workers: list[Any], tmp_path: Path
) -> None:
    victim, keys = workers.pop(), keys_of(range(16))
    victim.put_and_hang.remote(partition, keys, str(tmp_path / "half"))
    victim.claim.remote(partition, 64)
    wait_until(lambda: (tmp_path / "half").exists() and driver.status().waiting_claims == 1)
    kill_worker(victim)
    status = driver.status()
    assert status.bytes_reserved > 0 and status.rows == 0 and status.store_bytes > 0
    with pytest.raises(KeysNotFound):
        driver.lookup(partition, keys[:1])
    wait_until(lambda: driver.status().bytes_reserved == 0)
    wait_until(lambda: driver.status().store_bytes == 0)
    driver.put(partition, keys, columns(keys))
    assert_rows(driver.get_keys(partition, keys, FIRST), keys, FIRST)
    claimed = driver.claim(partition, "train", FIRST, 64, timeout_s=10)
    assert sorted(claimed.keys) == sorted(keys), "the dead worker's claim keeps no rows for good"


@pytest.mark.also_over("ray")  # whose objects belong to the process that made them
def test_rows_outlive_their_producer_and_return_from_a_dead_consumer(
    driver: Any, partition: str, workers: list[Any]
) -> None:
    victim, keys = workers.pop(), keys_of(range(8))
    receipt, _ = ray.get(victim.put.remote(partition, keys))
    leased, leased_at, _ = ray.get(victim.claim.remote(partition, 32))
    kill_worker(victim)
    assert_rows(driver.get(receipt), keys, FIRST)
    again = driver.claim(partition, "train", FIRST, 32, timeout_s=10)
    assert 1.5 < time.monotonic() - leased_at < 5.0, "the lease was of 2 s"
    assert sorted(again.keys) == sorted(leased.keys) == sorted(keys)
    assert_rows(driver.get(again), list(again.keys), FIRST)
    driver.clear(partition)
    with pytest.raises(RowsCleared, match=keys[0]):
        ray.get(workers[0].read.remote(receipt))


@pytest.mark.also_over("ray", "simple", "mooncake")
def test_killed_store_process_is_named_within_the_bound_and_nothing_is_left(kind: str) -> None:
    plane = open_apart(kind, timeout_s=5)
    client = connect(plane.handle, name="driver")
    client.register("p", BYTES, ("train",))
    keys = [f"k.{n}" for n in range(8)]
    meta = client.put("p", keys, block_of(7, 8))
    waiting = concurrent.futures.ThreadPoolExecutor(1).submit(client.claim, "p", "train", ("x",), 9, timeout_s=2)
    pid, name, error_class = store_process(plane)
    kill(pid)
    for call in (
        lambda: client.put("p", ["new.0"], block_of(8)),
        lambda: client.get_keys("p", keys, ("x",)),
    ):
        started = time.monotonic()
        with pytest.raises(error_class, match=name) as caught:
            call()
        assert time.monotonic() - started < 5.0 + 5.0
        assert f"pid={pid}" in str(caught.value) and caught.value.elapsed_s is not None
    if error_class is DirectoryLost:
        with pytest.raises(DirectoryLost, match=name):
            waiting.result(20)
    else:
        with pytest.raises(ClaimTimeout):
            waiting.result(20)
        assert client.status(timeout_s=5).rows == 8, "the directory goes on"
        if kind != "mooncake":  # All rows of this store are lost with its master.
            wait_until(lambda: client.status(timeout_s=5).lost_rows == 8, "the directory knows of the death")
            assert client.status(timeout_s=5).bytes_used == 0
        assert client.clear("p", timeout_s=10) == 8, "and does not wait for the dead"
    if kind == "shm":
        assert client.get(meta).tensor("x").unique().tolist() == [7], "a receipt needs no directory"
    client.close()
    plane.close()
    assert not list(Path("/dev/shm").glob(f"*{plane.handle.run_id}*"))
