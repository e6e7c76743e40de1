"""Train workers of a mesh with a backend that records what it is fed: passes, write-back, reports, failures."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.actors.protocols import ROLLOUT_FIELDS, MicroBatch
from headrace.actors.step_rows import TrainShard
from headrace.actors.train_worker import PREV, REF, TrainWorker, WorkerReport, WorkerSetup
from headrace.actors.transports.protocol import WeightManifest
from headrace.codecs import messages
from headrace.dataplane.factory import connect
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.topology import Topology
from headrace.dataplane.traffic import Traffic
from headrace.tests.actors.replica_ranks import PARTITION, Step, content, data_plane, put_rows, raised, run_on, ship

LENGTHS = [int(length) for length in np.random.default_rng(2).integers(1, 40, 24)]


@dataclass
class RecordingBackend:
    """Log-probs are the token ids, halved; the train pass keeps what it was given."""

    writer: bool
    fails_at: int | None
    """Microbatch of the train pass at which it raises."""
    calls: list[str] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)

    def begin_step(self, temperature: float = 1.0) -> None:
        self.calls.append(f"begin {temperature}")

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        for index, micro in enumerate(itertools.islice(micros, count)):
            if index == self.fails_at:
                raise FloatingPointError("by chance")
            self.seen.append(content(micro))
        self.calls.append(f"accumulate {count}")

    def finish_step(self) -> dict[str, float]:
        self.calls.append("finish")
        return {"train/loss": 0.5}

    def abort_step(self) -> None:
        self.calls.append("abort")

    def logprobs(
        self, micros: Iterable[MicroBatch], count: int, *, reference: bool = False, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        self.calls.append(f"logprobs {'ref' if reference else 'prev'} {temperature}")
        taken = list(itertools.islice(micros, count))
        factor = 4 if reference else 2
        return [micro.batch.jagged("input_ids").values / factor for micro in taken] if self.writer else []

    def export_weights(self) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError

    def save(self, path: str, *, wait: bool = True) -> None:
        raise NotImplementedError

    def wait_saved(self) -> None:
        raise NotImplementedError

    def load(self, path: str) -> None:
        raise NotImplementedError

    def export_model(self, path: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.calls.append("close")


class NoSender:
    """Weights go nowhere."""

    def send(self, version: int, named: Mapping[str, torch.Tensor]) -> WeightManifest:
        raise NotImplementedError

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def handle() -> Iterator[DataPlaneHandle]:
    with data_plane("shm") as handle:
        yield handle


def work(rank: int, folder: Path, steps: dict[str, Step]) -> dict[str, Any]:
    """A step on each mesh, then one whose backend fails on rank 1."""
    dist.destroy_process_group()  # workers join one of their own
    found = {}
    for name, step in steps.items():
        fails_at = 1 if name == "fails" and rank == 1 else None
        writer = rank == step.topology.writer(step.topology.place(rank).dp)
        backend = RecordingBackend(writer, fails_at)
        setup = WorkerSetup(
            rank=rank,
            topology=step.topology,
            fetch=step.policy,
            threads=1,
            temperature=0.7,
            timeout_s=step.timeout_s,
            data_plane=step.handle,
            backend=lambda _rank, _world, backend=backend: backend,
            sender=NoSender,
        )
        worker = TrainWorker(setup)
        worker.build("127.0.0.1", _port(worker, rank, folder / name))
        found[name] = {"early": raised(worker.train)[:2]}
        payload = messages.encode(step.shards[rank])
        worker.begin(payload)
        if name == "fails":
            found[name]["error"] = raised(worker.train)
            found[name]["again"] = raised(functools.partial(worker.begin, payload))
            time.sleep(0.5)
        else:
            found[name]["reports"] = _passes(worker)
            found[name]["late"] = raised(worker.train)[:2]
        found[name] |= {"calls": backend.calls, "seen": backend.seen}
        worker.close()
    return found


def _passes(worker: TrainWorker) -> list[WorkerReport]:
    reports = []
    for name in (PREV, REF):
        reports.append(messages.decode(worker.write_logprobs(name), WorkerReport))
        dist.barrier()  # as the driver's gather
    return [*reports, messages.decode(worker.train(), WorkerReport)]


def _port(worker: TrainWorker, rank: int, path: Path) -> int:
    """The rendezvous's, told by rank 0 through a file."""
    if rank == 0:
        port = worker.open_rendezvous("127.0.0.1")
        path.with_suffix(".draft").write_text(str(port))
        path.with_suffix(".draft").rename(path)
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def test_two_workers_in_each_mesh(handle: DataPlaneHandle, tmp_path: Path) -> None:
    client = connect(handle, name="driver")
    meshes = {"tp": Topology(1, tp=2), "pp": Topology(1, pp=2), "dp": Topology(2), "fails": Topology(1, tp=2)}
    steps = {}
    for name, mesh in meshes.items():
        budget = 40 if name == "fails" else 200  # enough loads that not all are sent when rank 1 fails
        steps[name] = ship(handle, put_rows(client, LENGTHS, f"{name}-r"), mesh, budget=budget, timeout_s=5.0)
    results = run_on(work, 2, tmp_path / "ranks", tmp_path, steps)
    for name in meshes:
        pair = [of_rank[name] for of_rank in results]
        assert all(found["early"][0] == "RuntimeError" and "no step has begun" in found["early"][1] for found in pair)
        if name != "fails":
            _check_step(steps[name], pair)
            _check_columns(client, steps[name])
    _check_failure(results)
    client.clear(PARTITION)
    client.close()


def _check_step(step: Step, pair: list[dict[str, Any]]) -> None:
    topology = step.topology
    for rank, found in enumerate(pair):
        count = len(step.shards[rank].sizes)
        assert count > 1
        assert (
            found["calls"][:5]
            == [
                "logprobs prev 0.7",
                "logprobs ref 0.7",
                "begin 0.7",
                f"accumulate {count}",
                "finish",
            ][: len(found["calls"][:5])]
        )
        assert found["late"] == ("RuntimeError", f"rank {rank}: no step has begun; begin comes before stream")
        prev, ref, train = found["reports"]
        assert prev.metrics == ref.metrics == {} and train.metrics == ({"train/loss": 0.5} if rank == 0 else {})
        dp = topology.place(rank).dp
        writes, leads = rank == topology.writer(dp), rank == topology.leader(dp)
        moved = [Traffic.from_bytes(report.traffic) for report in (prev, ref, train)]
        assert [traffic.bytes_put > 0 for traffic in moved] == [writes, writes, False]
        assert (moved[0].bytes_got > 0) == leads and moved[1].bytes_got == 0
        assert (prev.bytes_broadcast > 0) == (leads and topology.replica_size > 1)
        names = {span.name for span in train.spans.to_spans()}
        assert train.data_wait_s > 0 and names >= {"forward backward", "optimizer"}
    fields = {*ROLLOUT_FIELDS, PREV, REF}
    for rank, found in enumerate(pair):
        first_stage = topology.pp == 2 and rank == 0
        for micro in found["seen"]:
            columns = micro["columns"]
            assert set(columns) == ({"input_ids"} if first_stage else fields)
            if not first_stage:
                ids = np.array(columns["input_ids"])
                assert columns[PREV] == (ids / 2).tolist() and columns[REF] == (ids / 4).tolist()
    if topology.dp == 1:
        assert [micro["columns"]["input_ids"] for micro in pair[0]["seen"]] == [
            micro["columns"]["input_ids"] for micro in pair[1]["seen"]
        ]
        assert [micro["advantages"] for micro in pair[0]["seen"]] == [micro["advantages"] for micro in pair[1]["seen"]]


def _check_columns(client: Any, step: Step) -> None:
    """Each row's columns were written back once, by key."""
    for dp in range(step.topology.dp):
        meta = step.receipt(step.topology.leader(dp))
        batch = client.get_keys(PARTITION, meta.keys, ["input_ids", PREV, REF])
        ids = batch.jagged("input_ids").values
        assert torch.equal(batch.jagged(PREV).values, ids / 2) and torch.equal(batch.jagged(REF).values, ids / 4)


def _check_failure(results: list[dict[str, Any]]) -> None:
    leader, sibling = (of_rank["fails"] for of_rank in results)
    assert sibling["error"][:2] == ("FloatingPointError", "by chance")
    assert leader["error"][0] == "ReplicaLost" and "not taken by rank 1: train worker 1 (pid" in leader["error"][1]
    assert leader["error"][2] < 7
    assert leader["again"][0] == sibling["again"][0] == "ReplicaError"
    for found in (leader, sibling):
        assert found["calls"][:2] == ["begin 0.7", "abort"]


def test_a_shard_without_its_receipt_is_refused(handle: DataPlaneHandle) -> None:
    client = connect(handle, name="driver")
    step = ship(handle, put_rows(client, [3, 4], "alone-r"), Topology(1))
    backend = RecordingBackend(True, None)
    setup = WorkerSetup(0, Topology(1), "auto", 1, 1.0, 5.0, handle, lambda _rank, _world: backend, NoSender)
    worker = TrainWorker(setup)
    worker.build("", 0)
    shard = replace(step.shards[0], meta=None)
    with pytest.raises(ValueError, match="got no receipt, expected one, as rank 0 reads"):
        worker.begin(messages.encode(shard))
    assert messages.decode(messages.encode(shard), TrainShard).meta is None
    worker.close()
    client.clear(PARTITION)
    client.close()
