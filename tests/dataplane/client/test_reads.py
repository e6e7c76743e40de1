"""Receipts are read without the directory, waited for, refused on other planes, and notice rows that are gone."""

from __future__ import annotations

import asyncio
import pickle
import threading
from dataclasses import replace

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.async_client import AsyncDataPlaneClient
from headrace.dataplane.client.block_io import read_rows
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.directory import requests
from headrace.dataplane.directory.service import DirectoryService
from headrace.dataplane.errors import (
    DataPlaneTimeout,
    FieldsNotReady,
    ForeignReceipt,
    IntegrityError,
    KeysNotFound,
    RowsCleared,
    SchemaMismatch,
)
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.stores.local import LocalHost
from headrace.testing.data_plane import fresh_run_id, open_plane
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids, small_plane
from headrace.tests.dataplane.rpc.served import Served
from headrace.tests.waiting import in_thread, wait_until


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


def test_a_partition_can_be_dropped(client: DataPlaneClient, plane: DataPlane) -> None:
    client.put("p", ["a.0", "a.1"], {"ids": ids(2)})
    _held = client.claim("p", "a", ["ids"], 1)
    waiting: list[str] = []

    def wait(count: int) -> None:
        with pytest.raises(ValueError, match="'p': not registered") as caught:
            connect(plane.handle).claim("p", "a", ["ids"], count)
        waiting.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(count,)) for count in (5, 1)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_until(lambda number=number: client.status().waiting_claims > number)
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
    with pytest.raises(SchemaMismatch, match="registered again"):
        stale.put("p", ["b.0"], {"ids": ids(1)})
    wide = [torch.arange(3)]
    assert stale.get(stale.put("p", ["b.0"], {"ids": wide})).jagged("ids").values.dtype == torch.int64


def test_damage_is_noticed_and_named(plane: DataPlane) -> None:
    with small_plane(integrity="verify") as plane, connect(plane.handle) as client:
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


def test_a_receipt_of_rows_that_its_blocks_do_not_have_is_damage(plane: DataPlane, client: DataPlaneClient) -> None:
    receipt = client.put("p", [f"k{i}.0" for i in range(4)], {"score": torch.zeros(4)})
    [source] = receipt.sources
    beyond = replace(receipt, sources=(replace(source, row=source.row[::-1] + 4),))
    with pytest.raises(IntegrityError) as caught:
        client.get(beyond)
    assert caught.value.keys == beyond.keys


FOREIGN = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("r", Kind.PER_SAMPLE, torch.float32)])


def open_with_rows(
    kind: str, integrity: str, run_id: str, value: int
) -> tuple[DataPlane, DataPlaneClient, KVBatchMeta]:
    plane = open_plane(kind, capacity_mib=4, integrity=integrity, run_id=run_id)
    client = connect(plane.handle)
    client.register("t", FOREIGN, ["train"])
    columns = {"ids": [torch.full((3,), value, dtype=torch.int32)] * 2, "r": torch.full((2,), float(value))}
    client.put("t", [f"{value}.0", f"{value}.1"], columns)
    return plane, client, client.claim("t", "train", ["ids", "r"], 2)


@pytest.mark.parametrize("same_run_id", [True, False])
@pytest.mark.parametrize("integrity", ["off", "verify"])
@pytest.mark.parametrize("kind", ["local", "shm"])
def test_a_receipt_of_an_earlier_data_plane_is_refused(kind: str, integrity: str, same_run_id: bool) -> None:
    first_id = fresh_run_id()
    plane, client, old = open_with_rows(kind, integrity, first_id, 1)
    travelled = [KVBatchMeta.from_bytes(old.to_bytes()), pickle.loads(pickle.dumps(old)), old.select([1, 0])]
    plane.close()
    plane, client, new = open_with_rows(kind, integrity, first_id if same_run_id else fresh_run_id(), 2)
    with plane:
        for receipt in travelled:
            with pytest.raises(ForeignReceipt, match=r"op=get partition='t' keys=\['1\.") as caught:
                client.get(receipt)
            assert plane.handle.run_id in str(caught.value)
            for outcome in ("done", "retry"):
                with pytest.raises(ForeignReceipt, match="op=release"):
                    client.release(receipt, "train", outcome)
        assert client.status().leased_rows == 2, "the old receipt's lease has the number of the new one's"
        assert client.get(new).tensor("r").tolist() == [2.0, 2.0]
        client.release(new, "train", "done")


def test_checksums_know_the_data_plane() -> None:
    """Bytes that another data plane wrote do not pass, should a store ever hand them out."""
    with open_with_rows("shm", "verify", fresh_run_id(), 1)[0] as plane, connect(plane.handle) as client:
        meta = client.lookup("t", ["1.0", "1.1"])
        forged = replace(meta, plane_id=meta.plane_id ^ 1)
        store = client._operations.store
        assert read_rows(store, meta, ("ids", "r"), check=True, timeout_s=5.0).num_rows == 2
        with pytest.raises(IntegrityError, match="xxh3"):
            read_rows(store, forged, ("ids", "r"), check=True, timeout_s=5.0)


def test_a_lookup_waits_until_all_rows_and_fields_are_there(client: DataPlaneClient, plane: DataPlane) -> None:
    keys = ["a.0", "b.0", "a.0"]
    twin = connect(plane.handle)
    both, with_both = in_thread(lambda: twin.lookup("p", keys, ["ids", "score"], wait=True))
    any_field, with_any = in_thread(lambda: twin.lookup("p", keys, wait=True))
    client.put("p", ["b.0"], {"score": torch.zeros(1)})
    client.put("p", ["a.0"], {"ids": ids(1)})
    client.put("p", ["b.0"], {"ids": ids(1)})
    any_field.join(5)
    assert with_any[0].keys == tuple(keys) and with_any[0].fields == ("ids",)
    assert not with_both
    client.put("p", ["a.0"], {"score": torch.ones(1)})
    both.join(5)
    assert client.get(with_both[0]).tensor("score").tolist() == [1, 0, 1]


def test_a_lookup_that_need_not_wait_does_not(client: DataPlaneClient) -> None:
    client.put("p", ["a.0"], {"ids": ids(1)})
    assert client.lookup("p", ["a.0"], ["ids"], wait=True, timeout_s=0).keys == ("a.0",)
    with pytest.raises(KeysNotFound):
        client.lookup("p", ["b.0"])


def test_a_lookup_out_of_time_names_what_is_missing(client: DataPlaneClient) -> None:
    client.put("p", ["a.0", "a.1", "b.0"], {"ids": ids(3)})
    client.put("p", ["a.1"], {"score": torch.zeros(1)})
    words = r"waited for 4 keys; 1 were never put, 2 lack field 'score' \(\['a.0', 'b.0'\]\) .*'c.0'.*elapsed=0.01s"
    with pytest.raises(DataPlaneTimeout, match=words):
        client.lookup("p", ["a.0", "a.1", "b.0", "c.0"], ["ids", "score"], wait=True, timeout_s=0.01)
    client.put("p", ["b.1"], {"score": torch.zeros(1)})
    with pytest.raises(DataPlaneTimeout, match="no field is written for all of them"):
        client.lookup("p", ["a.0", "b.1"], wait=True, timeout_s=0.01)


def test_a_wait_that_cannot_end_is_refused_or_ended(client: DataPlaneClient, plane: DataPlane) -> None:
    with pytest.raises(SchemaMismatch, match=r"fields: got \['scores'\]"):
        client.lookup("p", ["a.0"], ["scores"], wait=True)
    waiting, results = in_thread(lambda: connect(plane.handle).lookup("p", ["a.0"], wait=True))
    wait_until(lambda: client._link._service._ready_pulse("p")._waiters)  # type: ignore[attr-defined]
    client.unregister("p")
    waiting.join(5)
    assert "'p': not registered" in str(results[0])


def test_a_cancelled_lookup_leaves_nothing(plane: DataPlane, client: DataPlaneClient) -> None:
    async def cancel() -> None:
        async with connect_async(plane.handle) as twin:
            waiting = asyncio.create_task(twin.lookup("p", ["a.0"], wait=True))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await twin.put("p", ["a.0"], {"ids": ids(1)})

    asyncio.run(cancel())
    assert not client._link._service._ready["p"]._waiters  # type: ignore[attr-defined]


def test_lookups_over_sockets_that_are_cancelled_wait_no_more() -> None:
    served = Served()
    waiters = served.service._ready_pulse("p")._waiters

    async def cancel(twin: AsyncDataPlaneClient) -> None:
        waiting = asyncio.create_task(twin.lookup("p", ["a.0"], ["ids"], wait=True))
        while not waiters:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not waiters, "the directory heard of it before the caller continued"

    async def use() -> None:
        async with connect_async(served.handle) as twin:
            await twin.register("p", SCHEMA)
            await cancel(twin)
            waiting = asyncio.create_task(twin.lookup("p", ["a.0"], ["ids"], wait=True))
            await twin.put("p", ["a.0"], {"ids": ids(1)})
            assert (await waiting).keys == ("a.0",)

    try:
        asyncio.run(use())
    finally:
        served.close()


def test_waits_are_forgotten_when_they_end() -> None:
    """Also while nothing is put, as for a reader that waits in slices of time."""

    async def wait_in_vain() -> tuple[bytes, int]:
        service = DirectoryService(DataPlaneConfig(store=StoreConfig(kind="local")), LocalHost("run"))
        await service.call("register", requests.encode(requests.Register("p", SCHEMA, (), 1)))
        reply = await service.call("lookup", requests.encode(requests.Lookup("p", b"ta.0", None, 0.01)))
        return reply, len(service._ready["p"]._waiters)

    reply, left = asyncio.run(wait_in_vain())
    assert left == 0
    with pytest.raises(DataPlaneTimeout, match="1 were never put"):
        KVBatchMeta.from_bytes(requests.body_of(reply, "lookup", 0.0))
