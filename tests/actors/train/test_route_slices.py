"""Every rank gets the routes of its own pipeline stage's layers and of its own tokens, and no others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.actors.protocols import TRAIN_FIELDS, row_schema, written_fields
from headrace.actors.train.links import parts_of
from headrace.actors.train.reader import ReplicaReader, build_links
from headrace.actors.train.step_rows import stage_batch, stage_fields, stage_layers, stage_schema
from headrace.actors.train.topology import Topology
from headrace.codecs.batch import Batch, Jagged
from headrace.codecs.tokens.packed_rows import pieces
from headrace.codecs.tokens.routes import ROUTES, RouteSpec
from headrace.dataplane.factory import connect
from headrace.tests.actors.train.replica_ranks import PARTITION, Step, data_plane, row_columns, run_on, ship

SPEC = RouteSpec((1, 2, 3), 2, 100, 4)
"""Four decoder layers, the first without experts: of two stages the first has one with experts, the second two."""
LENGTHS = [int(length) for length in np.random.default_rng(4).integers(1, 60, 12)]
FIELDS = (*TRAIN_FIELDS, ROUTES)


def route_values(lengths: list[int]) -> np.ndarray:
    """Routes of which every entry tells token, layer and place."""
    tokens = np.arange(sum(lengths))[:, None, None]
    return ((tokens + 30 * np.arange(3)[:, None] + 7 * np.arange(2)) % 100).astype(np.uint8)


def test_stages_hold_the_layers_of_their_part_of_the_model() -> None:
    def held(spec: RouteSpec, stages: int) -> list[list[int]]:
        mesh = Topology(1, pp=stages)
        return [list(stage_layers(mesh, mesh.place(rank), spec)) for rank in range(stages)]

    assert held(SPEC, 2) == [[0], [1, 2]]
    assert held(SPEC, 1) == [[0, 1, 2]]
    assert held(RouteSpec((2, 3), 2, 100, 4), 2) == [[], [0, 1]]
    assert held(RouteSpec(tuple(range(48)), 8, 128, 48), 4) == [list(range(12 * n, 12 * n + 12)) for n in range(4)]


def test_a_stage_without_experts_is_sent_none_and_the_others_only_theirs() -> None:
    mesh, late = Topology(1, pp=4), RouteSpec((1, 3, 4, 5, 6, 7), 2, 100, 8)
    names = [stage_fields(mesh, mesh.place(rank), FIELDS, late) for rank in range(4)]
    assert names == [("input_ids", ROUTES), (ROUTES,), (ROUTES,), FIELDS]
    only_last = RouteSpec((6, 7), 2, 100, 8)
    names = [stage_fields(mesh, mesh.place(rank), FIELDS, only_last) for rank in range(4)]
    assert names == [("input_ids",), (), (), FIELDS]
    assert [len(part.members) for part in parts_of(Topology(1, tp=2, pp=4), 0, late)] == [2, 2, 2, 2]
    assert [len(part.members) for part in parts_of(Topology(1, tp=2, pp=4), 0)] == [2, 4, 2]
    shapes = [stage_schema(row_schema(late), mesh, mesh.place(rank), late)[ROUTES].trailing for rank in range(4)]
    assert shapes == [(1, 2), (1, 2), (2, 2), (2, 2)]


def test_without_pipeline_stages_nothing_is_copied() -> None:
    lengths = np.array([2, 3], np.int64)
    values = torch.from_numpy(route_values([2, 3]))
    batch = Batch(row_schema(SPEC).subset([ROUTES]), 2, {ROUTES: Jagged(values, lengths)})
    assert stage_batch(batch, Topology(1, tp=2), Topology(1, tp=2).place(1), SPEC) is batch


@dataclass(frozen=True)
class Received:
    routes: list[list[Any]]
    """Of each microbatch."""
    schemas: set[tuple[int, ...]]
    broadcast: int


def read_routes(rank: int, steps: list[Step]) -> list[Received]:
    found = []
    for step in steps:
        client = connect(step.handle, name=f"rank {rank}")
        device, name = torch.device("cpu"), f"worker {rank} (pid {os.getpid()})"
        links = build_links(
            step.topology, rank, step.policy, name=name, timeout_s=step.timeout_s, device=device, routes=SPEC
        )
        reader = ReplicaReader(client, row_schema(SPEC), step.topology, rank, links, device=device, routes=SPEC)
        reader.begin(step.shards[rank])
        micros = list(reader.stream(FIELDS))
        found.append(
            Received(
                [micro.batch.jagged(ROUTES).values.tolist() for micro in micros],
                {micro.batch.schema[ROUTES].trailing for micro in micros},
                reader.take_metrics().broadcast_bytes,
            )
        )
        dist.barrier()
        reader.close()
        client.close()
    return found


@pytest.mark.processes
def test_ranks_of_stages_and_of_contexts_get_their_part_of_the_routes(tmp_path: Path) -> None:
    mesh = Topology(1, cp=2, pp=2)
    with data_plane("shm") as handle:
        client = connect(handle, name="driver")
        client.register(PARTITION, row_schema(SPEC), ("train",), group_size=4)
        keys = [f"r{index // 4}.{index % 4}" for index in range(len(LENGTHS))]
        plain, array = row_columns(LENGTHS), np.array(LENGTHS, np.int64)
        values = {name: plain[name] for name in plain} | {
            ROUTES: Jagged(torch.from_numpy(route_values(LENGTHS)), array)
        }
        meta = client.put(PARTITION, keys, values)
        meta = meta.with_tags(advantage=np.zeros(len(keys), np.float32))
        steps = [ship(handle, meta, mesh, policy) for policy in ("auto", "independent")]
        results = run_on(read_routes, mesh.world, tmp_path / "ranks", steps)
        client.clear(PARTITION)
        client.close()
    whole = np.split(route_values(LENGTHS), np.cumsum(LENGTHS)[:-1])
    for rank, of_rank in enumerate(results):
        place = mesh.place(rank)
        layers = [[0], [1, 2]][place.pp]
        for step, seen in zip(steps, of_rank, strict=True):
            receipt = step.receipt(mesh.leader(0))
            for rows, routes in zip(step.shards[rank].ranges(), seen.routes, strict=True):
                expected: list[Any] = []
                for row in rows:
                    full = whole[keys.index(receipt.keys[row])]
                    starts, stops = pieces(np.array([len(full)]), mesh.pad_multiple, mesh.cp, place.cp)
                    for start, stop in zip(starts[0], stops[0], strict=True):
                        expected += full[start:stop, layers].tolist()
                assert routes == expected
            assert seen.schemas == {(len(layers), 2)}
    assert set(written_fields(SPEC)) - set(written_fields(None)) == {ROUTES}
