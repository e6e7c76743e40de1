"""Train workers of a mesh with a backend that records what it is fed: passes, write-back, reports, failures."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist

from headrace.actors.protocols import TRAIN_FIELDS
from headrace.actors.sample_file import SampleFile, SamplesConfig
from headrace.actors.train.actor import CONCURRENCY_GROUPS, MeetingPoint, TrainActor
from headrace.actors.train.step_rows import TrainShard
from headrace.actors.train.topology import Topology
from headrace.actors.train.worker import PREV, REF, TrainWorker
from headrace.actors.train.worker_setup import WorkerReport, WorkerSetup
from headrace.actors.train_backend import MicroBatch
from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.transports.protocol import ReceiverGroup
from headrace.codecs import messages
from headrace.codecs.jagged import unpack
from headrace.dataplane.errors import DataPlaneError
from headrace.dataplane.factory import connect
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.traffic import Traffic
from headrace.tests.actors.train.recording_backend import MODEL, RecordingBackend
from headrace.tests.actors.train.replica_ranks import PARTITION, Step, put_rows, raised, run_on, ship
from headrace.tests.actors.weight_sync.memory_sender import MemorySender
from headrace.tests.waiting import wait_until
from headrace.trainers.cluster.calls import Call, DriverMeter, ended, gather
from headrace.trainers.cluster.handles import TrainHandle

T = TypeVar("T")
SYNC = SyncConfig(timeout_s=5.0, cache=True)
LENGTHS = [int(length) for length in np.random.default_rng(2).integers(1, 40, 24)]


def work(rank: int, folder: Path, steps: dict[str, Step]) -> dict[str, Any]:
    """A step on each mesh, then one whose backend fails on rank 1."""
    dist.destroy_process_group()  # workers join one of their own
    found = {}
    for name, step in steps.items():
        fails_at = 1 if name == "fails" and rank == 1 else None
        writer = rank == step.topology.writer(step.topology.place(rank).dp)
        backend, sender = RecordingBackend(writer, fails_at), MemorySender(fails_at="send 1")
        setup = WorkerSetup(
            rank=rank,
            topology=step.topology,
            fetch=step.policy,
            threads=1,
            temperature=0.7,
            timeout_s=step.timeout_s,
            collective_timeout_s=step.timeout_s,
            data_plane=step.handle,
            backend=lambda _rank, _world, backend=backend: backend,
            sender=lambda _host, sender=sender: sender,
            sync=SYNC,
            bucket_bytes=256,
        )
        actor = TrainActor(setup)
        actor.build(_meeting_point(actor, rank, folder / name), None)
        worker = actor.worker
        found[name] = {"early": raised(worker.accumulate)[:2]}
        worker.begin(step.shards[rank])
        if name == "fails":
            found[name]["error"] = raised(worker.accumulate)
            found[name]["again"] = raised(functools.partial(worker.begin, step.shards[rank]))
            time.sleep(0.5)
        else:
            found[name]["offload"] = _cycle(worker)
            found[name]["reports"] = _passes(worker)
            found[name]["late"] = raised(worker.accumulate)[:2]
            found[name]["weights"] = _sync(worker, rank, sender)
        found[name] |= {"calls": backend.calls, "seen": backend.seen}
        actor.close()
    return found


def _cycle(worker: TrainWorker) -> dict[str, Any]:
    """Offload twice, make refused calls, and onload twice."""
    reports = [worker.offload(), worker.offload()]
    errors = [raised(functools.partial(worker.write_logprobs, PREV))[:2], raised(worker.accumulate)[:2]]
    errors.append(raised(dist.barrier)[:2])
    return {"errors": errors, "reports": [*reports, worker.onload(), worker.onload()]}


def _passes(worker: TrainWorker) -> list[WorkerReport]:
    reports = []
    for name in (PREV, REF):
        reports.append(worker.write_logprobs(name))
        dist.barrier()  # as the driver's gather
    return [*reports, worker.accumulate(), worker.finish()]


def _sync(worker: TrainWorker, rank: int, sender: MemorySender) -> dict[str, Any]:
    """Weights to a sender that fails, again to one that does not, and once more from the cache."""
    receivers = [ReceiverGroup("engine 0", 1), ReceiverGroup("engine 1", 2)]
    alone = functools.partial(worker.open_update, 1, receivers, None)
    found: dict[str, Any] = {"alone": raised(alone)[:2]} if rank else {}
    for attempt in (1, 2):
        update = worker.open_update(1, receivers, base=0) if rank == 0 else None
        dist.barrier()  # as the driver's call to all
        send = functools.partial(worker.send_weights, update)
        found[f"sent {attempt}"] = raised(send)[:2] if attempt == 1 and rank == 0 else send()
    if rank == 0:
        late = worker.open_cached(1, receivers[:1])
        found["update"] = late
        found["late"] = worker.send_cached(late)
        worker.abort_update("nothing is open", None)
        found["arrived"] = {name: tensor.tolist() for name, tensor in sender.named(1).items()}
        found["aborts"] = sender.aborts
    return found


def _meeting_point(actor: TrainActor, rank: int, path: Path) -> MeetingPoint:
    """Where rank 0 listens, told by it through a file."""
    if rank == 0:
        told = messages.encode(actor.open_rendezvous())
        path.with_suffix(".draft").write_bytes(told)
        path.with_suffix(".draft").rename(path)
    wait_until(path.exists)
    return messages.decode(path.read_bytes(), MeetingPoint)


def alone(handle: DataPlaneHandle, backend: Any) -> WorkerSetup:
    """The only rank there is."""

    def sender(_host: str) -> MemorySender:
        return MemorySender()

    return WorkerSetup(0, Topology(1), "auto", 1, 1.0, 5.0, 5.0, handle, backend, sender, SYNC, 256)


@pytest.mark.processes
def test_two_workers_in_each_mesh(handle: DataPlaneHandle, tmp_path: Path) -> None:
    client = connect(handle, name="driver")
    meshes = {"tp": Topology(1, tp=2), "pp": Topology(1, pp=2), "dp": Topology(2), "fails": Topology(1, tp=2)}
    steps = {}
    for name, mesh in meshes.items():
        # Enough loads that not all are sent when rank 1 fails, and a bound that is waited for.
        budget, timeout_s = (40, 5.0) if name == "fails" else (200, 30.0)
        steps[name] = ship(handle, put_rows(client, LENGTHS, f"{name}-r"), mesh, budget=budget, timeout_s=timeout_s)
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
        assert found["calls"][:4] == ["offload"] * 2 + ["onload"] * 2
        calls = found["calls"][4:9]
        assert (
            calls
            == [
                "logprobs prev 0.7",
                "logprobs ref 0.7",
                "begin 0.7",
                f"accumulate {count}",
                "finish",
            ][: len(calls)]
        )
        assert found["late"] == ("RuntimeError", f"rank {rank}: no step has begun; begin comes before stream")
        prev, ref, train, end = found["reports"]
        assert prev.metrics == ref.metrics == train.metrics == {}
        assert end.metrics == ({"train/loss": 0.5} if rank == 0 else {})
        dp = topology.place(rank).dp
        writes, leads = rank == topology.writer(dp), rank == topology.leader(dp)
        moved = [Traffic.from_bytes(report.traffic) for report in (prev, ref, train)]
        assert [traffic.bytes_put > 0 for traffic in moved] == [writes, writes, False]
        assert (moved[0].bytes_got > 0) == leads and moved[1].bytes_got == 0
        assert (prev.bytes_broadcast > 0) == (leads and topology.replica_size > 1)
        assert train.data_wait_s > 0 and "forward backward" in {span.name for span in train.spans.to_spans()}
        assert [span.name for span in end.spans.to_spans()] == ["optimizer"]
        _check_cycle(rank, found["offload"])
    _check_weights(*(found["weights"] for found in pair))
    fields = {*TRAIN_FIELDS, PREV, REF}
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


def _check_cycle(rank: int, found: dict[str, Any]) -> None:
    logprobs, accumulate, barrier = found["errors"]
    for error, call in ((logprobs, "write_logprobs"), (accumulate, "accumulate")):
        message = f"train worker {rank}: {call}: the backend is offloaded; onload comes first"
        assert error == ("RuntimeError", message)
    assert "has not been initialized" in barrier[1]
    assert [report.groups_s > 0 for report in found["reports"]] == [True, False, True, False]


def _check_weights(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert second["alone"][0] == "RuntimeError" and "only rank 0 publishes weights" in second["alone"][1]
    assert second["sent 1"] is second["sent 2"] is None  # the gather went to its end though rank 0 could not send
    assert first["sent 1"][0] == "WeightTransferError" and "send 1: engine 1 is gone" in first["sent 1"][1]
    assert len(first["aborts"]) == 1
    sent, late = first["sent 2"], first["late"]
    assert sent.num_bytes == sent.bytes_sent == late.bytes_sent and sent.gather_s > 0 == late.gather_s
    assert first["update"].receivers == (ReceiverGroup("engine 0", 1),) and first["update"].version == 1
    assert first["arrived"] == {name: tensor.tolist() for name, tensor in MODEL.items()}


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
    assert leader["error"][0] == "ReplicaLost" and "not received by rank 1: train worker 1 (pid" in leader["error"][1]
    assert leader["error"][2] < 7
    assert leader["again"][0] == sibling["again"][0] == "ReplicaError"
    for found in (leader, sibling):
        assert found["calls"][:2] == ["begin 0.7", "abort"]


def test_a_shard_without_its_receipt_is_refused(handle: DataPlaneHandle) -> None:
    client = connect(handle, name="driver")
    step = ship(handle, put_rows(client, [3, 4], "alone-r"), Topology(1))
    backend = RecordingBackend(True, None)
    worker = TrainWorker(alone(handle, lambda _rank, _world: backend))
    shard = replace(step.shards[0], meta=None)
    with pytest.raises(ValueError, match="got no receipt, expected one, because rank 0 reads"):
        worker.begin(shard)
    assert messages.decode(messages.encode(shard), TrainShard).meta is None
    worker.close()
    client.clear(PARTITION)
    client.close()


def test_samples_of_a_shard_are_written_and_change_nothing(handle: DataPlaneHandle, tmp_path: Path) -> None:
    client = connect(handle, name="driver")
    meta = put_rows(client, [9, 4, 1, 12, 7], "samples-r")
    step = ship(handle, meta, Topology(1), budget=14)
    picked = np.array([0, 2, 3])  # of the shard's rows, and one microbatch more than this rank has rows
    shard = replace(step.shards[0], samples=picked, sample_passes=4)
    backend = RecordingBackend(True, None)
    file = SampleFile(str(tmp_path / "samples.jsonl"), SamplesConfig(max_tokens=4), prompts_per_step=8)
    worker = TrainWorker(replace(alone(handle, lambda _rank, _world: backend), samples=file))
    worker.begin(shard)
    worker.write_logprobs(PREV)
    worker.accumulate()
    lines = {line["key"]: line for line in map(json.loads, Path(file.path).read_text().splitlines())}
    of_shard = KVBatchMeta.from_bytes(shard.meta or b"")
    assert list(lines) == [of_shard.keys[row] for row in picked]
    ids = client.get(meta, ["input_ids", "response_mask"])
    for key in lines:
        row = meta.keys.index(key)
        tokens, mask = (unpack(ids)[name][row].numpy() for name in ("input_ids", "response_mask"))
        answer = np.flatnonzero(mask)[0] + np.arange(len(mask) - np.flatnonzero(mask)[0]) if mask.any() else []
        kept = [at for at in ([*answer[:2], *answer[-2:]] if len(answer) > 4 else answer) if mask[at]]
        assert lines[key]["logprobs"] == [tokens[at] / 2 for at in kept], (
            "the backend's log-probs are halves of the ids"
        )
        assert lines[key]["advantage"] == round(row / 7, 4) and lines[key]["step"] == step.shards[0].step
    assert backend.calls == ["logprobs prev 1.0", "logprobs prev 1.0", "begin 1.0", f"accumulate {len(shard.sizes)}"]
    assert sum(len(seen["lengths"]) for seen in backend.seen) == len(meta)
    worker.close()
    client.clear(PARTITION)
    client.close()


def test_a_reference_model_of_its_own_writes_its_column(handle: DataPlaneHandle) -> None:
    policy, reference = RecordingBackend(True, None), RecordingBackend(True, None)
    client = connect(handle, name="driver")
    step = ship(handle, put_rows(client, [3, 4, 5], "reference-r"), Topology(1))
    setup = replace(alone(handle, lambda _rank, _world: policy), reference=lambda _rank, _world: reference)
    worker = TrainWorker(setup)
    assert worker.offload().bytes_moved == worker.onload().bytes_moved == 14
    worker.begin(step.shards[0])
    worker.write_logprobs(PREV)
    worker.write_logprobs(REF)
    worker.accumulate()
    [seen] = policy.seen
    ids = np.array(seen["columns"]["input_ids"])
    assert seen["columns"][PREV] == seen["columns"][REF] == (ids / 2).tolist(), "not the policy's own reference"
    worker.close()
    assert policy.calls == ["offload", "onload", "logprobs prev 1.0", "begin 1.0", "accumulate 1", "close"]
    assert reference.calls == ["offload", "onload", "logprobs prev 1.0", "close"]
    client.clear(PARTITION)
    client.close()


def test_close_closes_all_though_one_fails(handle: DataPlaneHandle) -> None:
    class Broken(RecordingBackend):
        def close(self) -> None:
            super().close()
            raise FloatingPointError("by chance")

    sender, backend = MemorySender(), Broken(True, None)
    worker = TrainWorker(replace(alone(handle, lambda _rank, _world: backend), sender=lambda _host: sender))
    client = worker._client
    with pytest.raises(FloatingPointError, match="by chance"):
        worker.close()
    assert sender.closed and backend.calls == ["close"]
    with pytest.raises(DataPlaneError, match="this client is closed"):
        client.status()
    worker.close()
    assert backend.calls == ["close"]


class ThreadBackend(RecordingBackend):
    """Knows which threads it was called from; its train pass waits for the test."""

    def __init__(self, folder: str) -> None:
        super().__init__(True, None)
        self.folder = folder
        self.threads = {threading.get_ident()}

    def logprobs(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        self.threads.add(threading.get_ident())
        return super().logprobs(*args, **kwargs)

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        self.threads.add(threading.get_ident())
        Path(self.folder, "started").write_text("train")  # pipes: each end waits for the other
        Path(self.folder, "go").read_text()
        super().accumulate(micros, count)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.threads.add(threading.get_ident())
        yield from super().weights()

    def finish_step(self) -> dict[str, float]:
        return {"threads": len(self.threads), "torch": torch.get_num_threads()}


def test_weights_are_sent_again_by_an_actor_that_trains(
    handle: DataPlaneHandle, tmp_path: Path, ray_session: None
) -> None:
    """And whatever the backend does, it does in one thread."""
    for name in ("started", "go"):
        os.mkfifo(tmp_path / name)
    client = connect(handle, name="driver")
    step = ship(handle, put_rows(client, [3, 4, 5], "ray-r"), Topology(1))
    try:
        folder = str(tmp_path)
        setup = alone(handle, lambda _rank, _world: ThreadBackend(folder))
        remote: Any = ray.remote  # its types do not know of groups
        actor = remote(concurrency_groups=CONCURRENCY_GROUPS)(TrainActor).remote(setup)
        worker = TrainHandle(lambda: actor, setup.name, DriverMeter())

        def got(call: Call[T]) -> T:
            return gather([call], "test", 60)[0]

        got(worker.build(None, None))
        got(worker.begin(step.shards[0]))
        for field_name in (PREV, REF):
            got(worker.write_logprobs(field_name))
        first = [ReceiverGroup("engine 0", 1)]
        got(worker.send_weights(got(worker.open_update(1, first, None))))
        training = worker.accumulate()
        assert (tmp_path / "started").read_text() == "train"
        report = got(worker.send_cached(got(worker.open_cached(1, [ReceiverGroup("late", 1)]))))
        got(worker.abort_update("no receiver is there", None))
        assert report.bytes_sent == report.num_bytes > 0
        assert ended([training], "test", 0) == []
        (tmp_path / "go").write_text("")
        got(training)
        assert got(worker.finish()).metrics == {"threads": 1, "torch": 1}
        got(worker.send_weights(got(worker.open_update(2, first, 1))))
        ray.get(actor.close.remote(), timeout=60)
    finally:
        client.clear(PARTITION)
        client.close()


def test_a_step_of_several_shards_is_begun_and_finished_once(handle: DataPlaneHandle) -> None:
    backend = RecordingBackend(True, None)
    client = connect(handle, name="driver")
    worker = TrainWorker(alone(handle, lambda _rank, _world: backend))
    with pytest.raises(RuntimeError, match="no step has begun"):
        worker.finish()
    for number in range(3):
        step = ship(handle, put_rows(client, [3, 4, 5], f"chunk{number}-r"), Topology(1))
        worker.begin(step.shards[0])
        if number == 0:
            with pytest.raises(RuntimeError, match="no step is open"):
                worker.finish()
        worker.accumulate()
    assert worker.finish().metrics == {"train/loss": 0.5}
    assert [call.split()[0] for call in backend.calls] == ["begin", *["accumulate"] * 3, "finish"]
    assert len(backend.seen) == 3
    worker.close()
    client.clear(PARTITION)
    client.close()
