"""Reading ranges of bytes gives the rows that reading whole blocks gives, for all kinds of field and choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.codecs.batch import Batch, Jagged, Ragged
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.block_store import ByteRanges
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import IntegrityError, RowsCleared
from headrace.dataplane.factory import connect
from headrace.dataplane.meta import BlockRef, KVBatchMeta
from headrace.tests.dataplane.client.local_plane import small_plane
from headrace.tests.example_counts import examples

ROWS = 48
SCHEMA = Schema(
    [
        Field("ids", Kind.PER_TOKEN, torch.int32),
        Field("routes", Kind.PER_TOKEN, torch.uint8, (2, 3)),
        Field("reward", Kind.PER_SAMPLE, torch.float32),
        Field("wide", Kind.PER_SAMPLE, torch.bfloat16, (700,)),
        Field("image", Kind.RAGGED, torch.uint8, ndim=2),
        Field("notes", Kind.OBJECT),
    ]
)


class RangedStore:
    """The store `local` of this process, read by ranges as if it were on another host."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.put, self.get, self.settle, self.close = store.put, store.get, store.settle, store.close
        self.moved_bytes = 0
        self.requests = 0

    def lends(self, blocks: Sequence[BlockRef]) -> bool:
        return False

    def read_ranges(self, blocks: Sequence[BlockRef], ranges: Sequence[ByteRanges], timeout_s: float) -> None:
        whole, self.requests = [], self.requests + 1
        for ref in blocks:
            memory = np.zeros(ref.layout.nbytes, np.uint8)
            parts = self._store._host.read(ref.block_id, range(len(ref.layout.part_bytes)))
            for number, part in parts.items():
                memory[ref.layout.offsets[number] : ref.layout.offsets[number] + part.nbytes] = part
            whole.append(memory)
        for item in ranges:
            columns = zip(item.block.tolist(), item.start.tolist(), item.nbytes.tolist(), strict=True)
            pieces = [whole[block][start : start + nbytes] for block, start, nbytes in columns]
            item.into[:] = np.concatenate(pieces) if pieces else []
            self.moved_bytes += item.into.nbytes


@pytest.fixture(scope="module", params=["off", "verify"])
def clients(request: pytest.FixtureRequest) -> Iterator[tuple[DataPlaneClient, DataPlaneClient, KVBatchMeta]]:
    """A client that reads whole blocks, one that reads ranges, and the receipt of rows of every kind."""
    generator = np.random.default_rng(0)
    lengths = [0, 1, *generator.integers(0, 60, ROWS - 2).tolist()]
    rows = {
        "ids": [torch.from_numpy(generator.integers(0, 1 << 30, n).astype(np.int32)) for n in lengths],
        "routes": [torch.from_numpy(generator.integers(0, 255, (n, 2, 3)).astype(np.uint8)) for n in lengths],
        "reward": torch.from_numpy(generator.random(ROWS).astype(np.float32)),
        "wide": torch.from_numpy(generator.random((ROWS, 700)).astype(np.float32)).to(torch.bfloat16),
        "image": [torch.from_numpy(generator.integers(0, 255, (n % 5, 40)).astype(np.uint8)) for n in range(ROWS)],
        "notes": [{"n": number, "text": "x" * (number % 7)} for number in range(ROWS)],
    }
    with (
        small_plane(integrity=request.param, block_rows=8, capacity_mib=16) as plane,
        connect(plane.handle) as whole,
        connect(plane.handle) as ranged,
    ):
        operations = ranged._operations
        operations.store = RangedStore(operations.store)  # type: ignore[assignment]
        whole.register("p", SCHEMA)
        yield whole, ranged, whole.put("p", [f"k.{number}" for number in range(ROWS)], rows)


def assert_same(got: Batch, expected: Batch) -> None:
    assert list(got) == list(expected) and got.num_rows == expected.num_rows
    for name, column in expected.items():
        other = got[name]
        if isinstance(column, Jagged | Ragged):
            assert isinstance(other, Jagged | Ragged) and torch.equal(other.values, column.values), name
        elif isinstance(column, list):
            assert other == column, name
        else:
            assert torch.equal(other, column), name  # pyright: ignore[reportArgumentType]
    if expected.lengths is not None:
        assert got.lengths is not None and np.array_equal(got.lengths, expected.lengths)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=st.one_of(
        st.lists(st.integers(0, ROWS - 1), max_size=60),
        st.integers(0, ROWS).flatmap(lambda a: st.integers(a, ROWS).map(lambda b: list(range(a, b)))),
    ),
    fields=st.lists(st.sampled_from(list(SCHEMA)), min_size=1, unique=True),
)
def test_the_same_rows_come_either_way(clients: Any, rows: list[int], fields: list[str]) -> None:
    whole, ranged, meta = clients
    chosen = meta.select(np.array(rows, dtype=np.int64))
    assert_same(ranged.get(chosen, fields), whole.get(chosen, fields))


def test_few_rows_move_few_bytes(clients: Any) -> None:
    whole, ranged, meta = clients
    store = ranged._operations.store
    before = store.moved_bytes
    ranged.get(meta.select([40]), ["wide", "image"])
    if whole._operations.handle.config.integrity == "off":
        assert 1400 <= store.moved_bytes - before < 1400 + 160 + 8 * 16 + 100, "a row of each, and the images' index"


def test_what_was_cleared_and_what_is_damaged_is_named(clients: Any) -> None:
    whole, ranged, _ = clients
    meta = whole.put("p", ["gone.0", "gone.1"], {"reward": torch.ones(2), "notes": [1, "two"]})
    host = ranged._operations.store._store._host
    if whole._operations.handle.config.integrity == "verify":
        kept = host._blocks[meta.blocks[0].block_id]
        damaged = tuple(part.copy() for part in kept)
        damaged[1][0] ^= 1
        host._blocks[meta.blocks[0].block_id] = damaged
        with pytest.raises(IntegrityError, match="gone.0"):
            ranged.get(meta)
        host._blocks[meta.blocks[0].block_id] = kept
    assert ranged.get(meta)["notes"] == [1, "two"]
    whole.clear("p", meta.keys)
    with pytest.raises(RowsCleared, match="gone.0"):
        ranged.get(meta)


def test_whole_blocks_of_ragged_rows_take_one_request(clients: Any) -> None:
    whole, ranged, meta = clients
    store = ranged._operations.store
    for rows in (range(8, 24), [*range(40, 48), *range(8)]):
        before = store.requests
        chosen = meta.select(np.array(rows))
        assert_same(ranged.get(chosen, ["image", "reward"]), whole.get(chosen, ["image", "reward"]))
        assert store.requests == before + 1
