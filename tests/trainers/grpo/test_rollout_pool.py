"""The pool of rollout actors and engines: engines that die or hang during a wait are replaced, and stages nest."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayTaskError

from headrace.actors.engines.protocol import EngineDied
from headrace.actors.engines.router import NoEngineAvailable
from headrace.testing import PENDING, FakeActor, FakeCluster
from headrace.testing.cluster import Answer
from headrace.trainers.cluster import calls, lost_hosts
from headrace.trainers.cluster.calls import ActorFailed
from headrace.trainers.cluster.engine_pool import Engine, EnginePool, NoEngineLeft
from headrace.trainers.cluster.lost_hosts import HostGone
from headrace.trainers.cluster.run_actors import RunActors
from headrace.trainers.grpo.gpu_turns import BothResident
from headrace.trainers.grpo.rollout_pool import RolloutPool
from headrace.trainers.grpo.stages import Stages
from headrace.trainers.observe.trace import Tracer
from headrace.trainers.supervision.heartbeat import Heartbeat

BOUND_S = 100.0


class Run:
    """A rollout actor behind whose router are two engines; `gone` says how an engine answers, by number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_replaced: int) -> None:
        self.now = 0.0
        self.gone: dict[int, Any] = {}
        self.events: list[str] = []
        monkeypatch.setattr(calls.time, "monotonic", lambda: self.now)
        cluster = FakeCluster()
        monkeypatch.setattr(cluster, "kill", lambda actor: self.events.append("killed"))
        monkeypatch.setattr(lost_hosts.ray, "nodes", lambda: [{"Alive": True, "NodeID": "here"}])
        engines = [Engine(cluster.engine(self.answer(index), index), 1) for index in range(2)]
        for index, engine in enumerate(engines):
            engine.handle.restart = lambda index=index: self.restarted(index)
        self.rollout = cluster.rollout(lambda method: 7)
        self.actors = RunActors(EnginePool(engines, embedded=False), [self.rollout], [], max_replaced, (), BOUND_S)
        self.actors.on_death.append(lambda died: self.events.append(f"died: {died}"))
        stages = Stages(Tracer(0), Heartbeat())
        roles = BothResident(None)  # pyright: ignore[reportArgumentType]
        self.pool = RolloutPool(self.actors, roles, stages, BOUND_S)
        self.pool.begin_watch()

    def answer(self, index: int) -> Answer:
        def answer(method: str) -> Any:
            if method in ("info", "configure"):
                return calls.ActorInfo(f"engine {index}", 1, "here")
            return self.gone.get(index, int(self.now) if method == "progress" else None)

        return answer

    def restarted(self, index: int) -> None:
        self.events.append(f"restarted {index}")
        self.gone.pop(index, None)

    def look(self, seconds: float) -> None:
        """Look at the actors once per second, for so many seconds."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.pool.look(0)


def test_an_engine_whose_own_process_died_is_ended_and_replaced_within_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The actor of the engine is alive and says so; the requests go to the other engine meanwhile."""
    run = Run(monkeypatch, max_replaced=3)
    run.look(3)
    run.gone[0] = RayTaskError("progress", "a traceback", EngineDied("vLLM's engine process died"))
    run.look(3)
    died, killed, restarted = run.events
    assert "engine 0" in died and "vLLM's engine process died" in died
    assert (killed, restarted) == ("killed", "restarted 0"), "the old actor first: it holds the GPU"
    assert run.actors.replaced == 1 and not run.actors.engines.engines[0].left_out


def test_late_news_of_a_dead_engine_does_not_touch_the_one_that_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout call that met the old process may report it after the new one is in use."""
    run = Run(monkeypatch, max_replaced=3)
    run.look(3)
    called_s = run.now
    run.gone[0] = RayTaskError("progress", "a traceback", EngineDied("its process died"))
    run.look(3)
    [first, second] = run.actors.engines.engines
    run.pool.exclude(first.name, "its process died", called_s)
    assert not first.left_out
    run.look(1)
    run.pool.exclude(first.name, "it died again", run.now)
    run.pool.exclude(second.name, "its process died", called_s)
    assert (first.left_out, second.left_out) == ("it died again", "its process died")


def test_the_last_engine_that_died_and_may_not_be_replaced_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, max_replaced=0)
    run.gone |= dict.fromkeys((0, 1), RayTaskError("progress", "a traceback", EngineDied("its process died")))
    with pytest.raises(NoEngineLeft, match="engine 0: .*its process died; engine 1: .*its process died"):
        run.look(3)


def test_a_sync_goes_on_with_the_engines_that_found_a_place_when_all_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of both is gone, and the others have room for one."""
    run, syncs = Run(monkeypatch, max_replaced=3), list[int]()
    [first, second] = run.actors.engines.engines
    replace = run.actors.replace

    def replace_first(handle: Any, failure: ActorFailed) -> None:
        if handle is second.handle:
            raise HostGone("host b is gone, and no other host has room for it", died=True)
        replace(handle, failure)

    def sync(version: int) -> str:
        syncs.append(version)
        if len(syncs) == 1:
            for engine in (first, second):
                engine.dead = True
                run.actors.engines.exclude(engine, "its host does not answer")
        assert run.actors.engines.active
        return "synced"

    monkeypatch.setattr(RunActors, "replace", lambda actors, handle, failure: replace_first(handle, failure))
    monkeypatch.setattr(run.pool.roles, "sync", sync)
    monkeypatch.setattr(run.pool.roles, "sync_engine", lambda engine, version: True)
    assert run.pool.sync_weights(3) == "synced" and syncs == [3, 3]
    assert not first.left_out and second.dead


def test_a_call_that_waited_in_vain_for_a_dead_engine_is_sent_again_once_another_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, max_replaced=3)
    run.look(3)
    in_vain = ActorFailed("rollout 0 failed", NoEngineAvailable("no engine was available for 60 s"))
    assert not run.pool.may_repeat(in_vain, run.now, 0), "both engines live, so it would only happen again"
    run.gone[0] = RayTaskError("progress", "a traceback", EngineDied("vLLM's engine process died"))
    began, run.now = run.now, run.now + 60.0
    assert not run.pool.may_repeat(ActorFailed("rollout 0 failed", KeyError("a reward")), began, 0)
    assert run.pool.may_repeat(in_vain, began, 0) and run.events[-1] == "restarted 0" and run.actors.replaced == 1
    assert not run.pool.may_repeat(in_vain, run.now + 1.0, 0)


def test_an_engine_that_hangs_is_replaced_and_not_the_rollout_actor_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, max_replaced=3)
    run.look(3)
    run.gone[1] = PENDING
    run.look(BOUND_S + 5)
    assert run.events[-1] == "restarted 1"
    assert "engine 1 (" in run.events[-3] and "was stuck for 100 s without an answer, and was ended" in run.events[-3]
    assert run.pool.still_s(run.rollout) < BOUND_S


def test_a_rollout_actor_gets_on_while_its_engines_do_and_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_replaced=3)
    run.look(3 * BOUND_S)
    assert run.pool.still_s(run.rollout) < 5 and not run.events
    run.rollout.ray_actor = FakeActor(lambda method: PENDING)
    run.look(BOUND_S + 5)
    assert run.pool.still_s(run.rollout) >= BOUND_S


def test_a_stage_inside_a_stage_leaves_the_outer_one_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat(bound_s=5.0)
    beats: list[tuple[str, float | None]] = []
    monkeypatch.setattr(heartbeat, "enter", lambda stage, bound_s=None: beats.append((stage, bound_s)))
    monkeypatch.setattr(heartbeat, "leave", lambda: beats.append(("-", None)))
    stages = Stages(Tracer(0), heartbeat)
    stages.report_progress()
    with stages.timed("claim"):
        with pytest.raises(ActorFailed), stages.timed("replace", 900.0):
            raise ActorFailed("it did not come up")
        with stages.timed("replace", 900.0):
            pass
        stages.report_progress()
    assert beats == [
        ("claim", None), ("replace", 900.0), ("replace", 900.0), ("claim", None), ("claim", None), ("-", None)
    ]  # fmt: skip
