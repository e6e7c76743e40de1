"""Engines and a trainer that take turns in memory: the order, memory that does not fall, processes that die."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.weight_sync.transports.ipc import IpcSender
from headrace.tests.trainers.grpo.sync_world import DirectEngine, World, noted, world
from headrace.trainers.cluster.calls import ActorFailed, gather
from headrace.trainers.cluster.engine_pool import NoEngineLeft
from headrace.trainers.grpo import gpu_turns
from headrace.trainers.grpo.gpu_turns import TakeTurns
from headrace.trainers.grpo.stages import Stages
from headrace.trainers.grpo.weight_sync import WeightSync
from headrace.trainers.observe.trace import Tracer
from headrace.trainers.supervision.heartbeat import Heartbeat

RESIDUAL = 1 << 20


class Turns:
    """A world whose roles take turns; `events` are the calls that move memory, in their order."""

    def __init__(self, it: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.it, self.engine_bytes = it, [0] * len(it.hosted)
        self.events = it.spy(monkeypatch, self.engine_bytes, "sleep", "commit_weights", "wake")
        for name in ("offload", "onload"):
            monkeypatch.setattr(it.trainer, name, noted(self.events, name, getattr(it.trainer, name)))
        actors: Any = SimpleNamespace(engines=it.pool, workers=[it._worker], rollouts=[])
        self.stages = Stages(Tracer(0), Heartbeat())
        self.roles = TakeTurns(actors, it.sync, self.stages, timeout_s=5.0, residual_bytes=RESIDUAL, bucket_bytes=0)
        it.trainer.offloaded = True

    def step(self, version: int) -> Any:
        self.roles.to_training()
        self.it.trainer.scale = float(version)
        return self.roles.sync(version)


@contextmanager
def turns(monkeypatch: pytest.MonkeyPatch, kinds: Sequence[type[ScriptedEngine]], **sync: Any) -> Iterator[Turns]:
    with world(kinds, **sync) as it:
        yield Turns(it, monkeypatch)


@pytest.mark.parametrize("kind", [ScriptedEngine, DirectEngine])
def test_each_side_makes_room_before_the_other_takes_it(
    monkeypatch: pytest.MonkeyPatch, kind: type[ScriptedEngine]
) -> None:
    with turns(monkeypatch, [kind]) as it:
        it.stages.begin_step(1)
        for version in (1, 2):
            it.events.clear()
            assert it.step(version).engines == 1
            assert it.events == ["sleep 0", "onload", "commit_weights 0", "offload", "wake 0"]
            it.it.expect(version, float(version))
            assert not it.roles.training and it.it.trainer.offloaded
        figures = it.roles.metrics(it.stages.seconds)
        assert all(figures[f"switch/{stage}_s"] > 0 for stage in ("sleep", "wake", "offload", "onload"))
        assert figures["time/switch_s"] == pytest.approx(
            sum(value for key, value in figures.items() if key[-2:] == "_s") / 2
        )


def test_a_version_is_served_again_after_the_trainer_had_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a checkpoint: the version is the same, but the engine has dropped it."""
    with turns(monkeypatch, [ScriptedEngine]) as it:
        it.step(1)
        it.roles.to_training()
        it.roles.to_training()
        assert it.events.count("onload") == 2 and it.it.hosted[0].loaded == {}
        it.roles.sync(1)
        it.it.expect(1, 1.0)


def test_an_engine_that_does_not_let_go_of_its_memory_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turns, "FALL_S", 0.1)
    with turns(monkeypatch, [ScriptedEngine, ScriptedEngine]) as it:
        it.engine_bytes[0] = 5 * RESIDUAL
        it.roles.to_training()
        first, second = it.it.pool.engines
        assert first.dead and not it.it.processes[0].alive and not second.dead
        assert "sleep: engine 0" in first.left_out
        assert (
            "still holds 5 MiB of GPU memory after 0.1 s, expected at most 1 (resources.residual_mib)" in first.left_out
        )
        assert it.roles.sync(1).engines == 1, "the other one goes on"


def test_engines_that_died_asleep_do_not_hold_up_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    with turns(monkeypatch, [ScriptedEngine]) as it:
        it.roles.to_training()
        it.it.processes[0].kill()
        with pytest.raises(NoEngineLeft, match="engine 0"):
            it.roles.sync(1)
        assert it.it.trainer.offloaded and it.it.trainer.gathers == 0
        assert it.it.pool.engines[0].dead, "it is replaced now that its memory is free"


def test_a_trainer_that_keeps_its_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turns, "FALL_S", 0.1)
    with turns(monkeypatch, [ScriptedEngine]) as it:
        it.it.trainer.held_bytes = 3 * RESIDUAL
        with pytest.raises(ActorFailed, match="offload: train worker 0.* still holds 3 MiB of GPU memory"):
            it.step(1)
        assert "wake 0" not in it.events


def test_a_trainer_that_dies_offloaded_is_found_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with turns(monkeypatch, [ScriptedEngine]) as it:
        it.step(1)
        it.it._worker.kill()
        with pytest.raises(ActorFailed, match="onload: train worker 0") as failure:
            it.roles.to_training()
        assert failure.value.died and isinstance(failure.value.__cause__, RayActorError)
        it.roles.end_generation()  # as before a restart of the workers
        it.it.restart_trainer()
        it.roles.sync(0)
        it.it.expect(0, 1.0)


def test_a_new_engine_gets_the_kept_version_without_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    with turns(monkeypatch, [ScriptedEngine, ScriptedEngine]) as it:
        it.step(1)
        engine, gathers = _renewed(it, 0), it.it.trainer.gathers
        assert it.roles.sync_engine(engine, 1)
        it.it.expect(1, 1.0)
        assert it.it.trainer.gathers == gathers and it.it.trainer.offloaded


def test_a_new_engine_waits_for_the_next_sync_or_has_the_memory_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with turns(monkeypatch, [ScriptedEngine, ScriptedEngine]) as it:
        it.step(1)
        it.it.sync.forget()  # as by a transport that keeps nothing
        engine = _renewed(it, 0)
        assert not it.roles.sync_engine(engine, 1), "the other one generates"
        it.it.pool.exclude(it.it.pool.engines[1], "set aside by the test")
        assert it.roles.sync_engine(engine, 1), "no engine generates"
        it.it.expect(1, 1.0)
        assert it.it.trainer.offloaded


def test_catching_up_never_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    with turns(monkeypatch, [DirectEngine]) as it:
        engine, sync = it.it.pool.engines[0], it.it.sync
        with pytest.raises(ValueError, match="no version is kept .*none was sent yet"):
            sync.catch_up(engine)
        it.it.trainer.offloaded = False
        it.it.trainer.on_weight = lambda name: it.it.trainer.abort_update("by the test", None)
        with pytest.raises(NoEngineLeft, match="by the test"):
            sync.sync(1)
        assert engine.version == 0 and sync.kept is None
        gathers = it.it.trainer.gathers
        with pytest.raises(ValueError, match="no version is kept .*version 1 was sent last"):
            sync.catch_up(engine)
        assert it.it.trainer.gathers == gathers


def test_the_first_version_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that dropped version 0 to sleep gets it back while the trainer is offloaded."""
    monkeypatch.setattr(IpcSender, "lasting", False)  # as between GPUs: the publisher then keeps a cache
    with turns(monkeypatch, [ScriptedEngine], cache=True) as it:
        it.it.trainer.offloaded = False
        it.it.trainer.cache_weights(0)
        it.it.trainer.offload()
        sync = WeightSync(it.it.config, [it.it._worker], it.it.pool, lasting=False, in_cache=0)
        [engine] = it.it.pool.engines
        gather([engine.handle.sleep(2)], "sleep", 10.0)
        engine.broken = True
        assert sync.kept == 0
        sync.catch_up(engine)
        gather([engine.handle.wake()], "wake", 10.0)
        it.it.expect(0, 1.0)


def _renewed(it: Turns, number: int) -> Any:
    """Put a new engine with version 0 in the place of one, as after its replacement."""
    engine, hosted = it.it.pool.engines[number], it.it.hosted[number]
    hosted._version, hosted.loaded = 0, {}
    it.it.pool.exclude(engine, "it died")
    engine.renew()
    return engine


def test_stages_apart_are_not_counted_twice() -> None:
    stages = Stages(Tracer(0), Heartbeat())
    wait = threading.Event()
    with stages.timed("sync"):
        wait.wait(0.01)
        with stages.timed("offload", apart=True):
            wait.wait(0.05)
            with stages.timed("inside"):
                wait.wait(0.01)
    assert stages.seconds["offload"] >= 0.06 and stages.seconds["inside"] >= 0.01
    assert 0.01 <= stages.seconds["sync"] < stages.seconds["offload"]
