"""The replica reader over real processes: every rank gets exactly its rows, each byte is read and sent once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from headrace.actors.protocols import TRAIN_FIELDS
from headrace.actors.train.reader import FetchPolicy, holds_receipt, shares_reads
from headrace.actors.train.step_rows import TrainShard, stage_fields
from headrace.actors.train.topology import Topology
from headrace.codecs.batch import Jagged
from headrace.codecs.tokens.packed_rows import pieces
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


@pytest.fixture(scope="module")
def handle() -> Iterator[DataPlaneHandle]:
    with data_plane("shm") as handle:
        yield handle


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
        with pytest.raises(ValueError, match="plan abc: has 2 rows, but its receipt has 3"):
            reader.begin(TrainShard(1, meta.to_bytes(), np.array([2]), "abc", False))
        with pytest.raises(ValueError, match="plan abc: got no receipt, expected one, as rank 0 reads"):
            reader.begin(TrainShard(1, None, np.array([3]), "abc", False))
        reader.end()
        with pytest.raises(RuntimeError, match="no step has begun"):
            reader.stream(FIRST)
    client.clear(PARTITION)
    client.close()
