"""Tests of the replica reader: every rank gets its own rows and routes, each byte is read and sent once."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.actors.protocols import TRAIN_FIELDS, row_schema, written_fields
from headrace.actors.train.links import parts_of
from headrace.actors.train.reader import FetchPolicy, Prefetch, ReplicaReader, build_links, holds_receipt, shares_reads
from headrace.actors.train.step_rows import TrainShard, stage_batch, stage_fields, stage_layers, stage_schema
from headrace.actors.train.topology import Topology
from headrace.codecs.batch import Batch, Jagged
from headrace.codecs.tokens.packed_rows import pieces
from headrace.codecs.tokens.routes import ROUTES, RouteSpec
from headrace.dataplane.factory import connect
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.meta import KVBatchMeta
from headrace.tests.actors.train.replica_ranks import (
    PARTITION,
    Step,
    content,
    data_plane,
    put_rows,
    reader_of,
    row_columns,
    run_on,
    ship,
)

LENGTHS = [int(length) for length in np.random.default_rng(4).integers(0, 60, 24)]
FIRST = ("input_ids", "response_mask")
LATER = "prev_logprobs"
MESHES = {
    "tp2": Topology(1, tp=2),
    "pp2": Topology(1, pp=2),
    "cp2": Topology(1, cp=2),
    "dp2": Topology(2),
    "tp2pp2": Topology(1, tp=2, pp=2),
    "tp2cp2": Topology(1, tp=2, cp=2),
    "dp2tp2": Topology(2, tp=2),
}
SPEC = RouteSpec((1, 2, 3), 2, 100, 4)
"""Four decoder layers, the first without experts: of two stages the first has one with experts, the second two."""
ROUTE_LENGTHS = [int(size) for size in np.random.default_rng(4).integers(1, 60, 12)]
FIELDS = (*TRAIN_FIELDS, ROUTES)


def test_a_failure_that_comes_as_a_wait_runs_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait of the consumer returns at its time limit, and by then the thread has failed and ended."""
    go = threading.Event()

    def fail(number: int, stop: threading.Event) -> int:
        go.wait(10)
        raise ZeroDivisionError("by chance")

    prefetch = Prefetch(fail, 1, depth=1, name="pass")
    wait = prefetch._changed.wait

    def run_out(timeout: float | None = None) -> bool:
        go.set()
        wait(10)
        prefetch._thread.join(10)
        return False

    monkeypatch.setattr(prefetch._changed, "wait", run_out)
    with pytest.raises(ZeroDivisionError, match="by chance"):
        prefetch.take()


def test_a_thread_that_ended_without_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetch, "_run", lambda self: None)
    prefetch = Prefetch(lambda number, stop: number, 3, depth=1, name="pass")
    with pytest.raises(RuntimeError, match="pass: the thread ended before item 0 of 3"):
        prefetch.take()


def test_items_come_in_order() -> None:
    prefetch = Prefetch(lambda number, stop: number, 5, depth=2, name="pass")
    assert [prefetch.take() for _ in range(5)] == [0, 1, 2, 3, 4] and prefetch.done
    assert prefetch.close(10)


def receipts(step: Step) -> list[KVBatchMeta]:
    """Of each replica."""
    return [step.receipt(step.topology.leader(dp)) for dp in range(step.topology.dp)]


def a_step(rank: int, steps: list[Step]) -> list[dict[str, Any]]:
    """Per step what a train worker does: log-probs, write-back, train."""
    return [_passes(rank, step) for step in steps]


def _passes(rank: int, step: Step) -> dict[str, Any]:
    topology = step.topology
    with reader_of(rank, step) as (reader, client):
        logprob = [content(micro) for micro in reader.stream(FIRST)]
        between, got_first = reader.take_metrics(), client.stats.bytes_got
        if rank == topology.writer(topology.place(rank).dp):
            meta = step.receipt(rank)
            for index, rows in enumerate(step.shards[rank].ranges()):
                if len(rows):
                    lengths = meta.lengths[rows]
                    ids = client.get(meta.select(rows), ["input_ids"]).jagged("input_ids").values
                    column = Jagged(ids.float() / 2, lengths)
                    client.put(PARTITION, [meta.keys[row] for row in rows], {LATER: column})
                    reader.keep(index, LATER, column)
        dist.barrier()  # in a run the driver's calls order one rank's put before another's read
        before = client.stats.bytes_got
        train = [content(micro) for micro in reader.stream((*TRAIN_FIELDS, LATER))]
        figures = reader.take_metrics()
        names = {span.name.split()[0] for span in (*between.spans, *figures.spans)}
        result = {
            "logprob": logprob,
            "train": train,
            "got_first": got_first,
            "got_in_train": client.stats.bytes_got - before,
            "broadcast": between.broadcast_bytes + figures.broadcast_bytes,
            "spans": names,
            "wait_s": between.wait_s + figures.wait_s,
        }
        dist.barrier()
    return result


def expected(step: Step, rank: int, values: dict[str, np.ndarray], fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """What the rank must get, from the plan and the rows alone. values: name -> all rows' tokens by global row."""
    topology, place = step.topology, step.topology.place(rank)
    meta, shard = receipts(step)[place.dp], step.shards[rank]
    wanted = []
    for rows in shard.ranges():
        columns: dict[str, list[float]] = {name: [] for name in stage_fields(topology, place, fields)}
        for row in rows:
            tokens = values[meta.keys[row]]
            keep = tokens[_positions(topology, place.cp, len(tokens))]
            for name in columns:
                columns[name] += _value(name, keep).tolist()
        numbers = [_number(meta.keys[row]) for row in rows]
        wanted.append(
            {
                "columns": columns,
                "lengths": [len(values[meta.keys[row]]) for row in rows],
                "advantages": [float(np.float32(number / 7)) for number in numbers],
                "groups": meta.groups[rows].tolist(),
                "group_tokens": [100 + number // 4 for number in numbers],
                "row_tokens": [3 * number for number in numbers],
            }
        )
    return wanted


def _number(key: str) -> int:
    group, _, sample = key.rpartition(".")
    return 4 * int(group.rpartition("r")[2]) + int(sample)


def _positions(topology: Topology, cp: int, length: int) -> np.ndarray:
    if topology.cp == 1:
        return np.arange(length)
    starts, stops = pieces(np.array([length]), topology.pad_multiple, topology.cp, cp)
    return np.concatenate([np.arange(start, stop) for start, stop in zip(starts[0], stops[0], strict=True)])


def _value(name: str, tokens: np.ndarray) -> np.ndarray:
    return {
        "input_ids": tokens,
        "response_mask": (tokens % 3 > 0).astype(int),
        "rollout_logprobs": -tokens.astype(float),
        LATER: tokens / 2,
    }[name]


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_gets_exactly_its_rows(handle: DataPlaneHandle, world: int, tmp_path: Path) -> None:
    names = [name for name, mesh in MESHES.items() if mesh.world == world]
    check_meshes(handle, names, ("auto", "independent"), tmp_path)


@pytest.mark.processes
def test_rows_of_a_store_with_processes_of_its_own(tmp_path: Path) -> None:
    with data_plane("simple") as handle:
        check_meshes(handle, ["pp2"], ("auto",), tmp_path)


def check_meshes(handle: DataPlaneHandle, names: list[str], policies: Sequence[FetchPolicy], folder: Path) -> None:
    client = connect(handle, name="driver")
    steps = []
    for name in names:
        for policy in policies:
            meta = put_rows(client, LENGTHS, f"{name}-{policy}-r")
            steps.append(ship(handle, meta, MESHES[name], policy))
    results = run_on(a_step, steps[0].topology.world, folder / "ranks", steps)
    ends = np.cumsum(LENGTHS)
    for number, step in enumerate(steps):
        assert max(len(shard.sizes) for shard in step.shards) > 2
        tokens = {
            key: np.arange(ends[_number(key)] - LENGTHS[_number(key)], ends[_number(key)])
            for meta in receipts(step)
            for key in meta.keys
        }
        assert len(tokens) == len(LENGTHS)
        for rank, of_rank in enumerate(results):
            seen = of_rank[number]
            assert seen["logprob"] == expected(step, rank, tokens, FIRST)
            assert seen["train"] == expected(step, rank, tokens, (*TRAIN_FIELDS, LATER))
        _check_traffic(step, [of_rank[number] for of_rank in results])
    client.clear(PARTITION)
    client.close()


def _check_traffic(step: Step, seen: list[dict[str, Any]]) -> None:
    """Who reads in the train pass, how often, and what the trace shows."""
    topology, tokens = step.topology, sum(LENGTHS)
    for rank, of_rank in enumerate(seen):
        place = topology.place(rank)
        leader, writer = topology.leader(place.dp), topology.writer(place.dp)
        if not shares_reads(topology, step.policy):
            assert {"read"} <= of_rank["spans"] <= {"read", "wait"} and of_rank["broadcast"] == 0
        elif rank == leader:
            assert {"read", "broadcast"} <= of_rank["spans"] <= {"read", "broadcast", "wait"}
            assert of_rank["broadcast"] > 0
        else:
            assert {"receive"} <= of_rank["spans"] <= {"receive", "wait"} and of_rank["broadcast"] == 0
            assert of_rank["got_in_train"] == 0
        assert of_rank["wait_s"] > 0
        if rank == leader and topology.dp == 1 and step.policy == "auto":
            # What the log-prob pass read is kept, what the leader wrote too; another writer's column is read.
            assert of_rank["got_in_train"] == tokens * (4 if writer == leader else 8)


@pytest.mark.processes
def test_a_replica_of_four_reads_its_rows_once_and_sends_little_more(handle: DataPlaneHandle, tmp_path: Path) -> None:
    client = connect(handle, name="driver")
    lengths = [int(length) for length in np.random.default_rng(5).integers(300, 1600, 24)]
    meshes = [Topology(1, tp=4), Topology(1, tp=2, cp=2)]
    steps = [
        ship(handle, put_rows(client, lengths, f"long{number}-r"), mesh, budget=8000)
        for number, mesh in enumerate(meshes)
    ]
    results = run_on(a_step, 4, tmp_path / "ranks", steps)
    tokens = sum(lengths)
    for number in range(len(meshes)):
        leader, *siblings = [of_rank[number] for of_rank in results]
        # ids and mask for the log-probs; what the rollouts sampled with for the train pass; the leader's own column
        # to write (the ids again), and that column it has.
        assert leader["got_first"] == 5 * tokens and leader["got_in_train"] == 4 * tokens
        assert all(sibling["got_first"] == sibling["got_in_train"] == 0 for sibling in siblings)
        assert 13 * tokens < leader["broadcast"] < 1.01 * 13 * tokens
    client.clear(PARTITION)
    client.close()


def test_who_is_shipped_a_receipt() -> None:
    mesh = Topology(2, tp=2, pp=2)
    holders = [rank for rank in range(mesh.world) if holds_receipt(mesh, "auto", rank)]
    assert holders == sorted({*map(mesh.leader, range(2)), *map(mesh.writer, range(2))}) == [0, 2, 4, 6]
    assert all(holds_receipt(mesh, "independent", rank) for rank in range(mesh.world))
    assert not shares_reads(Topology(4), "leader") and shares_reads(mesh, "leader")
    with pytest.raises(ValueError, match="trainer.fetch: got 'all', expected 'auto', 'leader' or 'independent'"):
        shares_reads(mesh, "all")  # type: ignore[arg-type]


def test_a_middle_stage_is_sent_no_column() -> None:
    mesh = Topology(1, pp=3)
    fields = (*TRAIN_FIELDS, LATER)
    assert [stage_fields(mesh, mesh.place(rank), fields) for rank in range(3)] == [("input_ids",), (), fields]
    assert stage_fields(Topology(1, tp=2), Topology(1, tp=2).place(1), fields) == fields


def test_a_shard_must_agree_with_its_receipt(handle: DataPlaneHandle) -> None:
    client = connect(handle, name="driver")
    meta = put_rows(client, [5, 6, 7], "own-r")
    step = ship(handle, meta, Topology(1))
    with reader_of(0, step) as (reader, _):
        assert [micro.lengths.tolist() for micro in reader.stream(FIRST)] == [[5, 6, 7]]
        with pytest.raises(ValueError, match="plan abc has 2 rows, but its receipt has 3"):
            reader.begin(TrainShard(1, meta.to_bytes(), np.array([2]), "abc", False))
        with pytest.raises(ValueError, match="plan abc: got no receipt, expected one, because rank 0 reads"):
            reader.begin(TrainShard(1, None, np.array([3]), "abc", False))
        reader.end()
        with pytest.raises(RuntimeError, match="no step has begun"):
            reader.stream(FIRST)
    client.clear(PARTITION)
    client.close()


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
        keys = [f"r{index // 4}.{index % 4}" for index in range(len(ROUTE_LENGTHS))]
        plain, array = row_columns(ROUTE_LENGTHS), np.array(ROUTE_LENGTHS, np.int64)
        values = {name: plain[name] for name in plain} | {
            ROUTES: Jagged(torch.from_numpy(route_values(ROUTE_LENGTHS)), array)
        }
        meta = client.put(PARTITION, keys, values)
        meta = meta.with_tags(advantage=np.zeros(len(keys), np.float32))
        steps = [ship(handle, meta, mesh, policy) for policy in ("auto", "independent")]
        results = run_on(read_routes, mesh.world, tmp_path / "ranks", steps)
        client.clear(PARTITION)
        client.close()
    whole = np.split(route_values(ROUTE_LENGTHS), np.cumsum(ROUTE_LENGTHS)[:-1])
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
