"""Tests that every rank gets the pictures of its microbatches, each read once by the leader of its replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS
from headrace.actors.train.reader import FetchPolicy, ReplicaReader, build_links
from headrace.actors.train.topology import Topology
from headrace.actors.train_backend import MicroBatch
from headrace.codecs.blobs import Blob, blob_field
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import RowsCleared
from headrace.dataplane.factory import connect
from headrace.dataplane.meta import KVBatchMeta
from headrace.tests.actors.train.replica_ranks import PARTITION, Step, data_plane, row_columns, run_on, ship

IMAGES = blob_field(
    "images",
    [
        Field("pixels", Kind.RAGGED, torch.float32, ndim=2),
        Field("grid", Kind.RAGGED, torch.int64, ndim=2),
        Field("num_tokens", Kind.PER_SAMPLE, torch.int32),
    ],
)
SCHEMA = Schema([*ROLLOUT_SCHEMA.values(), IMAGES])
FIELDS = ("input_ids",)
LENGTHS = [20, 31, 24, 28, 22, 25, 27, 30] * 2


def picture(number: int) -> Blob:
    grid = torch.tensor([[1, 2, 2 + number]])
    pixels = torch.full((int(grid.prod()), 3), float(number))
    return Blob(IMAGES, {"pixels": pixels, "grid": grid, "num_tokens": torch.tensor(2 + number, dtype=torch.int32)})


def shown(row: int) -> list[int]:
    """Return the numbers of the pictures of a row.

    A group of four has one of its own, odd rows have a second one, and the last half has none.
    """
    return [row // 4, *([9] if row % 2 else [])] if row < len(LENGTHS) // 2 else []


def put_pictures(client: DataPlaneClient, pictures: bool = True) -> KVBatchMeta:
    client.register(PARTITION, SCHEMA, ("train",), group_size=4)
    rows = range(len(LENGTHS))
    columns: dict[str, Any] = {name: row_columns(LENGTHS)[name] for name in TRAIN_FIELDS}
    columns["images"] = [[picture(number) for number in shown(row) if pictures] for row in rows]
    keys = [f"p{row // 4}.{row % 4}" for row in rows]
    return client.put(PARTITION, keys, columns).with_tags(advantage=np.zeros(len(rows), np.float32))


def with_picture(step: Step, meta: KVBatchMeta) -> Step:
    picture = meta.select([0]).to_bytes()
    return replace(step, shards=tuple(replace(shard, picture=picture) for shard in step.shards))


def content(micro: MicroBatch) -> Any:
    """Return the microbatch's rows by their first token, with the numbers of their pictures."""
    first = micro.batch.jagged("input_ids")
    starts = np.cumsum([0, *first.lengths])[:-1]
    rows = [int(first.values[start]) for start in starts]
    if micro.pictures is None:
        return rows, None, None
    blobs, references = micro.pictures.blobs, micro.pictures.references
    assert len(references.counts) == len(rows) and blobs.num_rows == len(references.names)
    pixels, grid = blobs.ragged("pixels"), blobs.ragged("grid")
    parts = pixels.values.split(pixels.shapes.prod(axis=1).tolist())
    numbers = [int(part.unique().item()) for part in parts]
    assert grid.values.view(-1, 3)[:, 2].tolist() == [2 + number for number in numbers]
    assert blobs.tensor("num_tokens").tolist() == [2 + number for number in numbers]
    return rows, [[numbers[at] for at in micro.pictures.of(row)] for row in range(len(rows))], numbers


def passes(rank: int, step: Step) -> dict[str, Any]:
    """Stream the microbatches twice, then once more after they were cleared, which fails alike on every rank."""
    client = connect(step.handle, name=f"rank {rank}")
    cpu = torch.device("cpu")
    links = build_links(step.topology, rank, step.policy, name=f"worker {rank}", timeout_s=20, device=cpu)
    reader = ReplicaReader(client, SCHEMA, step.topology, rank, links, device=cpu)
    reader.begin(step.shards[rank])
    found = {"first": list(map(content, reader.stream(FIELDS))), "got": client.stats.bytes_got}
    found["second"] = list(map(content, reader.stream(TRAIN_FIELDS)))
    torch.distributed.barrier()
    if rank == 0:
        client.clear(PARTITION)
    torch.distributed.barrier()
    if step.shards[rank].picture is not None:
        with pytest.raises(RowsCleared):
            list(reader.stream(FIELDS))
    reader.close()
    client.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mesh", "policy"), [(Topology(2, tp=2), "auto"), (Topology(2), "auto")], ids=["dp2-tp2", "dp2"]
)
def test_every_rank_gets_the_pictures_of_its_rows(mesh: Topology, policy: FetchPolicy, tmp_path: Path) -> None:
    with data_plane("shm") as handle:
        client = connect(handle, name="driver")
        meta = put_pictures(client)
        step = with_picture(ship(handle, meta, mesh, policy, budget=110), meta)
        results = run_on(passes, mesh.world, tmp_path / "ranks", step)
        client.close()
    starts = np.cumsum([0, *LENGTHS])[:-1].tolist()
    kinds = set()
    for rank, found in enumerate(results):
        assert found["first"] == found["second"]
        for rows, pictures, numbers in found["first"]:
            wanted = [shown(starts.index(start)) for start in rows]
            assert pictures == wanted
            every = {number for row in wanted for number in row}
            assert len(numbers) == len(set(numbers)) and set(numbers) == (every or {0}), "each is read once"
            kinds.add(bool(every))
        leads = rank == mesh.leader(mesh.place(rank).dp)
        assert (found["got"] > 0) == leads, "siblings read nothing"
    assert kinds == {True, False}, "some microbatches have no picture of their own"


def passes_of_shared_features(rank: int, step: Step) -> dict[str, Any]:
    """Stream the microbatches before and after the rank's backend has said that features are shared."""
    client, cpu = connect(step.handle, name=f"rank {rank}"), torch.device("cpu")
    links = build_links(step.topology, rank, step.policy, name=f"worker {rank}", timeout_s=20, device=cpu)
    reader = ReplicaReader(client, SCHEMA, step.topology, rank, links, device=cpu)
    found: dict[str, Any] = {}
    for kind in ("pixels", "features"):
        if kind == "features":
            reader.share_features()
        reader.begin(step.shards[rank])
        micros, shown = list(reader.stream(FIELDS)), []
        for micro in micros:
            assert micro.pictures is not None
            blobs, references = micro.pictures.blobs, micro.pictures.references
            grid = blobs.ragged("grid").values.view(-1, 3)[:, 2].tolist()
            shown.append((grid, blobs.tensor("num_tokens").tolist(), references.index.tolist()))
            assert ("pixels" in blobs) == (kind == "pixels" or rank == 0)
        metrics = reader.take_metrics()
        found[kind] = (client.stats.take().bytes_got, metrics.broadcast_bytes, shown)
    reader.close()
    client.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("policy", ["leader", "independent"])
def test_ranks_that_get_features_read_no_pixels(policy: FetchPolicy, tmp_path: Path) -> None:
    with data_plane("shm") as handle:
        client = connect(handle, name="driver")
        meta = put_pictures(client)
        step = with_picture(ship(handle, meta, Topology(1, tp=2), policy, budget=110), meta)
        leader, sibling = run_on(passes_of_shared_features, 2, tmp_path / "ranks", step)
        client.close()
    assert leader["pixels"][2] == leader["features"][2] == sibling["features"][2] != []
    # A picture to which no row refers is read once for all microbatches without pictures, and not counted here.
    pixels = sum(4 * 3 * 2 * width for grid, _, index in leader["pixels"][2] for width in grid if index)
    assert pixels > 0 and leader["features"][0] == leader["pixels"][0], "the leader reads what it read before"
    if policy == "leader":
        assert sibling["features"][0] == 0
        assert leader["pixels"][1] - leader["features"][1] >= pixels
    else:
        assert sibling["pixels"][0] - sibling["features"][0] >= pixels


@pytest.mark.processes
def test_a_plan_without_pictures_shows_none(tmp_path: Path) -> None:
    with data_plane("shm") as handle:
        client = connect(handle, name="driver")
        step = ship(handle, put_pictures(client, pictures=False), Topology(1, tp=2), budget=110)
        results = run_on(passes, 2, tmp_path / "ranks", step)
        client.close()
    assert all(pictures is None for found in results for _, pictures, _ in found["first"])
