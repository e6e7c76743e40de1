"""The cluster without processes: real handles call a function, an engine or a trainer, and fail as with Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import RayActorError

from headrace.actors.engines.protocol import EngineDied
from headrace.testing import PENDING, FakeCluster, ScriptedEngine, random_tokens
from headrace.trainers.cluster.calls import ActorFailed, gather, gather_each


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


def test_a_function_answers_each_call_or_not_yet(cluster: FakeCluster) -> None:
    answers: dict[str, Any] = {"abort": None, "save": PENDING, "sent": 3}
    worker = cluster.trainer(lambda method: answers[method], rank=1)
    assert gather([worker.abort(), worker.sent()], "look", 1.0) == [None, 3]
    save = worker.save("/a")
    with pytest.raises(ActorFailed, match="save: no answer within 0.1 s from train worker 1 "):
        gather([save], "save", 0.1)
    answers["save"] = None
    assert gather([save], "save", 0.1) == [None]
    assert [sent.method for sent in worker.ray_actor.sent] == ["abort", "sent", "save"]
    assert cluster.meter.take() > 0


@pytest.mark.parametrize(("error", "died"), [(RayActorError(), True), (EngineDied("gone"), True), (OSError(), False)])
def test_an_exception_fails_the_call(cluster: FakeCluster, error: Exception, died: bool) -> None:
    [failure] = gather_each([cluster.rollout(lambda method: error).num_workers()], "look", 1.0)
    assert isinstance(failure, ActorFailed) and failure.died is died
    assert failure.cause is (None if isinstance(error, RayActorError) else error)


def test_an_engine_is_called_as_in_its_actor(cluster: FakeCluster) -> None:
    hosted = ScriptedEngine(random_tokens(100), version=4)
    engine = cluster.engine(hosted, 2)
    assert gather([engine.version()], "look", 5.0) == [4]
    [info] = gather([engine.ping()], "look", 5.0)
    assert info.name == "engine 2"
    gather([engine.pause("wait")], "pause", 5.0)
    engine.kill()
    [failure] = gather_each([engine.resume()], "resume", 5.0)
    assert isinstance(failure, ActorFailed) and failure.died
    engine.restart()
    assert gather([engine.resume()], "resume", 5.0) == [None]
    cluster.run(hosted.close()).result(5.0)


def test_a_trainer_runs_each_group_in_a_thread_of_its_own(cluster: FakeCluster) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.stopped = ""

        def export_model(self, path: str) -> None:
            asyncio.run(self._until_stopped())

        async def _until_stopped(self) -> None:
            while not self.stopped:
                await asyncio.sleep(0.001)

        def abort_update(self, reason: str, update: object) -> None:
            self.stopped = reason

        def save(self, path: str) -> None:
            raise OSError(28, path)

        def sent(self) -> int:
            raise SystemExit

    worker = cluster.trainer(trainer := Trainer())
    working = worker.export_model("/b")
    assert gather([worker.abort_update("enough", None)], "abort", 5.0) == [None]
    [done, refused] = gather_each([working, worker.save("/a")], "train", 5.0)
    assert not isinstance(done, ActorFailed) and trainer.stopped == "enough"
    assert isinstance(refused, ActorFailed) and isinstance(refused.cause, OSError) and not refused.died
    [ended] = gather_each([worker.sent()], "look", 5.0)
    assert isinstance(ended, ActorFailed) and ended.died
