"""Calls of actors: arguments and results are messages that are counted, a tensor does not pass, failures are named."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayTaskError

from headrace.actors.engines.protocol import EngineDied, GenerationEngine
from headrace.actors.process.remote_methods import decode_arguments
from headrace.actors.protocols import SpanTable
from headrace.actors.rollout.actor import RolloutActor
from headrace.actors.train.step_rows import TrainShard
from headrace.actors.train.worker import TrainWorker
from headrace.actors.train.worker_setup import WorkerReport
from headrace.codecs import messages
from headrace.testing import PENDING, FakeActor, FakeCluster
from headrace.trainers.cluster import calls, handles
from headrace.trainers.cluster.calls import ActorFailed, DriverMeter, gather, gather_each
from headrace.trainers.cluster.handles import RolloutHandle, TrainHandle

SHARD = TrainShard(1, b"receipt", np.array([3, 4]), "digest", False)


def test_a_call_is_two_messages_which_are_counted_by_their_bytes() -> None:
    report = WorkerReport({"train/loss": 0.5}, 0.1, b"", 0, SpanTable(0.0, ()))
    cluster = FakeCluster()
    worker = cluster.trainer(lambda method: report if method == "finish" else None)
    actor, meter = worker.ray_actor, cluster.meter
    assert gather([worker.begin(SHARD)], "plan", 1.0) == [None]
    [(name, message, _, group)] = actor.sent
    [decoded] = decode_arguments(TrainWorker.begin, message)
    assert (name, decoded.digest, decoded.sizes.tolist()) == ("begin", "digest", [3, 4])
    assert message[1:] == messages.encode(SHARD), "one byte says how many arguments there are"
    assert meter.take() == len(message) + 1
    assert gather([worker.finish()], "train", 1.0) == [report]
    assert meter.take() == 1 + len(messages.encode(report)) and meter.num_bytes == 0
    assert {group, actor.sent[-1].group} == {"main"}
    gather([worker.abort_update("why", None)], "abort", 1.0)
    assert actor.sent[-1].group == "abort", "beside the main thread, as TrainWorker says"


@pytest.mark.parametrize("smuggled", [torch.zeros(2), {"rows": torch.zeros(2)}, [torch.zeros(2)]])
def test_a_tensor_does_not_pass_the_driver(smuggled: Any) -> None:
    worker = FakeCluster().trainer(lambda method: None)
    with pytest.raises(TypeError, match="Tensor"):
        worker.begin(smuggled)
    assert not worker.ray_actor.sent


def test_ray_handles_travel_beside_the_message() -> None:
    rollout, engine = FakeCluster().rollout(lambda method: None), FakeCluster().engine(lambda method: None, 3)
    sent, other = rollout.ray_actor.sent, engine.ray_actor
    rollout.set_engines([engine])
    rollout.add_engine(engine)
    rollout.remove_engine(engine)
    rollout.suspend_engine(engine, True)
    rollout.readmit_engine(engine)
    assert [call.actors for call in sent] == [([other],), (other,), (), (), (other,)]
    assert decode_arguments(RolloutActor.set_engines, sent[0].message, 1) == (["engine 3"],)
    assert decode_arguments(RolloutActor.add_engine, sent[1].message, 1) == ("engine 3",)
    assert decode_arguments(RolloutActor.remove_engine, sent[2].message) == ("engine 3", 0.0)
    assert decode_arguments(RolloutActor.suspend_engine, sent[3].message) == ("engine 3", True)
    assert decode_arguments(RolloutActor.readmit_engine, sent[4].message, 1) == ("engine 3",)
    worker = FakeCluster().trainer(lambda method: None)
    worker.set_teachers([engine])
    assert worker.ray_actor.sent[0].actors == ([other],)
    told = decode_arguments(TrainWorker.set_teachers, worker.ray_actor.sent[0].message, 1)
    assert told == (["engine 3"], [str(engine.info)])


def test_arguments_of_another_method_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes are not a"):
        decode_arguments(GenerationEngine.drop_weights, messages.encode(["latest"]))


def test_every_call_names_a_method_whose_types_are_known() -> None:
    """What pyright cannot see: that the host's annotations can be read at run time."""
    actor = FakeActor(lambda method: None)
    for kind in (TrainHandle, RolloutHandle):
        handle = kind(lambda: actor, "actor", DriverMeter())
        for name in ("ping", *(name for name in vars(kind) if not name.startswith("_"))):
            method = getattr(handle, name)
            count = len(inspect.signature(method).parameters)
            if not name.endswith(("_engine", "_engines", "_teachers")):  # those take handles: see above
                call = method(*[None] * count)
                assert call.method.__name__ == actor.sent[-1].method
                with pytest.raises(ValueError, match="bytes are not a"):
                    decode_arguments(call.method, messages.encode([object.__doc__] * 9))
    assert handles.ActorHandle is calls.ActorHandle


def test_an_actor_that_does_not_answer_is_named() -> None:
    engines = [FakeCluster().engine(lambda method, answer=answer: answer, n) for n, answer in enumerate((3, PENDING))]
    with pytest.raises(ActorFailed, match="start: no answer within 0.01 s from engine 1 "):
        gather([engine.num_workers() for engine in engines], "start", 0.01)
    first, second = gather_each([engine.num_workers() for engine in engines], "start", 0.01)
    assert first == 3 and isinstance(second, ActorFailed) and second.cause is None and not second.died


RAYS_WORDS = """The actor died unexpectedly before finishing this task.
\tclass_name: TrainActor
\tactor_id: 0d2b
\tpid: 4711
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process \
is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed \
unexpectedly due to SIGSEGV or other unexpected errors."""


@pytest.mark.parametrize(
    ("account", "sentence"),
    [
        (RAYS_WORDS, "its process was killed (SIGKILL, as the kernel does when memory runs out) or crashed"),
        ("The actor is dead because its node has died. Node Id: 1f", "its host is no longer part of the Ray cluster"),
        ("The actor is dead because it was killed by `ray.kill`.", "it was ended on request"),
        ("It is gone.\nNobody knows why. Ask again.", "Nobody knows why"),
        ("", "Ray does not say why"),
        ("words " * 100, ("words " * 32).strip() + " ..."),
    ],
)
def test_ray_s_account_of_a_death_becomes_one_sentence(account: str, sentence: str) -> None:
    assert calls.death_in_words(account) == sentence


def test_an_actor_without_its_engine_s_process_counts_as_dead() -> None:
    cause = EngineDied("request 'g': vLLM's engine process died")
    error = RayTaskError("rollout", "a traceback", cause)
    [failure] = gather_each([FakeCluster().engine(lambda method: error).num_workers()], "rollout", 1.0)
    assert isinstance(failure, ActorFailed) and failure.died and failure.cause is cause
    assert "engine 0" in str(failure) and "vLLM's engine process died" in str(failure)
    error = RayTaskError("rollout", "a traceback", ValueError("of a reward"))
    [failure] = gather_each([FakeCluster().engine(lambda method: error).num_workers()], "rollout", 1.0)
    assert isinstance(failure, ActorFailed) and not failure.died
