"""The directory's process and storage units are killed while rows with pictures are written and read."""

from __future__ import annotations

import threading

import pytest
import torch

from headrace import DataPlane, DataPlaneConfig, Schema, connect, open_data_plane
from headrace.codecs.blobs import Blob, blob_field
from headrace.codecs.schema import Field, Kind
from headrace.dataplane.config import StoreConfig
from headrace.dataplane.errors import ClaimTimeout, StoreLost
from headrace.tests.dataplane.recovery.kills import rows_over_kills
from headrace.tests.process_pool import kill

pytestmark = pytest.mark.processes

IMAGES = blob_field("images", [Field("pixels", Kind.RAGGED, torch.uint8, ndim=2)])
SCHEMA = Schema([Field("number", Kind.PER_SAMPLE, torch.int64), IMAGES])
NUM_PUTS, ROWS, PICTURES = 25, 4, 6


def picture(number: int) -> Blob:
    return Blob(IMAGES, {"pixels": torch.full((64, 1024), number, dtype=torch.uint8)})


def wanted(number: int) -> list[int]:
    """The pictures of a row, so that each picture is in rows of many puts, and some rows have none."""
    return [(number + step) % PICTURES for step in range(number % 3)]


def write(plane: DataPlane, writer: int, failed: list[BaseException]) -> None:
    try:
        with connect(plane.handle) as client:
            for number in range(NUM_PUTS):
                keys = [f"{writer}-{number}.{row}" for row in range(ROWS)]
                listed = [[picture(one) for one in wanted(number + row)] for row in range(ROWS)]
                client.put("p", keys, {"number": torch.arange(number, number + ROWS), "images": listed})
    except BaseException as error:
        failed.append(error)


def consume(plane: DataPlane, seen: list[str], failed: list[BaseException], done: threading.Event) -> None:
    try:
        with connect(plane.handle) as client:
            while not done.is_set():
                try:
                    rows = client.claim("p", "a", ("number", "images"), ROWS, timeout_s=1.0)
                except ClaimTimeout:
                    continue
                numbers, found = client.get(rows, ["number"]).tensor("number"), client.get_blobs(rows, "images")
                values = found.blobs.ragged("pixels").values.view(-1, 64 * 1024)
                for row, number in enumerate(numbers.tolist()):
                    assert [values[i].unique().tolist() for i in found.of(row)] == [[one] for one in wanted(number)]
                client.release(rows, "a", "done")
                client.clear("p", rows.keys)
                seen += rows.keys
    except BaseException as error:
        failed.append(error)


@pytest.mark.parametrize("kind", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_no_picture_is_lost_or_left_when_the_directory_is_killed(kind: str) -> None:
    seen, status = rows_over_kills(kind, SCHEMA, write, consume, 2 * NUM_PUTS * ROWS, 2)
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
