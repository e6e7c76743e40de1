"""Tests the columns that several teachers write together, and what happens when a teacher does not answer."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from headrace.actors.engine_actor import EngineActor, EngineSetup, ScoreCall, ScoreReply
from headrace.actors.engines.config import ModelConfig
from headrace.actors.engines.factory import EngineConfig
from headrace.actors.engines.protocol import EngineDied
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.process.remote_methods import invoke
from headrace.actors.protocols import TOP_IDS, TOP_LOGPROBS, row_schema
from headrace.actors.rollout.config import RolloutConfig
from headrace.actors.train.teachers import TEACHER, EngineTeacher, Mixture, TeacherSetup
from headrace.actors.train.topology import Topology
from headrace.actors.train.worker import TrainWorker
from headrace.actors.train.worker_setup import WorkerSetup
from headrace.actors.train_backend import MicroBatch, TokenScores
from headrace.codecs import messages
from headrace.codecs.batch import Batch
from headrace.codecs.jagged import pack
from headrace.dataplane.factory import connect
from headrace.dataplane.handle import DataPlaneHandle
from headrace.tests.actors.train.recording_backend import RecordingBackend
from headrace.tests.actors.train.replica_ranks import PARTITION, Step, put_rows, ship
from headrace.tests.actors.train.test_worker import alone

LENGTHS = [5, 3, 4, 6, 2]


class FakeTeacher(RecordingBackend):
    """A teacher whose log-prob of each token is the negative id, divided by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__(True, None)
        self.factor, self.rows = factor, 0

    def score(
        self, micros: Iterable[MicroBatch], count: int, top_k: int, *, temperature: float = 1.0
    ) -> list[TokenScores]:
        taken = list(itertools.islice(micros, count))
        assert len(taken) == count
        self.rows += sum(len(micro.lengths) for micro in taken)
        return [self._of(micro, top_k) for micro in taken]

    def _of(self, micro: MicroBatch, top_k: int) -> TokenScores:
        ids = micro.batch.jagged("input_ids").values
        top = ids[:, None] + torch.arange(top_k)
        return TokenScores(-ids.float() / self.factor, top, -top.float() / self.factor)


def setup_of(handle: DataPlaneHandle, policy: Any, *teachers: TeacherSetup, top_k: int = 0) -> WorkerSetup:
    return replace(alone(handle, lambda _rank, _world: policy), teachers=teachers, top_k=top_k)


def teacher(name: str, backend: Any, weight: float = 1.0, source: int | None = None) -> TeacherSetup:
    return TeacherSetup(name, weight, source, None if backend is None else lambda _rank, _world: backend)


@pytest.fixture
def steps(handle: DataPlaneHandle) -> Iterator[Any]:
    """Function that puts rows with a prefix and returns the step of a single rank in several microbatches."""
    client = connect(handle, name="driver")

    def make(prefix: str) -> Step:
        return ship(handle, put_rows(client, LENGTHS, f"{prefix}-r"), Topology(1), budget=9)

    yield make
    client.clear(PARTITION)
    client.close()


def written(handle: DataPlaneHandle, step: Step, *fields: str) -> Batch:
    with connect(handle, name="reader") as client:
        return client.get_keys(
            PARTITION, step.receipt(0).keys, ["input_ids", "response_mask", "rollout_logprobs", *fields]
        )


def test_teachers_of_a_row_are_averaged_with_their_weights(handle: DataPlaneHandle, steps: Any) -> None:
    step, policy = steps("weights"), RecordingBackend(True, None)
    fakes = FakeTeacher(2.0), FakeTeacher(4.0)
    worker = TrainWorker(setup_of(handle, policy, teacher("a", fakes[0], 3.0), teacher("b", fakes[1])))
    worker.begin(step.shards[0])
    report = worker.write_logprobs(TEACHER)
    worker.accumulate()
    batch = written(handle, step, TEACHER)
    ids, mask = batch.jagged("input_ids").values, batch.jagged("response_mask").values != 0
    expected = -ids * (0.75 / 2 + 0.25 / 4)
    torch.testing.assert_close(batch.jagged(TEACHER).values, expected)
    assert all("teacher_logprobs" in seen["columns"] for seen in policy.seen) and policy.seen
    own = batch.jagged("rollout_logprobs").values
    for name, values in {"a": -ids / 2, "b": -ids / 4, "": expected}.items():
        excess, tokens = report.divergences[name]
        assert tokens == int(mask.sum()) > 0
        assert excess == pytest.approx(float((own - values)[mask].sum()), rel=1e-5)
    assert worker.finish().divergences == {}, "each is reported once"
    worker.close()
    assert fakes[0].calls[-1] == "close"


def test_rows_of_a_data_source_have_its_teacher_alone(handle: DataPlaneHandle, steps: Any) -> None:
    step, policy = steps("sources"), RecordingBackend(True, None)
    fakes = FakeTeacher(2.0), FakeTeacher(4.0)
    sources = np.array([0, 1, 1, 0, 1])
    setups = (teacher("a", fakes[0], source=0), teacher("b", fakes[1], source=1))
    worker = TrainWorker(setup_of(handle, policy, *setups))
    shard = replace(step.shards[0], sources=sources)
    assert messages.decode(messages.encode(shard), type(shard)).sources.tolist() == sources.tolist()
    worker.begin(shard)
    report = worker.write_logprobs(TEACHER)
    worker.accumulate()
    assert [fake.rows for fake in fakes] == [2, 3], "a teacher scores its own rows alone"
    batch = written(handle, step, TEACHER)
    ids = batch.jagged("input_ids").values
    factors = torch.from_numpy(np.repeat(np.where(sources == 0, 2.0, 4.0), batch.jagged("input_ids").lengths)).float()
    torch.testing.assert_close(batch.jagged(TEACHER).values, -ids / factors)
    assert report.divergences["a"][1] + report.divergences["b"][1] == report.divergences[""][1]
    worker.close()


def test_top_tokens_come_from_the_teacher_of_each_row() -> None:
    lengths = [2, 3]
    parts = {"input_ids": torch.int32, "response_mask": torch.uint8, "rollout_logprobs": torch.float32}
    columns = {name: [torch.ones(length, dtype=dtype) for length in lengths] for name, dtype in parts.items()}
    mixture = Mixture(pack(row_schema(None).subset(list(parts)), columns), top_k=2)
    for row, value in ((1, 4), (0, 9)):
        ids = torch.full((lengths[row], 2), value)
        scores = [TokenScores(torch.full((lengths[row],), -1.0 * value), ids, -ids.float())]
        assert mixture.rows_of(np.array([row])).num_rows == 1
        mixture.add(f"of {row}", 0.5, np.array([row]), scores)
    found = mixture.scored(["x", "y"])
    assert found.columns[TEACHER].tolist() == [-9.0] * 2 + [-4.0] * 3
    assert (
        found.columns[TOP_IDS].tolist() == [[9, 9]] * 2 + [[4, 4]] * 3 and found.columns[TOP_IDS].dtype == torch.int32
    )
    assert found.columns[TOP_LOGPROBS].tolist() == [[-9.0, -9.0]] * 2 + [[-4.0, -4.0]] * 3
    assert found.divergences == {"of 1": (15.0, 3), "of 0": (20.0, 2), "": (35.0, 5)}


def test_a_top_token_that_a_teacher_rules_out_is_an_error() -> None:
    """The divergence from such a teacher is infinite, although the sampled tokens have finite log-probs."""
    parts = {"input_ids": torch.int32, "response_mask": torch.uint8, "rollout_logprobs": torch.float32}
    columns = {name: [torch.ones(2, dtype=dtype)] for name, dtype in parts.items()}
    mixture = Mixture(pack(row_schema(None).subset(list(parts)), columns), top_k=1)
    scores = [TokenScores(-torch.ones(2), torch.ones(2, 1), torch.tensor([[-1.0], [-math.inf]]))]
    mixture.add("masked", 1.0, np.array([0]), scores)
    with pytest.raises(FloatingPointError, match="the log-probs of masked are not all finite"):
        mixture.scored(["x"])


def test_a_row_without_a_teacher_and_scores_that_are_not_finite_are_errors(handle: DataPlaneHandle, steps: Any) -> None:
    step, policy = steps("bare"), RecordingBackend(True, None)
    worker = TrainWorker(setup_of(handle, policy, teacher("a", FakeTeacher(2.0), source=0)))
    worker.begin(replace(step.shards[0], sources=np.array([0, -1, 0, 0, -1])))
    with pytest.raises(
        ValueError, match=r"no teacher scores row 'bare-r.*' \(2 of 5 rows\), expected one for the data"
    ):
        worker.write_logprobs(TEACHER)
    worker.close()
    worker = TrainWorker(
        setup_of(handle, policy, teacher("good", FakeTeacher(1.0)), teacher("bad", FakeTeacher(math.nan)))
    )
    worker.begin(step.shards[0])
    with pytest.raises(FloatingPointError, match="the log-probs of bad are not all finite"):
        worker.write_logprobs(TEACHER)
    worker.close()


def test_an_engine_that_was_not_introduced_is_an_error(handle: DataPlaneHandle, steps: Any) -> None:
    step = steps("lost")
    worker = TrainWorker(setup_of(handle, RecordingBackend(True, None), teacher("far", None)))
    worker.begin(step.shards[0])
    with pytest.raises(RuntimeError, match="teacher 'far' has no engine, expected one"):
        worker.write_logprobs(TEACHER)
    worker.close()


class Host:
    """An actor with an engine that scores each token with its negative id, stops or fails, as it is told."""

    def __init__(self, way: str = "") -> None:
        self.way = way

    async def call(self, method: str, message: bytes) -> bytes:
        assert method == "score"
        if self.way == "died":
            raise EngineDied("vLLM's process ended")
        if self.way == "stuck":
            time.sleep(60)
        [call] = invoke(_Arguments(), "score", message)
        wanted = call.wanted != 0
        return messages.encode(ScoreReply(-call.token_ids[wanted].astype(np.float32), None, None))


class _Arguments:
    def score(self, call: ScoreCall) -> list[ScoreCall]:
        return [call]


def engine_batches() -> list[Batch]:
    """Two batches of rows, and one without a wanted token."""
    made = []
    for ids, mask in (([7, 8, 9], [0, 1, 1]), ([4, 5], [0, 0]), ([3, 6], [0, 1])):
        columns = {
            "input_ids": [torch.tensor(ids, dtype=torch.int32)],
            "response_mask": [torch.tensor(mask, dtype=torch.uint8)],
        }
        made.append(pack(row_schema(None).subset(["input_ids", "response_mask"]), columns))
    return made


def test_an_engine_scores_rows_or_is_named_with_host_and_time(ray_session: None) -> None:
    def asked(way: str, timeout_s: float) -> list[TokenScores]:
        actor: Any = ray.remote(Host).options(num_cpus=0).remote(way)
        if way == "killed":
            ray.kill(actor)
        return EngineTeacher("teacher tutor (pid 7 on far)", actor).score(
            engine_batches(), 0, temperature=1.0, timeout_s=timeout_s
        )

    found = [one.logprobs.tolist() for one in asked("", 30.0)]
    assert found == [[0.0, -8.0, -9.0], [0.0, 0.0], [0.0, -6.0]]
    told = r"distillation: teacher tutor \(pid 7 on far\) gave no scores after [\d.]+ s: "
    with pytest.raises(EngineDied, match=told + "its actor died"):
        asked("killed", 30.0)
    with pytest.raises(EngineDied, match=told + "EngineDied: vLLM's process ended"):
        asked("died", 30.0)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=told + r"no answer within 1\.5 s"):
        asked("stuck", 1.5)
    assert time.monotonic() - started < 10


def test_an_engine_without_a_model_scores_nothing() -> None:
    actor = EngineActor(EngineSetup("tutor", 1, EngineConfig(RolloutConfig(), ModelConfig())))
    actor._hosted = ScriptedEngine(lambda *_: [1])  # type: ignore[assignment]
    nothing = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match="tutor: its engine ScriptedEngine cannot score tokens"):
        asyncio.run(actor.score(ScoreCall(nothing, nothing, nothing.astype(np.uint8), 0, 1.0)))
