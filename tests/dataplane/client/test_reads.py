"""Reads ask no directory, give exactly the rows of their receipt, and notice rows that are cleared or damaged."""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import replace

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import FieldsNotReady, IntegrityError, RowsCleared, SchemaMismatch
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.tests.dataplane.client.local_plane import SCHEMA, config, ids


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
    with pytest.raises(SchemaMismatch, match="registered again"):
        stale.put("p", ["b.0"], {"ids": ids(1)})
    wide = [torch.arange(3)]
    assert stale.get(stale.put("p", ["b.0"], {"ids": wide})).jagged("ids").values.dtype == torch.int64


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


def test_a_receipt_of_rows_that_its_blocks_do_not_have_is_damage(plane: DataPlane, client: DataPlaneClient) -> None:
    receipt = client.put("p", [f"k{i}.0" for i in range(4)], {"score": torch.zeros(4)})
    [source] = receipt.sources
    beyond = replace(receipt, sources=(replace(source, row=source.row[::-1] + 4),))
    with pytest.raises(IntegrityError) as caught:
        client.get(beyond)
    assert caught.value.keys == beyond.keys
