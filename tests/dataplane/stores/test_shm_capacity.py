"""The store `shm` can be filled to its capacity by puts of one size, and holds more than a million blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.codecs.blocks import BlockLayout
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.block_store import Want
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import CapacityExceeded
from headrace.dataplane.factory import connect
from headrace.dataplane.meta import BlockRef
from headrace.dataplane.stores import shared_memory, shm_folder
from headrace.dataplane.stores.shared_memory import SharedMemoryHost, SharedMemoryStore
from headrace.testing.data_plane import fresh_run_id, open_plane

KIB, MIB = 1 << 10, 1 << 20
OLD_SLOTS = 1 << 20
"""Number of slots that the table once had."""


@contextlib.contextmanager
def clients(capacity_mib: int, row_bytes: int, count: int) -> Iterator[list[DataPlaneClient]]:
    with open_plane("shm", capacity_mib=capacity_mib, timeout_s=5) as plane, contextlib.ExitStack() as stack:
        found = [stack.enter_context(connect(plane.handle)) for _ in range(count)]
        found[0].register("t", Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, (row_bytes,))]))
        yield found


def fill(writers: Sequence[DataPlaneClient], capacity: int, row: torch.Tensor) -> int:
    """Put rows one by one, each by the next client, until the capacity has no room for another. Returns how many."""
    put_bytes, number = 0, 0
    while not number or (number + 1) * put_bytes <= capacity:
        writers[number % len(writers)].put("t", [f"k{number}.0"], {"x": row})
        put_bytes = put_bytes or writers[0].status().bytes_used
        number += 1
    status = writers[0].status()
    assert status.rows == number == capacity // put_bytes and status.bytes_used == number * put_bytes
    with pytest.raises(CapacityExceeded, match=f"no room for {put_bytes} bytes"):
        writers[0].put("t", ["more.0"], {"x": row}, timeout_s=0.05)
    return number


@pytest.mark.parametrize(
    ("capacity_mib", "row_bytes"), [(8, 63 * KIB), *[(32, int(size * MIB)) for size in (5.4, 8.01, 9, 10)]]
)
def test_puts_of_one_size_fill_the_capacity_and_can_be_read(capacity_mib: int, row_bytes: int) -> None:
    row = torch.arange(row_bytes, dtype=torch.int64).to(torch.uint8)[None]
    with clients(capacity_mib, row_bytes, 3) as writers:
        count = fill(writers, capacity_mib * MIB, row)
        keys = [f"k{number}.0" for number in (0, count // 2, count - 1)]
        for got in writers[1].get_keys("t", keys, ["x"]).tensor("x"):
            assert torch.equal(got, row[0])


@pytest.mark.parametrize(
    ("capacity_mib", "row_bytes"), [(32, 63 * KIB), *[(512, int(size * MIB)) for size in (5.4, 8.01, 9, 10, 33)]]
)
def test_credit_of_several_clients_leaves_no_holes(
    monkeypatch: pytest.MonkeyPatch, capacity_mib: int, row_bytes: int
) -> None:
    """Only the bookkeeping, without memory, in a pool whose spare bytes do not make up for holes."""
    monkeypatch.setattr(shared_memory, "SPARE_BYTES", 0)
    monkeypatch.setattr(shm_folder, "free_memory", lambda root: 1 << 40)
    monkeypatch.setattr(shared_memory, "reserve_memory", _only_slots)
    monkeypatch.setattr(SharedMemoryStore, "put", lambda self, block_id, location, *rest: location)
    row = torch.zeros(1, row_bytes, dtype=torch.uint8)
    with clients(capacity_mib, row_bytes, 3) as writers:
        count = fill(writers, capacity_mib * MIB, row)
        # Every second put goes, and others take its place.
        writers[0].clear("t", [f"k{number}.0" for number in range(0, count, 2)])
        for number in range(0, count, 2):
            writers[(number // 2) % 2].put("t", [f"again{number}.0"], {"x": row})
        assert writers[0].status().rows == count


def _only_slots(path: Path, offset: int, nbytes: int) -> None:
    if path.name == "slots":
        shm_folder.reserve_memory(path, offset, nbytes)


@pytest.fixture
def host() -> Iterator[SharedMemoryHost]:
    host = SharedMemoryHost(fresh_run_id(), 64 * MIB)
    yield host
    host.close()


def test_blocks_past_the_first_million_are_written_and_read(host: SharedMemoryHost) -> None:
    store, early = SharedMemoryStore(host.spec), host.allocate(0, 64)
    host._next_slot = host._backed_slots = OLD_SLOTS  # as if so many blocks were there
    location = host.allocate(1, 100)
    assert early is not None and location is not None and int.from_bytes(location[:8], "little") >= OLD_SLOTS
    layout, written = BlockLayout(("x",), 1, 0, (100,)), np.arange(100, dtype=np.uint8)
    store.put(1, location, [written], layout.offsets, 1.0)
    want = Want(BlockRef(1, location, layout), (0,))
    for reader in (store, SharedMemoryStore(host.spec)):
        (views,) = reader.get([want], 1.0)
        np.testing.assert_array_equal(views[0], written)
        reader.settle([want])


@pytest.mark.slow
def test_the_pool_is_full_before_the_table_of_blocks_is(host: SharedMemoryHost) -> None:
    count = shared_memory.pool_bytes(64 * MIB) // 64
    assert host.allocate(1, count * 64) is not None
    locations = host.cut(1, [64] * count)
    assert len(set(locations)) == count > OLD_SLOTS
    assert host.allocate(count + 1, 64) is None and "the largest free range has 0 of" in host.shortage()
    for number in np.random.default_rng(0).permutation(count)[:1000].tolist():
        host.free(1 + number, locations[number])
    assert host.usage_bytes() == (count - 1000) * 64
    assert all(host.allocate(count + 2 + number, 64) is not None for number in range(1000))
