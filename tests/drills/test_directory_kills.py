"""The directory's process is killed twenty times while a run trains: nothing is lost, and nothing is trained twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.dataplane.recovery.keeper import kept_process
from headrace.tests.runs import cli_runs as runs

pytestmark = [pytest.mark.drill, pytest.mark.processes]

KILLS = 20
GAP_S = 5.0
"""Largest number of seconds for which a death of the directory may hold up the run."""
OF_TIME = ("time/", "idle/", "memory/", "engine/idle_share", "train/tflops", "driver/bytes_per_row")
OF_TIME_ENDS = ("_ms", "_s", "seconds", "fixed_us")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in runs.steps_of(run_dir) if "time/step_s" in line]


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step, but for those that depend on time."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(OF_TIME) and not name.endswith(OF_TIME_ENDS)
        }
        for line in steps_of(run_dir)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_twenty_deaths_of_the_directory_change_no_metric(tmp_path: Path, kind: str) -> None:
    options = (*runs.store(kind), "validation.every=0", "run.max_restarts=0")
    run_dir, dice = tmp_path / "run", random.Random(20)
    process = runs.start(run_dir, *options, "algorithm.steps=100000")
    runs.wait_for_step(run_dir, 2, process)
    actors = {name: one.pid for name, one in runs.actors(run_dir).items()}
    killed = set()
    for _ in range(KILLS):
        time.sleep(dice.uniform(1.0, 1.3))
        assert process.poll() is None, process.communicate()[0]
        killed.add(pid := kept_process(actors["directory"]))
        os.kill(pid, signal.SIGKILL)
    assert len(killed) == KILLS and actors["directory"] not in killed
    runs.wait_for_step(run_dir, runs.steps_of(run_dir)[-1]["step"] + 3, process)
    assert {name: one.pid for name, one in runs.actors(run_dir).items()} == actors
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    found = figures(run_dir)
    slowest_s = max(line["time/step_s"] for line in steps_of(run_dir))
    print(f"{len(found)} steps, the slowest took {slowest_s:.2f} s")
    assert slowest_s < GAP_S, output
    code, output = runs.run(tmp_path / "whole", *options, f"algorithm.steps={len(found)}")
    assert code == 0, output
    for step, (one, other) in enumerate(zip(found, figures(tmp_path / "whole"), strict=True), start=1):
        assert one == other, f"step {step}"
    assert not runs.shared_memory(run_dir)
