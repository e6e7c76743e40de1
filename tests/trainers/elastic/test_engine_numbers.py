"""The driver's part of scaling, with actors that have no process: who starts where, who waits, and who is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from headrace.testing import PENDING, FakeCluster
from headrace.trainers.cluster.calls import ActorInfo
from headrace.trainers.cluster.engine_pool import Engine, EnginePool
from headrace.trainers.cluster.gpu_bundles import Reservation
from headrace.trainers.cluster.places.placement import Host, Placement, Seat
from headrace.trainers.cluster.run_actors import RunActors
from headrace.trainers.config.config import Config
from headrace.trainers.elastic import scaling
from headrace.trainers.elastic.scale_order import ANSWER, ORDER, ScaleOrders
from headrace.trainers.elastic.scaling import Scaling
from headrace.trainers.grpo.gpu_turns import BothResident
from headrace.trainers.grpo.rollout_pool import RolloutPool
from headrace.trainers.grpo.stages import Stages
from headrace.trainers.observe.trace import Tracer
from headrace.trainers.supervision.heartbeat import Heartbeat

START_S = 100.0
NEAR = Host("near", 0, (), 0.0, "node 1", True)
FAR = Host("far", 0, (), 1.0, "node 2")
ELASTIC = {"resources": {"elastic": True, "ray_address": "auto"}}


class World:
    """A run of two engines behind one rollout actor, whose Ray has `hosts`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, sections: dict[str, Any] | None = None) -> None:
        self.now, self.folder, self.hosts = 1000.0, folder, [NEAR]
        self.gone: dict[str, Any] = {}
        """How an engine answers a method, by `name/method`."""
        self.freed: list[str] = []
        self.left: list[str] = []
        monkeypatch.setattr(scaling.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(scaling, "read_hosts", lambda: tuple(self.hosts))
        config = Config.model_validate({"rollout": {"num_engines": 2, "num_actors": 1}, **(sections or {})})
        self.cluster = FakeCluster()
        engines = [Engine(self.cluster.engine(self.answer(f"engine {n}"), n), 1) for n in range(2)]
        seats = tuple(Seat(engine.name, 1, 0) for engine in engines)
        rollout = self.cluster.rollout(self.answer("rollout 0"))
        ranks, rollouts = (Seat("train worker 0", 1, 0),), (Seat("rollout 0", 1, 0),)
        self.reservation = Reservation(Placement("cpu", "", (NEAR,), seats, ranks, rollouts))
        self.actors = RunActors(EnginePool(engines, False), [rollout], [], 3, (), START_S, self.placement)
        self.actors.starter = self  # pyright: ignore[reportAttributeAccessIssue]
        self.actors.on_left = self.left.append
        self.route, stages = SimpleNamespace(kind="collective"), Stages(Tracer(0), Heartbeat())
        roles = BothResident(None)  # pyright: ignore[reportArgumentType]  # version 0 needs no weights
        run: Any = SimpleNamespace(
            config=config, actors=self.actors, roles=roles, stages=stages,
            rollouts=RolloutPool(self.actors, roles, stages, START_S),
        )  # fmt: skip
        self.orders = ScaleOrders(folder)
        self.scaling = Scaling(run, self.orders)

    def answer(self, name: str) -> Any:
        return lambda method: self.gone.get(
            f"{name}/{method}", {"configure": ActorInfo(name, 1, "near"), "num_workers": 1}.get(method)
        )

    def order(self, engines: int) -> None:
        (self.folder / ORDER).write_text(json.dumps({"id": f"order of {engines}", "engines": engines}))

    def look(self, times: int = 4) -> dict[str, Any]:
        """The run's answer after a few looks, each a second after the last."""
        for _ in range(times):
            self.now += 1.0
            self.scaling.look(0)
        return json.loads((self.folder / ANSWER).read_text()) if (self.folder / ANSWER).exists() else {}

    @property
    def names(self) -> list[str]:
        return [engine.name for engine in self.actors.engines.engines]

    # ---------------- The starter of actors.

    @property
    def placement(self) -> Placement:
        return self.reservation.placement

    def one_more(self, reservation: Reservation) -> Any:
        self.reservation = reservation
        name = reservation.placement.engines[-1].name
        return self.cluster.engine(self.answer(name), int(name[-1]))

    def fits(self, node: str) -> bool:
        return node != "unlike the others"

    def free(self, name: str) -> None:
        self.freed.append(name)
        self.reservation = self.reservation.without(name)


def test_an_order_that_does_not_fit_is_refused_with_the_number_that_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, tmp_path)
    world.hosts = [replace(NEAR, free_cpus=1.0), FAR]
    world.order(5)
    assert world.look()["state"] == "under way", "Ray notices late that actors have ended"
    answer = world.look(20)
    assert answer["state"] == "refused" and world.names == ["engine 0", "engine 1"] and world.orders.wanted == 2
    assert answer["why"] == (
        "--engines: got 5, expected at most 3, because an engine needs 1 free CPU(s) on a host; near has room for 1"
    ), "the far host joined later"
    world.order(3)
    assert world.look()["state"] == "done" and world.names == ["engine 0", "engine 1", "engine 2"]
    assert not world.actors.engines.engines[2].left_out


def test_an_elastic_run_waits_for_a_host_and_ends_what_is_not_wanted_any_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, tmp_path, ELASTIC)
    world.order(4)
    answer = world.look(60)
    assert answer["state"] == "under way" and answer["why"].startswith("2 engine(s) wait for room: an engine needs 1")
    world.gone["engine 2/build"] = PENDING
    world.hosts = [NEAR, FAR]
    world.look(1)
    world.hosts = [NEAR, replace(FAR, free_cpus=0.0)]
    assert world.look()["why"].startswith("engine 2 starts on far; 1 engine(s) wait for room: ")
    world.order(2)
    assert world.look()["state"] == "done" and world.freed == world.left == ["engine 2"]
    world.order(1)
    world.look()
    world.scaling.end_step(lambda actor: None)
    assert world.look()["state"] == "done" and world.names == ["engine 0"] and world.left == ["engine 2", "engine 1"]
    sent = [one.method for one in world.actors.rollouts[0].ray_actor.sent]
    assert sent.count("retire_engine") == 1


def test_an_engine_that_does_not_start_is_told_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, tmp_path)
    world.hosts = [replace(NEAR, free_cpus=1.0)]
    world.gone["engine 2/build"] = RayTaskError("build", "", ValueError("model.path: got 'gone', expected a folder"))
    world.order(3)
    answer = world.look()
    assert answer["state"] == "refused"
    assert answer["why"] == "a new engine could not start: model.path: got 'gone', expected a folder"
    world.gone["engine 2/build"] = PENDING
    world.order(3)
    assert "no answer" not in world.look(int(START_S) + 5)["why"]
    answer = world.look()
    assert answer["state"] == "refused" and f"(resources.start_timeout_s={START_S:g})" in answer["why"]
    assert world.names == ["engine 0", "engine 1"] and world.freed == ["engine 2"] * 2


def test_an_elastic_run_starts_an_engine_elsewhere_if_its_host_leaves_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, tmp_path, ELASTIC)
    world.gone["engine 2/build"] = RayActorError(error_msg="its node has died")
    world.hosts = [NEAR, FAR]
    world.order(3)
    world.look(1)
    world.hosts = [NEAR]
    answer = world.look()
    assert answer["state"] == "under way" and answer["why"].startswith("1 engine(s) wait for room") and world.freed
    del world.gone["engine 2/build"]
    world.hosts = [NEAR, Host("third", 0, (), 1.0, "node 3")]
    assert world.look()["state"] == "done" and world.orders.wanted == 3


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"run": {"replay": "runs/recorded"}}, "this run generates nothing"),
        ({"pool": {"address": "auto"}}, "borrows its GPUs from a pool"),
        (
            {"resources": {"rollout_gpus": [0], "trainer_gpus": [1]}},
            "resources.rollout_gpus gives each engine its GPUs",
        ),
        ({"resources": {"switch_roles": "always"}}, "engines and train workers share GPUs"),
        ({"algorithm": {"prompts_per_step": 3}}, "expected at most algorithm.prompts_per_step=3"),
    ],
)
def test_runs_whose_engines_are_fixed_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sections: dict, sentence: str
) -> None:
    world = World(monkeypatch, tmp_path, sections)
    world.actors.engines.embedded = True
    world.order(4)
    answer = world.look(1)
    assert answer["state"] == "refused" and answer["why"].startswith("--engines: got 4, ") and sentence in answer["why"]
    assert world.orders.wanted is None


def test_late_news_of_an_engine_that_has_left_does_not_touch_the_one_that_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rollout call that met an engine reports it at its end, when the engine may have left the run."""
    world = World(monkeypatch, tmp_path)
    called_s = world.now
    world.order(1)
    world.look(1)
    world.scaling.end_step(lambda actor: None)
    rollouts = RolloutPool(world.actors, BothResident(None), Stages(Tracer(0), Heartbeat()), START_S)  # pyright: ignore[reportArgumentType]
    rollouts.exclude("engine 1", "its host is gone", called_s)
    assert world.names == ["engine 0"]
    world.hosts = [replace(NEAR, free_cpus=1.0)]
    world.order(2)
    assert world.look()["state"] == "done" and world.names == ["engine 0", "engine 1"]
    rollouts.exclude("engine 1", "its host is gone", called_s)
    assert not world.actors.engines.engines[1].left_out
