"""actors.json names the host of every process."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

from headrace.actors.process.own_process import ActorInfo
from headrace.testing.data_plane import open_plane
from headrace.trainers.run.launch import needed_processes
from headrace.trainers.run.processes import everyone
from headrace.trainers.supervision.stuck_report import write_actors


def test_processes_of_the_data_plane_are_on_its_host_not_on_the_drivers(tmp_path: Path) -> None:
    plane = SimpleNamespace(host="elsewhere", processes=lambda: {"directory": 7, "unit 0": 8})
    actors = SimpleNamespace(handles=[SimpleNamespace(info=ActorInfo.here("rollout 0"))])
    found = everyone(plane, actors)  # pyright: ignore[reportArgumentType]
    assert [(name, host) for name, _, host in found[:2]] == [("directory", "elsewhere"), ("unit 0", "elsewhere")]
    write_actors(tmp_path, "run", found)
    assert list(needed_processes(tmp_path)) == ["rollout 0"], "no other host's process is looked up here by its pid"


def test_a_data_plane_knows_its_host() -> None:
    with open_plane() as plane:
        assert plane.host == platform.node()
