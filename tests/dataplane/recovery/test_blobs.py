"""The references of rows to blobs, in a directory that dies now and then, against a model of plain dicts."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.codecs import messages
from headrace.codecs.blobs import References, blob_field
from headrace.codecs.blocks import BlockLayout
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.block_store import HOLDER_BYTES
from headrace.dataplane.directory.calls import BlobsOfRows, Grouping, PutRows, schema_id
from headrace.dataplane.errors import BlobsMissing, KeysNotFound
from headrace.dataplane.recovery import recorded_directory
from headrace.dataplane.recovery.effect_log import EffectLog, memory_files
from headrace.dataplane.recovery.recorded_directory import RecordedDirectory
from headrace.dataplane.recovery.saved_state import saved

SCHEMA = Schema(
    [
        Field("score", Kind.PER_SAMPLE, torch.float32),
        blob_field("images", [Field("pixels", Kind.RAGGED, torch.uint8), Field("grid", Kind.PER_SAMPLE, torch.int32)]),
    ]
)
ROW, BLOB = BlockLayout(("score", "images"), 1, 0, (64, 0, 0)), BlockLayout(("grid", "pixels"), 1, 0, (640, 0, 0))
HOLDER = "p#images"


def blobs_of(listed: list[list[str]], carried: set[str]) -> BlobsOfRows:
    found = References.of([name for row in listed for name in row], [len(row) for row in listed])
    brought = tuple(i for i, name in enumerate(found.names) if name in carried)
    return BlobsOfRows("images", found.names, found.index, found.counts, brought, (BLOB,) * len(brought))


class Run:
    """Puts, replaces, clears and loses rows that refer to blobs, in a directory and in a model."""

    def __init__(self, files: tuple[int, int], seed: int) -> None:
        self.files, self.random = files, random.Random(seed)
        self.rows: dict[str, list[str]] = {}
        self.lost: set[str] = set()
        self.holders: dict[str, int] = {}
        """Holder of each block: a row's key or a blob's name."""
        self.directory = self.opened()
        self.directory.register("p", SCHEMA, ("a",), 1)

    def opened(self) -> RecordedDirectory:
        log = EffectLog(self.files)
        found = RecordedDirectory(log, lambda payload: None, capacity_bytes=1 << 30, lease_s=10.0, reserve_s=5.0)
        found.replay(0.0)
        return found

    def state(self) -> bytes:
        of = self.directory
        return messages.encode(saved(of._partitions, of.blocks, of._leases, of._puts_elsewhere))

    def die(self) -> None:
        self.directory.flush()
        before = self.state()
        self.directory = self.opened()
        assert self.state() == before

    def stored(self) -> set[str]:
        return {name for key, row in self.rows.items() if key not in self.lost for name in row}

    def put(self) -> None:
        keys = self.random.sample("abcdefgh", self.random.randint(1, 3))
        listed = [self.random.choices("0123456", k=self.random.randint(0, 3)) for _ in keys]
        absent = {name for row in listed for name in row} - self.stored()
        carried = absent | set(self.random.choices("0123456", k=2))  # Another writer may have brought some meanwhile.
        if absent and self.random.random() < 0.2:
            carried -= absent
        groups, places = Grouping.of(keys, None), (ROW,) * len(keys)
        made = PutRows(
            "p", keys, ("score", "images"), None, None, groups, {}, places, True, "w", schema_id(SCHEMA),
            blobs=(blobs_of(listed, carried),),
        )  # fmt: skip
        if absent - carried:
            with pytest.raises(BlobsMissing, match=min(absent)):
                self.directory.reserve(made, 0.0)
            return
        reservation, holder = self.directory.reserve(made, 0.0), self.random.randrange(3)
        assert reservation is not None
        committed, freed = self.directory.commit(
            reservation.reservation_id, made, lambda ids, _: [holder.to_bytes(HOLDER_BYTES)] * len(ids)
        )
        assert len(committed.locations) == len(keys)
        stored = self.stored()
        self.rows |= dict(zip(keys, listed, strict=True))
        self.lost -= set(keys)
        self.holders |= dict.fromkeys([*keys, *(self.stored() - stored)], holder)
        if self.random.random() < 0.2:  # Its writer was interrupted.
            self.directory.withdraw("p", keys, reservation.block_ids.start, len(keys))
            for key in keys:
                del self.rows[key]

    def drop(self) -> None:
        keys = self.random.sample(sorted(self.rows), min(len(self.rows), self.random.randint(0, 3)))
        self.directory.clear("p", keys)
        for key in keys:
            del self.rows[key]
        self.lost -= set(keys)

    def lose(self) -> None:
        holder = self.random.randrange(3)
        gone = {name for name in self.stored() if self.holders[name] == holder}
        self.lost |= {key for key in self.rows if self.holders[key] == holder or gone & set(self.rows[key])}
        self.directory.lose({holder: f"unit {holder}"})

    def agree(self) -> None:
        blobs = self.stored()
        assert set(self.directory.rows(HOLDER, None).keys.tolist()) == blobs
        listed = self.directory.rows("p", None)
        assert set(listed.keys.tolist()) == set(self.rows)
        assert {key for key, gone in zip(listed.keys.tolist(), listed.lost, strict=True) if gone} == self.lost
        status = self.directory.status(None, 0.0)
        own = [key for key in self.rows if self.has_score(key)]
        assert status.bytes_used == ROW.nbytes * len(own) + BLOB.nbytes * len(blobs)
        assert (status.bytes_reserved, status.blocks) == (0, len(own) + len(blobs))
        if blobs:
            assert self.directory.lookup(HOLDER, sorted(blobs), ("pixels",)).keys == tuple(sorted(blobs))
        with pytest.raises(KeysNotFound):
            self.directory.lookup(HOLDER, ["none"], ("grid",))

    def has_score(self, key: str) -> bool:
        """Return whether the row's own block is there: a row whose picture is lost still has its score."""
        return not self.directory.absent("p", [key], ("score",))[1]


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    found = memory_files()
    yield found
    for file in found:
        os.close(file)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("compact_bytes", [0, 20_000])
def test_blobs_live_as_long_as_rows_refer_to_them(
    files: Any, seed: int, compact_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_directory, "COMPACT_BYTES", compact_bytes)
    run = Run(files, seed)
    for _ in range(120):
        run.random.choice([run.put, run.put, run.put, run.drop, run.lose, run.die])()
        run.agree()
    run.directory.clear("p", None)
    run.rows, run.lost = {}, set()
    run.agree()
    assert np.all([not item.of_row for item in run.directory._partitions["p"].references.values()])
