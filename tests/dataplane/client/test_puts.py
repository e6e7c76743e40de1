"""Puts wait for room, leave nothing when they fail or come too late, and cut their rows into bounded blocks."""

from __future__ import annotations

import time

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.block_io import MOST_BYTES, cut
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import CapacityExceeded, DataPlaneTimeout, SchemaMismatch
from headrace.dataplane.factory import DataPlane, connect
from headrace.dataplane.stores.local import LocalHost
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids, small_plane


def test_blocks_are_cut_between_groups() -> None:
    assert cut([], 4) == []
    assert cut(list("aabbbcc"), 4) == [(0, 2), (2, 5), (5, 7)]
    assert cut(list("aabb"), 4) == [(0, 4)]
    assert cut(list("abbbbbbbbbc"), 4) == [(0, 1), (1, 5), (5, 9), (9, 11)]
    for groups, size in (("aaab", 1), ("abcabc", 2), ("aaaaaa", 6)):
        blocks = cut(list(groups), size)
        assert [row for start, stop in blocks for row in range(start, stop)] == list(range(len(groups)))
        assert max(stop - start for start, stop in blocks) <= size


def test_blocks_are_bounded_by_the_bytes_of_objects_too(plane: DataPlane) -> None:
    with small_plane(capacity_mib=64, block_rows=None) as wide, connect(wide.handle) as client:
        client.register("t", Schema([Field("talk", Kind.OBJECT), Field("n", Kind.PER_SAMPLE, torch.int32)]))
        keys = [f"k{number}.0" for number in range(2000)]
        talks = [{"role": "user", "text": str(number) * 2500} for number in range(2000)]
        meta = client.put("t", keys, {"talk": talks, "n": torch.arange(2000, dtype=torch.int32)})
        assert max(max(block.layout.part_bytes) for block in meta.blocks) <= MOST_BYTES
        assert sum(block.layout.nbytes for block in meta.blocks) > 4 * MOST_BYTES
        some = meta.select([1999, 0, 777])
        assert client.get(some).objects("talk") == [talks[1999], talks[0], talks[777]]
        with pytest.raises(SchemaMismatch, match="field 'talk', row 1: .*x.1"):
            client.put("t", ["x.0", "x.1"], {"talk": [{}, {"a": object()}], "n": torch.zeros(2, dtype=torch.int32)})


def test_a_store_without_room_does_not_spin(monkeypatch: pytest.MonkeyPatch, client: DataPlaneClient) -> None:
    calls: list[int] = []
    monkeypatch.setattr(LocalHost, "allocate", lambda self, block_id, nbytes: calls.append(block_id))
    with pytest.raises(CapacityExceeded):
        client.put("p", ["a.0"], {"ids": ids(1)}, timeout_s=0.2)
    assert len(calls) == 3, "at once, in its turn, and once more after looking, which may free what a writer held"
    assert client.status().bytes_reserved == 0


def test_a_late_writer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    written = LocalHost.write

    def late(self: LocalHost, block_id: int, parts: object) -> None:
        written(self, block_id, parts)  # type: ignore[arg-type]
        time.sleep(0.3)

    monkeypatch.setattr(LocalHost, "write", late)
    with small_plane(reserve_s=0.1) as plane, connect(plane.handle) as client:
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
    with small_plane(reserve_s=0.1) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA)
        with pytest.raises(DataPlaneTimeout, match="reserve_s=0.1.*op=put partition='p' keys=.'a.0'"):
            client.put("p", ["a.0"], {"ids": ids(1)})
        assert not client._operations.store._host._blocks  # type: ignore[attr-defined]
