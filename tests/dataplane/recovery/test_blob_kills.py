"""The directory's process and storage units are killed while rows with pictures are written and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace import DataPlaneClient, DataPlaneConfig, KVBatchMeta, Schema, connect, open_data_plane
from headrace.codecs.blobs import Blob, BlobRows, blob_field
from headrace.codecs.schema import Field, Kind
from headrace.dataplane.block_store import Want
from headrace.dataplane.config import StoreConfig
from headrace.dataplane.errors import StoreLost
from headrace.dataplane.stores.shared_memory import SharedMemoryStore
from headrace.dataplane.stores.tcp.wire import Connection
from headrace.tests.dataplane.recovery.kills import ROWS, rows_over_kills
from headrace.tests.process_pool import kill

pytestmark = pytest.mark.processes

IMAGES = blob_field("images", [Field("pixels", Kind.RAGGED, torch.uint8, ndim=2)])
SCHEMA = Schema([Field("number", Kind.PER_SAMPLE, torch.int64), IMAGES])
NUM_PUTS, PICTURES = 25, 6


def picture(number: int) -> Blob:
    return Blob(IMAGES, {"pixels": torch.full((64, 1024), number, dtype=torch.uint8)})


def wanted(number: int) -> list[int]:
    """The pictures of a row, so that each picture is in rows of many puts, and some rows have none."""
    return [(number + step) % PICTURES for step in range(number % 3)]


def fields_of(number: int) -> dict[str, Any]:
    listed = [[picture(one) for one in wanted(number + row)] for row in range(ROWS)]
    return {"number": torch.arange(number, number + ROWS), "images": listed}


def check(client: DataPlaneClient, rows: KVBatchMeta) -> None:
    numbers, found = client.get(rows, ["number"]).tensor("number"), client.get_blobs(rows, "images")
    values = found.blobs.ragged("pixels").values.view(-1, 64 * 1024)
    for row, number in enumerate(numbers.tolist()):
        assert [values[i].unique().tolist() for i in found.of(row)] == [[one] for one in wanted(number)]


@pytest.mark.parametrize("kind", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_no_picture_is_lost_or_left_when_the_directory_is_killed(kind: str) -> None:
    seen, status = rows_over_kills(kind, SCHEMA, fields_of, check, NUM_PUTS, 2)
    assert (status.rows, status.leases, status.blocks, status.bytes_used, status.store_bytes) == (0, 0, 0, 0, 0)
    assert len(seen) == len(set(seen)) == 2 * NUM_PUTS * ROWS


def test_rows_of_a_picture_whose_unit_dies_are_lost_and_can_be_put_again() -> None:
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=16, num_units=2))
    with open_data_plane(config, process=True) as plane:
        handle = plane.handle.over_sockets()
        with connect(handle) as client:
            client.register("p", SCHEMA, ("a",))
            first = client.put("p", ["a.0"], {"number": torch.zeros(1).long(), "images": [[picture(1)]]})
            unit, number, others = int.from_bytes(first.blocks[0].location[:2]), 0, []
            while len(others) < 2:  # Puts are spread over the units.
                number += 1
                listed = [[picture(1)] if not others else [picture(2)]]
                meta = client.put("p", [f"b.{number}"], {"number": torch.tensor([number]), "images": listed})
                if int.from_bytes(meta.blocks[0].location[:2]) != unit:
                    others.append(meta)
                else:
                    client.clear("p", meta.keys)
            kill(plane.processes()[f"unit-{unit}"])
            with pytest.raises(StoreLost):
                client.get_blobs(others[0], "images")
            lost = client.rows("p")
            assert set(lost.keys[lost.lost].tolist()) == {"a.0", *others[0].keys}
            assert client.get_blobs(others[1], "images").blobs.num_rows == 1
            with pytest.raises(StoreLost, match="rows were lost with a process of the store"):
                client.lookup("p", others[0].keys, ["images"])
            again = client.put("p", ["a.0"], {"number": torch.zeros(1).long(), "images": [[picture(1)]]})
            assert client.get_blobs(again, "images").blobs.ragged("pixels").values.unique().tolist() == [1]
            client.clear("p")
            assert client.status().bytes_used == 0


def large(seed: int) -> Blob:
    """A picture with more bytes than the buffers of a connection hold."""
    return Blob(IMAGES, {"pixels": np.random.default_rng(seed).integers(0, 255, (4096, 1024), dtype=np.uint8)})


@pytest.mark.parametrize("way", ["sockets", "shared memory"])
def test_a_unit_that_is_killed_while_its_pictures_are_read_is_named_and_no_byte_is_wrong(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader gets the pictures as they were put, or an error that names the unit; those of other units stay."""
    pictures = [large(seed) for seed in range(4)]
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=64, num_units=2))
    with open_data_plane(config, process=True) as plane:
        handle = plane.handle.over_sockets() if way == "sockets" else plane.handle
        with connect(handle) as writer, connect(handle) as reader:
            writer.register("p", SCHEMA, ("a",))
            metas = [
                writer.put("p", [f"a.{n}"], {"number": torch.tensor([n]), "images": [[one]]})
                for n, one in enumerate(pictures)
            ]
            units = [int.from_bytes(meta.blocks[0].location[:2]) for meta in metas]
            assert set(units) == {0, 1}
            whole = metas[0].concat(metas[1]).concat(metas[2]).concat(metas[3])
            dying, spared = plane.processes()[f"unit-{units[0]}"], [n for n in range(4) if units[n] != units[0]]
            killed = _killing(monkeypatch, way, dying)
            if way == "sockets":
                with pytest.raises(StoreLost) as caught:
                    reader.get_blobs(whole, "images")
                assert f"unit-{units[0]} " in caught.value.peer
            else:  # The memory of the pool outlives its unit, so the read that is under way ends well.
                assert names(reader.get_blobs(whole, "images")) == [one.name for one in pictures]
            assert killed
            with pytest.raises(StoreLost):
                reader.get_blobs(metas[0], "images")
            rows = reader.rows("p")
            assert set(rows.keys[rows.lost].tolist()) == {f"a.{n}" for n in range(4) if n not in spared}
            for n in spared:
                assert names(reader.get_blobs(metas[n], "images")) == [pictures[n].name]
            again = writer.put("p", ["b.0"], {"number": torch.tensor([0]), "images": [pictures]})
            assert names(reader.get_blobs(again, "images")) == [one.name for one in pictures]
            writer.clear("p")
            assert (writer.status().bytes_used, writer.status().blocks) == (0, 0)


def _killing(monkeypatch: pytest.MonkeyPatch, way: str, pid: int) -> list[int]:
    """Kill a unit in the middle of the next read of pictures. Returns the list to which its pid is then added."""
    killed: list[int] = []

    def strike() -> None:
        if not killed:
            killed.append(pid)
            kill(pid)

    receive_into, settle = Connection.receive_into, SharedMemoryStore.settle

    def received(self: Connection, pieces: Sequence[memoryview], deadline: float) -> None:
        receive_into(self, pieces, deadline)
        if sum(piece.nbytes for piece in pieces) > 256 << 10:  # Bytes with a checksum are received in parts.
            strike()

    def settled(self: SharedMemoryStore, wants: Sequence[Want]) -> None:
        if any(want.block.layout.nbytes > 2 << 20 for want in wants):
            strike()
        settle(self, wants)

    if way == "sockets":
        monkeypatch.setattr(Connection, "receive_into", received)
    else:
        monkeypatch.setattr(SharedMemoryStore, "settle", settled)
    return killed


def names(found: BlobRows) -> list[str]:
    """The digests of the pictures of all rows, computed from the bytes that were read."""
    values = found.blobs.ragged("pixels").values.view(-1, 4096, 1024)
    return [Blob(IMAGES, {"pixels": values[i]}).name for i in found.references.index.tolist()]
