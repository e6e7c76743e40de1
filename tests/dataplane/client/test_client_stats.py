"""What clients count: every call once, with its own seconds and bytes, whoever shares the client."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.errors import ClaimTimeout, RowsCleared
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.status import DataPlaneStatus
from headrace.dataplane.traffic import ClientStats
from headrace.testing.data_plane import open_plane
from headrace.tests.waiting import wait_until

PARTITION = "flow"
SCHEMA = Schema([Field("values", Kind.PER_TOKEN, torch.uint8)])
NAMES = itertools.count()
SIZES = [1000 * size for size in range(1, 9)]
"""Bytes of one row each: a call's bytes tell which call it was."""


@pytest.fixture(scope="module")
def local_plane() -> Iterator[DataPlane]:
    with open_plane(timeout_s=20) as plane:
        with connect(plane.handle) as client:
            client.register(PARTITION, SCHEMA, ("train",))
        yield plane


def put_rows(plane: DataPlane) -> list[KVBatchMeta]:
    """A row of each of SIZES, each put by itself."""
    with connect(plane.handle) as client:
        return [
            client.put(PARTITION, [f"row{next(NAMES)}"], {"values": [torch.zeros(size, dtype=torch.uint8)]}, versions=0)
            for size in SIZES
        ]


def squares(sizes: list[int]) -> float:
    return float(sum(size * size for size in sizes))


def test_a_call_has_its_own_bytes_and_seconds(local_plane: DataPlane) -> None:
    receipts = put_rows(local_plane)
    with connect(local_plane.handle) as client:
        for receipt in receipts:
            client.get(receipt)
        key = f"row{next(NAMES)}"
        client.put(PARTITION, [key], {"values": [torch.zeros(5000, dtype=torch.uint8)]}, versions=0)
        client.get_keys(PARTITION, [key], ["values"])
        client.status()
        total = client.stats.total()
    assert {op: calls.calls for op, calls in total.ops.items()} == {"get": 8, "put": 1, "get_keys": 1, "status": 1}
    get = total.of("get")
    assert (get.nbytes, get.moved, get.moved_xx) == (sum(SIZES), 8, squares(SIZES))
    assert sum(get.buckets) == 8 and 0 < get.percentile(0.5) <= get.percentile(1.0) < 20
    assert total.of("get_keys").nbytes == 5000 and total.of("put").nbytes > 5000
    assert total.of("status").nbytes == total.of("status").moved == 0
    assert (client.stats.bytes_put, client.stats.bytes_got) == (total.bytes_put, sum(SIZES) + 5000)


def test_threads_that_share_a_client_do_not_mix_their_calls_up(
    local_plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = put_rows(local_plane)
    together = threading.Barrier(len(receipts))
    with connect(local_plane.handle) as client, ThreadPoolExecutor(len(receipts)) as pool:
        count_call = client.stats.count_call

        def let_others_run_and_count(op: str, seconds: float, nbytes: int = 0) -> None:
            time.sleep(0.005)
            count_call(op, seconds, nbytes)

        def read(receipt: KVBatchMeta) -> None:
            together.wait(20)
            for _ in range(10):
                client.get(receipt)

        monkeypatch.setattr(client.stats, "count_call", let_others_run_and_count)
        list(pool.map(read, receipts))
        get = client.stats.total().of("get")
    assert (get.calls, get.moved, get.nbytes) == (80, 80, 10 * sum(SIZES))
    assert get.moved_xx == 10 * squares(SIZES), "a call was counted with another's bytes"


def test_tasks_that_share_a_client_do_not_mix_their_calls_up(local_plane: DataPlane) -> None:
    receipts = put_rows(local_plane)

    async def read() -> ClientStats:
        async with connect_async(local_plane.handle) as client:
            for _ in range(10):
                await asyncio.gather(
                    *(client.get(receipt) for receipt in receipts), *(client.status() for _ in receipts)
                )
            return client.stats

    total = asyncio.run(read()).total()
    assert total.of("get").moved_xx == 10 * squares(SIZES)
    assert (total.of("status").calls, total.of("status").nbytes) == (80, 0)


def test_a_call_that_fails_is_counted_and_moves_nothing(local_plane: DataPlane) -> None:
    receipt = put_rows(local_plane)[0]
    with connect(local_plane.handle) as client:
        client.clear(PARTITION, receipt.keys)
        with pytest.raises(RowsCleared):
            client.get(receipt)
        client.clear(PARTITION)
        with pytest.raises(ClaimTimeout):
            client.claim(PARTITION, "train", ["values"], 1, timeout_s=0.2)
        total = client.stats.total()
    assert (total.of("get").calls, total.of("get").moved) == (1, 0)
    assert total.of("claim").percentile(0.5) >= 0.2 / 2**0.25


def test_take_gives_what_is_new_and_the_totals_stay() -> None:
    stats = ClientStats()
    stats.count_call("get", 0.5, 100)
    assert stats.take().of("get").nbytes == 100
    assert stats.take().ops == {}
    stats.count_call("get", 0.25)
    assert stats.take().of("get").nbytes == 0, "bytes are of one call only"
    assert stats.calls == {"get": 2} and stats.bytes_got == 100
    stats.count_directory(7)
    snapshot = stats.snapshot()
    assert snapshot == {
        "calls": 2,
        "bytes_put": 0,
        "bytes_got": 100,
        "directory_calls": 1,
        "directory_bytes": 7,
        "calls/get": 2,
        "seconds/get": 0.75,
    }


def test_the_status_shows_what_is_outstanding_and_who_waits(local_plane: DataPlane) -> None:
    with connect(local_plane.handle) as client, ThreadPoolExecutor(1) as pool:
        client.clear(PARTITION)
        put_rows(local_plane)
        held = client.claim(PARTITION, "train", ["values"], len(SIZES), timeout_s=5)
        waiting = pool.submit(client.claim, PARTITION, "train", ["values"], 1, timeout_s=3)
        wait_until(lambda: client.status().waiting_claims)
        status = client.status()
        assert (status.rows, status.leased_rows, status.leases, status.waiting_claims) == (8, 8, 1, 1)
        assert status.bytes_used >= sum(SIZES) and 0 < status.oldest_lease_s < 10
        assert status.ready == {"values": 8} and status.partitions == {PARTITION: 8} and status.store_kind == "local"
        assert DataPlaneStatus.from_bytes(status.to_bytes()) == status
        client.release(held.select([0]), "train", "retry")
        assert waiting.result(5).keys == (held.keys[0],)
        client.clear(PARTITION)
        status = client.status()
        assert (status.rows, status.bytes_used, status.leases, status.oldest_lease_s) == (0, 0, 0, 0.0)
