"""Clients over the local store: waits and wake-ups, the twins, failed and cancelled puts, ended directories."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.block_io import cut
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import (
    AlreadyWritten,
    CapacityExceeded,
    ClaimTimeout,
    DataPlaneTimeout,
    DirectoryLost,
    FieldsNotReady,
    IntegrityError,
    KeysNotFound,
    LeaseLost,
    RowsCleared,
    SchemaMismatch,
    StoreLost,
)
from headrace.dataplane.factory import DataPlane, connect, connect_async, open_data_plane
from headrace.dataplane.stores.local import LocalHost

SCHEMA = Schema(
    [
        Field(name="ids", kind=Kind.PER_TOKEN, dtype=torch.int32),
        Field(name="score", kind=Kind.PER_SAMPLE, dtype=torch.float32),
        Field(name="blob", kind=Kind.PER_SAMPLE, dtype=torch.uint8, trailing=(100_000,)),
        Field(name="note", kind=Kind.OBJECT),
    ]
)


def config(**options: object) -> DataPlaneConfig:
    store = StoreConfig(kind="local", capacity_mib=1)
    return DataPlaneConfig(**{"store": store, "timeout_s": 5.0, "block_rows": 4} | options)  # type: ignore[arg-type]


@pytest.fixture
def plane() -> Iterator[DataPlane]:
    with open_data_plane(config(), in_process=True) as plane:
        yield plane


@pytest.fixture
def client(plane: DataPlane) -> DataPlaneClient:
    client = connect(plane.handle)
    client.register("p", SCHEMA, ("a",), group_size=2)
    return client


def ids(count: int, base: int = 0) -> list[torch.Tensor]:
    return [torch.arange(base + i, base + 2 * i, dtype=torch.int32) for i in range(count)]


def test_blocks_are_cut_between_groups() -> None:
    assert cut([], 4) == []
    assert cut(list("aabbbcc"), 4) == [(0, 2), (2, 5), (5, 7)]
    assert cut(list("aabb"), 4) == [(0, 4)]
    assert cut(list("abbbbbbbbbc"), 4) == [(0, 1), (1, 5), (5, 9), (9, 11)]
    for groups, size in (("aaab", 1), ("abcabc", 2), ("aaaaaa", 6)):
        blocks = cut(list(groups), size)
        assert [row for start, stop in blocks for row in range(start, stop)] == list(range(len(groups)))
        assert max(stop - start for start, stop in blocks) <= size


def test_a_reader_with_a_receipt_asks_no_directory(client: DataPlaneClient, plane: DataPlane) -> None:
    keys = [f"g{i // 2}.{i % 2}" for i in range(10)]
    receipt = client.put("p", keys, {"ids": ids(10), "score": torch.arange(10.0)}, versions=3)
    reader = connect(pickle.loads(pickle.dumps(plane.handle)), name="reader")
    order = [9, 0, 0, 4]
    batch = reader.get(type(receipt).from_bytes(receipt.to_bytes()).select(order))
    assert batch.tensor("score").tolist() == [9, 0, 0, 4]
    assert torch.equal(batch.jagged("ids").values, torch.cat([ids(10)[i] for i in order]))
    assert reader.stats.directory_calls == 0 and reader.stats.bytes_got == 4 * 4 + 4 * (9 + 4)
    assert list(reader.get(receipt, ("score",))) == ["score"]
    with pytest.raises(FieldsNotReady, match="note"):
        reader.get(receipt, ("note",))
    with pytest.raises(SchemaMismatch, match="nope"):
        reader.get(receipt, ("nope",))


def test_nothing_put_is_nothing_done(client: DataPlaneClient) -> None:
    receipt = client.put("p", [], {"ids": [], "note": []})
    assert len(receipt) == 0 and client.get(receipt).num_rows == 0
    assert client.lookup("p", []).keys == () and client.get_keys("p", [], ("ids",)).num_rows == 0
    with pytest.raises(SchemaMismatch, match="nope"):
        client.put("p", [], {"nope": []})
    assert client.status().blocks == 0


def test_errors_name_what_they_are_about(client: DataPlaneClient) -> None:
    with pytest.raises(SchemaMismatch, match=r"'idz', did you mean 'ids'.*op=put partition='p' keys=\['a.0'\]"):
        client.put("p", ["a.0"], {"idz": ids(1)})
    client.put("p", ["a.0"], {"ids": ids(1)})
    with pytest.raises(AlreadyWritten, match="a.0"):
        client.put("p", ["a.0"], {"ids": ids(1)})
    with pytest.raises(ClaimTimeout, match=r"fields \['score'\] of 2 rows; 0 of the partition's 1 rows.*elapsed=0.05"):
        client.claim("p", "a", ("score",), 2, timeout_s=0.05)
    with pytest.raises(ValueError, match="timeout_s"):
        client.status(timeout_s=-1)
    assert client.claim("p", "a", ("ids",), 1, timeout_s=0).keys == ("a.0",), "0: whatever is there now"


def test_replaced_and_cleared_rows(client: DataPlaneClient) -> None:
    old = client.put("p", ["a.0", "b.0"], {"ids": ids(2), "note": ["x", {"y": 1}]})
    new = client.put("p", ["a.0", "b.0"], {"ids": ids(2, 7), "note": ["z", None]}, replace=True)
    with pytest.raises(RowsCleared, match=r"partition='p' keys=\['a.0', 'b.0'\]"):
        client.get(old)
    assert client.get(new).objects("note") == ["z", None]
    client.put("p", ["c.0"], {"ids": ids(1)})
    both = client.lookup("p", ["c.0", "a.0", "b.0"], ("ids",))
    assert client.clear("p", ["a.0", "b.0"]) == 2
    with pytest.raises(RowsCleared) as caught:
        client.get(both)
    assert caught.value.keys == ("a.0", "b.0")


def test_a_waiting_claim_is_woken_by_the_put_that_completes_it(client: DataPlaneClient, plane: DataPlane) -> None:
    woken: list[float] = []

    def wait() -> None:
        meta = connect(plane.handle).claim("p", "a", ("ids", "score"), 2, whole_groups=True)
        woken.append(time.perf_counter())
        assert meta.keys == ("g.0", "g.1")

    thread = threading.Thread(target=wait)
    thread.start()
    client.put("p", ["g.0", "g.1", "h.0"], {"ids": ids(3)})
    client.put("p", ["g.0", "h.0"], {"score": torch.zeros(2)})
    time.sleep(0.1)
    assert client.status().waiting_claims == 1 and not woken
    client.put("p", ["g.1"], {"score": torch.zeros(1)})
    put = time.perf_counter()
    thread.join(5)
    assert woken[0] - put < 0.05


def test_claims_of_a_task_are_served_in_order(client: DataPlaneClient, plane: DataPlane) -> None:
    served: list[tuple[str, int]] = []

    def wait(name: str, count: int) -> None:
        served.append((name, len(connect(plane.handle).claim("p", "a", ("ids",), count))))

    threads = []
    for number, (name, count) in enumerate((("large", 4), ("small", 1))):
        threads.append(threading.Thread(target=wait, args=(name, count)))
        threads[-1].start()
        while client.status().waiting_claims <= number:
            time.sleep(0.005)
    client.put("p", ["a.0", "b.0"], {"ids": ids(2)})
    time.sleep(0.05)
    assert served == []
    client.put("p", ["c.0", "d.0"], {"ids": ids(2)})
    threads[0].join(5)
    assert served == [("large", 4)]
    client.put("p", ["e.0"], {"ids": ids(1)})
    threads[1].join(5)
    assert served == [("large", 4), ("small", 1)]


def test_rows_of_an_expired_lease_wake_a_claim() -> None:
    with open_data_plane(config(lease_s=0.3), in_process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0"], {"ids": ids(1)})
        gone = connect(plane.handle)
        dead = gone.claim("p", "a", ("ids",), 1)
        started = time.perf_counter()
        gone.close()
        assert client.claim("p", "a", ("ids",), 1).keys == ("a.0",)
        assert time.perf_counter() - started > 0.15
        with pytest.raises(LeaseLost, match="a.0"):
            client.release(dead, "a", "done")


def test_a_lease_lasts_as_long_as_its_client() -> None:
    with open_data_plane(config(lease_s=1.0), in_process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0", "b.0"], {"ids": ids(2)})
        holder = connect(plane.handle)
        held = holder.claim("p", "a", ("ids",), 2)
        holder.release(held.select([0]), "a", "done")
        while (status := client.status()).oldest_lease_s < 2.5:
            assert status.leased_rows == 1, "the lease of a live consumer has run out"
            time.sleep(0.05)
        with pytest.raises(ClaimTimeout, match="1 leased"):
            client.claim("p", "a", ("ids",), 1, timeout_s=0)
        holder.release(held.select([1]), "a", "retry")
        again = holder.claim("p", "a", ("ids",), 1)
        del holder  # nobody closed it
        assert client.claim("p", "a", ("ids",), 1).keys == again.keys, "its rows return"


def test_leases_are_renewed_for_asyncio_too_and_a_blocked_loop_keeps_them() -> None:
    with open_data_plane(config(lease_s=1.0), in_process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0"], {"ids": ids(1)})

        async def hold() -> None:
            async with connect_async(plane.handle) as twin:
                held = await twin.claim("p", "a", ("ids",), 1)
                while client.status().oldest_lease_s < 1.5:  # the event loop does not run meanwhile
                    assert client.status().leased_rows == 1
                    time.sleep(0.05)
                await twin.release(held, "a", "done")

        asyncio.run(hold())


def test_renewals_that_come_during_a_stall_of_the_directory_count() -> None:
    with open_data_plane(config(lease_s=0.5), in_process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0"], {"ids": ids(1)})
        held = client.claim("p", "a", ("ids",), 1)
        client._link._loop.call_soon_threadsafe(time.sleep, 1.5)  # type: ignore[attr-defined]
        assert client.status().leased_rows == 1
        client.release(held, "a", "done")


def test_who_waits_behind_others_is_told_so(client: DataPlaneClient, plane: DataPlane) -> None:
    client.put("p", [f"a.{n}" for n in range(2)], {"ids": ids(2), "blob": torch.zeros(2, 100_000, dtype=torch.uint8)})
    other = connect(plane.handle)

    def claim_more() -> None:
        with pytest.raises(ClaimTimeout, match=r"of 100 rows; 2 of the partition's 2 rows are ready \(op"):
            other.claim("p", "a", ["ids"], 100, timeout_s=1.0)

    def put_more() -> None:
        with pytest.raises(CapacityExceeded, match=r"of 1048576 \(op"):
            other.put(
                "p", [f"b{n}" for n in range(9)], {"blob": torch.zeros(9, 100_000, dtype=torch.uint8)}, timeout_s=1.0
            )

    threads = [threading.Thread(target=claim_more), threading.Thread(target=put_more)]
    for thread in threads:
        thread.start()
    while client.status().waiting_claims + client.status().waiting_puts < 2:
        time.sleep(0.005)
    with pytest.raises(ClaimTimeout, match="2 rows are ready, behind 1 claim that waits for 100 rows"):
        client.claim("p", "a", ["ids"], 1, timeout_s=0)
    with pytest.raises(CapacityExceeded, match=r"of 1048576, behind 1 put that waits for 9\d{5} bytes"):
        client.put("p", ["c"], {"blob": torch.zeros(1, 100_000, dtype=torch.uint8)}, timeout_s=0)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert len(client.claim("p", "a", ["ids"], 1, timeout_s=0)) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda client: client.claim("p", "a", ["ids"], 1.0), "n: got 1.0, expected an integer"),
        (
            lambda client: client.claim("p", "a", ["ids"], 1, min_version="3"),
            "min_version: got '3', expected an integer",
        ),
        (
            lambda client: client.put("p", ["a"], {"ids": ids(1)}, groups=[3]),
            "groups: got 3, expected non-empty strings",
        ),
        (lambda client: client.put("p", ["\udc80"], {"ids": ids(1)}), "keys: got '.udc80', expected .* valid Unicode"),
        (lambda client: client.lookup("p", ["a\0b"]), "keys: got 'a.x00b', expected .* without NUL"),
    ],
)
def test_mistakes_in_arguments_are_named(client: DataPlaneClient, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(client)
    assert len(client.put("p", ["\U0001f99c\n.0"], {"ids": ids(1)})) == 1
    assert len(client.claim("p", "a", ["ids"], cast(Any, np.int64(1)))) == 1


def test_a_partition_can_be_dropped(client: DataPlaneClient, plane: DataPlane) -> None:
    client.put("p", ["a.0", "a.1"], {"ids": ids(2)})
    client.claim("p", "a", ["ids"], 1)
    waiting: list[str] = []

    def wait(count: int) -> None:
        with pytest.raises(ValueError, match="'p': not registered") as caught:
            connect(plane.handle).claim("p", "a", ["ids"], count)
        waiting.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(count,)) for count in (5, 1)]
    for number, thread in enumerate(threads):
        thread.start()
        while client.status().waiting_claims <= number:
            time.sleep(0.005)
    stale = connect(plane.handle)
    stale.put("p", ["b.0"], {"ids": ids(1)})
    assert client.unregister("p") == 3
    for thread in threads:
        thread.join(5)
    assert len(waiting) == 2
    status = client.status()
    assert status.partitions == {} and (status.leases, status.waiting_claims, status.bytes_used) == (0, 0, 0)
    for call in (client.unregister, client.clear, lambda name: client.put(name, ["a.0"], {"ids": ids(1)})):
        with pytest.raises(ValueError, match="not registered"):
            call("p")
    client.register("p", Schema([Field("ids", Kind.PER_TOKEN, torch.int64)]), ("a",))
    with pytest.raises(SchemaMismatch, match="registered anew"):
        stale.put("p", ["b.0"], {"ids": ids(1)})
    wide = [torch.arange(3)]
    assert stale.get(stale.put("p", ["b.0"], {"ids": wide})).jagged("ids").values.dtype == torch.int64


def test_a_put_waits_for_room(client: DataPlaneClient, plane: DataPlane) -> None:
    full = client.put("p", [f"k{i}" for i in range(8)], {"blob": torch.zeros(8, 100_000, dtype=torch.uint8)})
    more = {"blob": torch.ones(4, 100_000, dtype=torch.uint8)}
    with pytest.raises(CapacityExceeded, match=r"no room for 400\d\d\d bytes: 80\d+ in use and 0 reserved of 1048576"):
        client.put("p", ["m0", "m1", "m2", "m3"], more, timeout_s=0.1)
    timer = threading.Timer(0.1, lambda: connect(plane.handle).clear("p", full.keys[:4]))
    timer.start()
    started = time.perf_counter()
    client.put("p", ["m0", "m1", "m2", "m3"], more)
    assert 0.05 < time.perf_counter() - started < 1.0
    timer.join()
    with pytest.raises(CapacityExceeded, match="more than the capacity"):
        client.put("p", [f"n{i}" for i in range(11)], {"blob": torch.zeros(11, 100_000, dtype=torch.uint8)})


def test_a_store_without_room_does_not_spin(monkeypatch: pytest.MonkeyPatch, client: DataPlaneClient) -> None:
    calls: list[int] = []
    monkeypatch.setattr(LocalHost, "allocate", lambda self, block_id, nbytes: calls.append(block_id))
    with pytest.raises(CapacityExceeded):
        client.put("p", ["a.0"], {"ids": ids(1)}, timeout_s=0.2)
    assert len(calls) == 2, "once, and once more after looking, which may free what a writer held"
    assert client.status().bytes_reserved == 0


def test_a_failed_put_leaves_nothing(monkeypatch: pytest.MonkeyPatch, client: DataPlaneClient) -> None:
    written = LocalHost.write

    def fail(self: LocalHost, block_id: int, parts: object) -> None:
        if block_id % 2 == 0:
            raise StoreLost("gone", peer="the store")
        written(self, block_id, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalHost, "write", fail)
    with pytest.raises(StoreLost):
        client.put("p", [f"k{i}.0" for i in range(8)], {"ids": ids(8)})
    monkeypatch.undo()
    status = client.status()
    assert (status.rows, status.bytes_used, status.bytes_reserved, status.store_bytes) == (0, 0, 0, 0)
    client.put("p", [f"k{i}.0" for i in range(8)], {"ids": ids(8)})


def test_a_late_writer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    written = LocalHost.write

    def late(self: LocalHost, block_id: int, parts: object) -> None:
        written(self, block_id, parts)  # type: ignore[arg-type]
        time.sleep(0.3)

    monkeypatch.setattr(LocalHost, "write", late)
    with open_data_plane(config(reserve_s=0.1), in_process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA)
        with pytest.raises(DataPlaneTimeout, match="reserve_s=0.1"):
            client.put("p", ["a.0"], {"ids": ids(1)})
        assert (client.status().rows, client.status().store_bytes) == (0, 0)


def test_a_writer_that_begins_too_late_is_refused_and_leaves_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = LocalHost.write

    def late(self: LocalHost, block_id: int, parts: object) -> None:
        while self.usage_bytes():  # until its room is taken back
            time.sleep(0.01)
        written(self, block_id, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalHost, "write", late)
    with open_data_plane(config(reserve_s=0.1), in_process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA)
        with pytest.raises(DataPlaneTimeout, match="reserve_s=0.1.*op=put partition='p' keys=.'a.0'"):
            client.put("p", ["a.0"], {"ids": ids(1)})
        assert not client._operations.store._host._blocks  # type: ignore[attr-defined]


def test_damage_is_noticed_and_named(plane: DataPlane) -> None:
    with open_data_plane(config(integrity="verify"), in_process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA)
        receipt = client.put("p", [f"k{i}.0" for i in range(8)], {"ids": ids(8), "score": torch.zeros(8)})
        assert client.get(receipt).num_rows == 8
        host = client._operations.store._host  # type: ignore[attr-defined]
        parts = host._blocks[receipt.blocks[1].block_id]
        parts[1].flags.writeable = True
        parts[1][0] ^= 1
        with pytest.raises(IntegrityError) as caught:
            client.get(receipt)
        assert caught.value.keys == ("k4.0", "k5.0", "k6.0", "k7.0")
        assert client.get(receipt.select([0, 3])).num_rows == 2


def test_async_twin(plane: DataPlane, client: DataPlaneClient) -> None:
    async def use() -> None:
        async with connect_async(plane.handle, name="twin") as twin:
            waiting = asyncio.create_task(twin.claim("p", "a", ("ids",), 2))
            await asyncio.sleep(0.02)
            receipt = await twin.put("p", ["g.0", "g.1"], {"ids": ids(2)}, tags={"t": np.ones(2)})
            claimed = await waiting
            assert claimed.keys == receipt.keys and claimed.tags["t"].tolist() == [1, 1]
            assert torch.equal((await twin.get(claimed)).jagged("ids").values, torch.cat(ids(2)))
            await twin.release(claimed, "a", "retry")
            assert len(await twin.claim("p", "a", ("ids",), 1)) == 1
            assert (await twin.get_keys("p", ["g.1"], ("ids",))).num_rows == 1
            with pytest.raises(ClaimTimeout):
                await twin.claim("p", "a", ("ids",), 2, timeout_s=0.02)
            assert (await twin.status("p")).leased_rows == 1
            assert await twin.clear("p") == 2

    asyncio.run(use())


def test_twins_have_the_same_methods() -> None:
    import inspect

    from headrace.dataplane.client.async_client import AsyncDataPlaneClient

    def methods(of: type) -> dict[str, list[inspect.Parameter]]:
        found = {name: call for name, call in vars(of).items() if inspect.isfunction(call) and name[0] != "_"}
        return {name: list(inspect.signature(call).parameters.values()) for name, call in found.items()}

    assert methods(DataPlaneClient) == methods(AsyncDataPlaneClient)


def test_a_cancelled_put_waits_for_its_bytes_and_takes_everything_back(
    monkeypatch: pytest.MonkeyPatch, plane: DataPlane, client: DataPlaneClient
) -> None:
    moving, go_on = threading.Event(), threading.Event()
    written = LocalHost.write

    def slow(self: LocalHost, block_id: int, parts: object) -> None:
        moving.set()
        assert go_on.wait(5)
        written(self, block_id, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalHost, "write", slow)

    async def cancel() -> None:
        async with connect_async(plane.handle) as twin:
            put = asyncio.create_task(twin.put("p", ["a.0"], {"ids": ids(1)}))
            await asyncio.to_thread(moving.wait, 5)
            put.cancel()
            await asyncio.sleep(0.05)
            assert not put.done(), "the store still reads its bytes"
            put.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await put
            status = await twin.status()
            assert (status.rows, status.bytes_reserved, status.store_bytes) == (0, 0, 0)

    asyncio.run(cancel())


def test_async_calls_do_not_wait_behind_other_threads_of_the_loop(plane: DataPlane, client: DataPlaneClient) -> None:
    receipt = client.put("p", ["a.0"], {"ids": ids(1)})
    go_on = threading.Event()

    async def use() -> None:
        loop = asyncio.get_running_loop()
        hanging = [loop.run_in_executor(None, go_on.wait, 30) for _ in range(64)]  # tools that do not return
        async with connect_async(plane.handle) as twin:
            try:
                assert (await asyncio.wait_for(twin.get(receipt, timeout_s=5), 10)).num_rows == 1
            finally:
                go_on.set()
            await asyncio.gather(*hanging)

    asyncio.run(use())


def test_the_wait_for_a_thread_counts_in_the_time_limit(
    plane: DataPlane, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = client.put("p", ["a.0"], {"ids": ids(1)})
    go_on = threading.Event()
    read = LocalHost.read
    monkeypatch.setattr(LocalHost, "read", lambda *arguments: (go_on.wait(30), read(*arguments))[1])

    async def use() -> None:
        async with connect_async(plane.handle) as twin:
            slow = [asyncio.create_task(twin.get(receipt)) for _ in range(twin._threads._max_workers)]
            await asyncio.sleep(0)
            try:
                with pytest.raises(DataPlaneTimeout, match="no thread was free.*op=get"):
                    await asyncio.wait_for(twin.get(receipt, timeout_s=0.1), 10)
                queued = asyncio.create_task(twin.get(receipt, timeout_s=30))
                await asyncio.sleep(0)
                queued.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await queued
            finally:
                go_on.set()
            assert [batch.num_rows for batch in await asyncio.gather(*slow)] == [1] * len(slow)
        with pytest.raises(DirectoryLost, match="closed"):
            await twin.get(receipt)
        await twin.close()

    asyncio.run(use())


@pytest.mark.processes
def test_a_forked_process_is_told_that_the_directory_is_not_its_own(plane: DataPlane, client: DataPlaneClient) -> None:
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            started = time.monotonic()
            for call in (client.status, lambda: connect(plane.handle)):
                with pytest.raises(DirectoryLost, match="forked"):
                    call()
            plane.close()
            assert time.monotonic() - started < 2
            os.write(tell, b"told")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(told, 4) == b"told"
    assert client.status().rows == 0, "the parent's goes on"


def test_closed_data_plane(plane: DataPlane, client: DataPlaneClient) -> None:
    failed: list[Exception] = []

    def wait() -> None:
        try:
            client.claim("p", "a", ("ids",), 1)
        except DirectoryLost as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while client.status().waiting_claims == 0:
        time.sleep(0.005)
    plane.close()
    plane.close()
    thread.join(5)
    assert "closed" in str(failed[0])
    with pytest.raises(DirectoryLost, match="closed"):
        client.status()
    with pytest.raises(DirectoryLost, match="no such data plane"):
        connect(plane.handle)


def test_open_refuses_what_it_cannot_give(plane: DataPlane) -> None:
    with pytest.raises(ValueError, match="this process has a data plane of that name"):
        open_data_plane(config(), run_id=plane.handle.run_id, in_process=True)
    with pytest.raises(ValueError, match="run_id"):
        open_data_plane(config(), run_id="a/b", in_process=True)


def test_directory_in_an_actor_and_its_death(ray_session: None) -> None:
    with open_data_plane(config(timeout_s=3.0)) as plane, connect(plane.handle, name="test") as client:
        client.register("p", SCHEMA, ("a",))
        receipt = client.put("p", ["a.0", "b.0"], {"ids": ids(2), "note": ["x", "y"]})
        assert client.get(receipt).objects("note") == ["x", "y"]
        with pytest.raises(ClaimTimeout):
            client.claim("p", "a", ("score",), 1, timeout_s=0.1)

        async def twin() -> None:
            async with connect_async(plane.handle) as other:
                assert len(await other.claim("p", "a", ("ids",), 2)) == 2

        asyncio.run(twin())
        pid = int(plane.handle.peer.split("pid=")[1].split()[0])
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        started = time.perf_counter()
        with pytest.raises(DirectoryLost, match=f"pid={pid}.*elapsed") as caught:
            client.claim("p", "a", ("score",), 1)
        assert caught.value.op == "claim" and time.perf_counter() - started < 10
        with pytest.raises(DirectoryLost):
            client.put("p", ["c.0"], {"ids": ids(1)})


def test_errors_count_all_keys(client: DataPlaneClient) -> None:
    client.put("p", [f"k{i}" for i in range(99)], {"score": torch.zeros(99)})
    with pytest.raises(AlreadyWritten, match=r"'k4', ... 94 more\]"):
        client.put("p", [f"k{i}" for i in range(99)], {"score": torch.zeros(99)})


def test_a_store_that_cannot_start_says_why(ray_session: None) -> None:
    with (
        open_data_plane(config(store=StoreConfig(kind="shm", capacity_mib=1)), run_id="twice", in_process=True),
        pytest.raises(ValueError, match="twice"),
    ):
        open_data_plane(config(store=StoreConfig(kind="shm", capacity_mib=1)), run_id="twice")


def test_numbers_that_do_not_travel_are_refused(plane: DataPlane) -> None:
    client = connect(plane.handle)
    client.register("wide", Schema([Field("none", Kind.PER_TOKEN, torch.uint8, trailing=(0,))]), ["a"])
    long = torch.empty(((1 << 31) + 5, 0), dtype=torch.uint8)  # of no bytes
    with pytest.raises(SchemaMismatch, match="'b.1' has 2147483653 tokens, expected at most 2147483647"):
        client.put("wide", ["b.0", "b.1"], {"none": [long[:3], long]})
    with pytest.raises(KeysNotFound):
        client.lookup("wide", ["b.0"])
    client.put("wide", ["b.2"], {"none": [long[: (1 << 31) - 1]]})
    assert client.get_keys("wide", ["b.2"], ["none"]).jagged("none").lengths.tolist() == [(1 << 31) - 1]
    for versions in (1 << 63, np.array([1 << 63], np.uint64)):
        with pytest.raises(ValueError, match="versions: got 9223372036854775808, expected at most 9223372036854775807"):
            client.put("wide", ["v.0"], {"none": [long[:1]]}, versions=versions)
    receipt = client.put("wide", ["v.0"], {"none": [long[:1]]}, versions=np.array([(1 << 63) - 1], np.uint64))
    assert receipt.versions.tolist() == client.lookup("wide", ["v.0"]).versions.tolist() == [(1 << 63) - 1]
    with pytest.raises(ValueError, match="min_version: got 9223372036854775808"):
        client.claim("wide", "a", ["none"], 1, min_version=1 << 63)


def test_a_block_of_more_rows_than_a_slot_can_name_is_refused() -> None:
    with pytest.raises(ValueError, match="block_rows"):
        DataPlaneConfig(block_rows=(1 << 24) + 1)
    assert DataPlaneConfig(block_rows=1 << 24).block_rows == 1 << 24


def test_a_row_without_dimensions_is_no_ragged_field() -> None:
    with pytest.raises(ValueError, match="'img': ndim 0, expected at least 1"):
        Field("img", Kind.RAGGED, torch.uint8, ndim=0)


def test_blocks_are_bounded_by_the_bytes_of_objects_too(plane: DataPlane) -> None:
    store = StoreConfig(kind="local", capacity_mib=64)
    with open_data_plane(config(store=store, block_rows=None), in_process=True) as wide, connect(wide.handle) as client:
        client.register("t", Schema([Field("talk", Kind.OBJECT), Field("n", Kind.PER_SAMPLE, torch.int32)]))
        keys = [f"k{number}.0" for number in range(2000)]
        talks = [{"role": "user", "text": str(number) * 2500} for number in range(2000)]
        meta = client.put("t", keys, {"talk": talks, "n": torch.arange(2000, dtype=torch.int32)})
        assert (
            max(max(block.layout.part_bytes) for block in meta.blocks)
            < 5 << 20
            < sum(block.layout.nbytes for block in meta.blocks)
        )
        some = meta.select([1999, 0, 777])
        assert client.get(some).objects("talk") == [talks[1999], talks[0], talks[777]]
        with pytest.raises(TypeError, match="field 'talk', row 1: "):
            client.put("t", ["x.0", "x.1"], {"talk": [{}, {"a": object()}], "n": torch.zeros(2, dtype=torch.int32)})
