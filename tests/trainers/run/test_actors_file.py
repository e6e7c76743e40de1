"""actors.json names the host of every process."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.actors.process.own_process import ActorInfo
from headrace.dataplane.owned_folder import pid_space, process_start
from headrace.testing import FakeCluster
from headrace.testing.data_plane import open_plane
from headrace.trainers.cluster import lost_hosts
from headrace.trainers.cluster.calls import ActorFailed
from headrace.trainers.cluster.engine_pool import Engine, EnginePool
from headrace.trainers.cluster.run_actors import RunActors
from headrace.trainers.pool.server.far_processes import end_far_processes, end_own
from headrace.trainers.run import listed_processes
from headrace.trainers.run.listed_processes import ListedProcesses
from headrace.trainers.run.restarts import needed_processes
from headrace.trainers.supervision.stuck_report import listed_actors, read_actors, write_actors


def test_processes_of_the_data_plane_are_on_its_host_not_on_the_drivers(tmp_path: Path) -> None:
    plane: Any = SimpleNamespace(host="elsewhere", space="far", processes=lambda: {"directory": 7, "unit 0": 8})
    run = ListedProcesses(tmp_path, "run")
    run.add_plane(plane)
    run.add_actors([ActorInfo.here("rollout 0")])
    found = read_actors(tmp_path, "run")
    assert [(one.name, one.host) for one in found[:2]] == [("directory", "elsewhere"), ("unit 0", "elsewhere")]
    assert list(needed_processes(tmp_path)) == ["rollout 0"], "no other host's process is looked up here by its pid"


def test_the_list_keeps_what_was_replaced_and_may_live(tmp_path: Path) -> None:
    own = ActorInfo.here("engine 0")
    me = (own.name, own.pid, own.host, own.space, own.start)
    for number, run in enumerate(("first", "second")):
        write_actors(tmp_path, run, [])
        assert read_actors(tmp_path) == [], "an earlier run's list is not that of this run"
        write_actors(tmp_path, run, [me, ("engine 1", me[1], "host", me[3], 1), ("engine 2", 9, "far", "far", number)])
    write_actors(tmp_path, "second", [("engine 0", 11, "far", "far", 3)])
    assert [(one.name, one.pid) for one in read_actors(tmp_path)] == [
        ("engine 0", 11),
        ("engine 1", me[1]),
        ("engine 2", 9),
    ]
    kept = [(one.name, one.run) for one in listed_actors(tmp_path) or [] if one not in read_actors(tmp_path)]
    assert sorted(kept) == [("engine 0", "first"), ("engine 0", "second"), ("engine 2", "first")]


def test_an_actor_is_listed_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(lost_hosts.ray, "nodes", lambda: [{"Alive": True, "NodeID": "here"}])

    def answer(method: str) -> Any:
        events.append(method)
        return ActorInfo("engine 0", 7, "here") if method == "configure" else None

    cluster = FakeCluster()
    monkeypatch.setattr(cluster, "kill", lambda actor: None)
    engine = cluster.engine(answer)
    engine.restart = lambda: None
    actors = RunActors(EnginePool([Engine(engine, 1)], embedded=False), [], [], 1, (), 5.0)
    actors.on_started = lambda infos: events.append(f"listed {infos[0].pid}")
    actors.replace(engine, ActorFailed("it died", died=True))
    assert events.index("configure") < events.index("listed 7") < events.index("build")


@pytest.mark.processes
def test_an_actor_that_ray_does_not_end_is_ended_by_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_processes, "END_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as process:
        run = ListedProcesses(tmp_path, "run")
        run.add_actors(
            [ActorInfo("train worker 0", process.pid, "host", space=pid_space(), start=process_start(process.pid))]
        )
        run.end_actors()
        assert process.wait(10) < 0


@pytest.mark.processes
def test_far_processes_are_ended_by_the_nodes_of_their_host() -> None:
    elsewhere = ("another host", 1, 1)
    assert end_far_processes([elsewhere], 1.0) == [elsewhere], "there is no node that could say that it has ended"
    with subprocess.Popen(["sleep", "60"]) as process:
        own = (pid_space(), process.pid, process_start(process.pid))
        assert end_own([elsewhere, own]) == [own] and process.wait(10) < 0


def test_a_data_plane_knows_its_host() -> None:
    with open_plane() as plane:
        assert plane.host == platform.node()
