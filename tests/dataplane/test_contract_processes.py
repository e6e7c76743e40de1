"""The data plane's contract between processes: directory, producers and consumers apart, and any of them may die."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import DataPlaneError, DirectoryLost, KeysNotFound, RowsCleared, StoreLost
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.meta import KVBatchMeta
from headrace.tests.dataplane.rows import BYTES, FIRST, SCHEMA, assert_rows, block_of, columns, fresh_run_id, keys_of
from headrace.tests.dataplane.workers import start

pytestmark = pytest.mark.usefixtures("ray_session")


def open_apart(kind: str, **settings: Any) -> DataPlane:
    """A data plane whose directory is an actor."""
    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": 64})
    return open_data_plane(DataPlaneConfig(store=store, **{"timeout_s": 20, **settings}), run_id=fresh_run_id())


@pytest.fixture(scope="module")
def apart(kind: str, ray_session: None) -> Iterator[DataPlane]:
    with open_apart(kind, integrity="verify") as plane:
        yield plane


@pytest.fixture(scope="module")
def hasty(kind: str, ray_session: None) -> Iterator[DataPlane]:
    """Leases and reservations of a second and a half."""
    with open_apart(kind, lease_s=1.5, reserve_s=1.5, block_rows=8) as plane:
        yield plane


@pytest.fixture(scope="module")
def workers(apart: DataPlane) -> Iterator[list[Any]]:
    workers = start(apart.handle, "producer0", "producer1", "consumer0", "consumer1")
    yield workers
    for worker in workers:
        ray.kill(worker)


@pytest.fixture
def driver(apart: DataPlane, partition: str) -> Iterator[Any]:
    client = connect(apart.handle, name="driver")
    client.register(partition, SCHEMA, ("train",), group_size=4)
    yield client
    client.clear(partition)
    status = client.status()
    assert (status.bytes_used, status.bytes_reserved, status.store_bytes) == (0, 0, 0), "a test left bytes behind"
    client.close()


def wait_until(what: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def kill(worker: Any) -> None:
    """End a Worker's process without its having a say."""
    pid: Any = ray.get(worker.pid.remote(), timeout=20)
    os.kill(pid, signal.SIGKILL)


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# ------------------------------------------------------------------ at work


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
    assert moved / 256 < 100, f"{moved / 256:.0f} bytes a row through the driver"
    assert (driver.stats.bytes_put, driver.stats.bytes_got) == (0, 0)


def test_receipt_outlives_its_producer_and_ends_with_its_rows(driver: Any, apart: DataPlane, partition: str) -> None:
    (producer,) = start(apart.handle, "mortal")
    keys = keys_of(range(8))
    meta, _ = ray.get(producer.put.remote(partition, keys))
    kill(producer)
    assert_rows(driver.get(meta), keys, FIRST)
    driver.clear(partition)
    (reader,) = start(apart.handle, "reader")
    with pytest.raises(RowsCleared, match=keys[0]):
        ray.get(reader.read.remote(meta))
    ray.kill(reader)


# ------------------------------------------------------------------ deaths


def test_put_killed_half_way_shows_nothing_and_gives_its_bytes_back(
    hasty: DataPlane, partition: str, tmp_path: Path
) -> None:
    client = connect(hasty.handle, name="driver")
    client.register(partition, SCHEMA, ("train",))
    (writer,) = start(hasty.handle, "victim")
    keys = keys_of(range(8))
    writer.put_and_hang.remote(partition, keys, str(tmp_path / "half"))
    wait_until((tmp_path / "half").exists)
    kill(writer)
    status = client.status()
    assert status.bytes_reserved > 0 and status.rows == 0 and status.store_bytes > 0
    with pytest.raises(KeysNotFound):
        client.lookup(partition, keys[:1])
    wait_until(lambda: client.status().bytes_reserved == 0, 5)
    assert client.status().store_bytes == 0 and client.status().bytes_used == 0
    client.put(partition, keys, columns(keys))
    assert_rows(client.get_keys(partition, keys, FIRST), keys, FIRST)
    client.clear(partition)


def test_rows_of_a_killed_consumer_return_with_its_lease(hasty: DataPlane, partition: str) -> None:
    client = connect(hasty.handle, name="driver")
    client.register(partition, SCHEMA, ("train",))
    keys = keys_of(range(2))
    client.put(partition, keys, columns(keys))
    (victim,) = start(hasty.handle, "victim")
    meta, claimed_at, _ = ray.get(victim.claim.remote(partition, 8))
    kill(victim)
    again = client.claim(partition, "train", FIRST, 8, timeout_s=10)
    assert 1.0 < time.monotonic() - claimed_at < 5.0
    assert sorted(again.keys) == sorted(meta.keys) == sorted(keys)
    assert_rows(client.get(again), list(again.keys), FIRST)
    client.clear(partition)


def test_waiting_claim_of_a_killed_consumer_takes_no_rows_for_good(hasty: DataPlane, partition: str) -> None:
    client = connect(hasty.handle, name="driver")
    client.register(partition, SCHEMA, ("train",))
    (victim,) = start(hasty.handle, "victim")
    victim.claim.remote(partition, 4)
    wait_until(lambda: client.status().waiting_claims == 1)
    kill(victim)
    keys = keys_of(range(1))
    client.put(partition, keys, columns(keys))
    assert sorted(client.claim(partition, "train", FIRST, 4, timeout_s=10).keys) == keys
    client.clear(partition)


def store_process(plane: DataPlane) -> tuple[int, str, type[DataPlaneError]]:
    """(pid, how errors name it, their class) of the process without which the store cannot go on."""
    address: Any = plane.handle.store.address
    if plane.handle.store.kind == "simple":
        return address["units"][0][2], address["units"][0][1], StoreLost
    if plane.handle.store.kind == "ray":
        return address["pids"][0], address["names"][0], StoreLost
    found = re.search(r"pid=(\d+)", plane.handle.peer)
    assert found
    return int(found[1]), plane.handle.actor_name, DirectoryLost


def test_killed_store_process_is_named_within_the_bound_and_nothing_is_left(kind: str) -> None:
    plane = open_apart(kind, timeout_s=5)
    client = connect(plane.handle, name="driver")
    client.register("p", BYTES, ("train",))
    keys = [f"k.{n}" for n in range(8)]
    meta = client.put("p", keys, block_of(7, 8))
    (worker,) = start(plane.handle, "consumer")
    waiting = worker.claim.remote("p", 9, 60)
    pid, name, error_class = store_process(plane)
    os.kill(pid, signal.SIGKILL)
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
            ray.get(waiting, timeout=20)
    else:
        assert client.status(timeout_s=5).rows == 8, "the directory goes on"
        assert client.clear("p", timeout_s=10) == 8, "and does not wait for the dead"
    if kind == "shm":
        assert client.get(meta).tensor("x").unique().tolist() == [7], "a receipt needs no directory"
    ray.kill(worker)
    client.close()
    plane.close()
    assert not list(Path("/dev/shm").glob(f"*{plane.handle.run_id}*"))


def test_closed_plane_leaves_no_process_and_no_file(kind: str) -> None:
    plane = open_apart(kind)
    client = connect(plane.handle)
    client.register("p", SCHEMA, ("train",))
    client.put("p", ["a.0"], columns(["a.0"]))
    found = re.search(r"pid=(\d+)", plane.handle.peer)
    assert found
    pids = {int(found[1]), store_process(plane)[0]}
    plane.close()
    wait_until(lambda: all(gone(pid) for pid in pids))
    assert not list(Path("/dev/shm").glob(f"*{plane.handle.run_id}*"))
    started = time.monotonic()
    with pytest.raises(DataPlaneError):
        client.get_keys("p", ["a.0"], FIRST)
    assert time.monotonic() - started < 10
    client.close()
