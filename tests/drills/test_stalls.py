"""Processes of a run that are stopped for a while (SIGSTOP, then SIGCONT) are slow, not dead. No process is replaced,
and no figure changes."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from headrace.tests.drills.test_kill_drill import figures_of
from headrace.tests.drills.test_random_kills import num_steps
from headrace.tests.runs import cli_runs as runs
from headrace.trainers.supervision.stuck_report import read_actors

pytestmark = pytest.mark.drill

STALL_S = (0.2, 3.0)
"""Shortest and longest stall in seconds; every bound of `BOUNDS` is longer than the longest."""
BOUNDS = (
    "dataplane.timeout_s=10",
    "dataplane.lease_s=10",
    "dataplane.reserve_s=10",
    "sync.timeout_s=10",
    "resources.stage_timeout_s=20",
    "resources.collective_timeout_s=20",
)
COMMON = (*BOUNDS, "run.deterministic=true", "run.max_restarts=0", "run.checkpoint_every=10", "validation.every=25")
VARIANTS = {
    "async": ("algorithm.mode=async", *runs.store("simple"), "rollout.num_engines=2"),
    "sync": ("algorithm.mode=sync", "dataplane.store.kind=shm", "trainer.dp=2"),
    "engines": ("algorithm.mode=async", "dataplane.store.kind=shm", "rollout.num_actors=1", "rollout.num_engines=2"),
}
SYSTEM = ("raylet", "gcs_server")
"""Ray's own processes, by the names of their programs."""


def processes(run_dir: Path, process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """Every process of the run by name: its actors, its driver, its watchdog and Ray's own."""
    driver = psutil.Process(process.pid)
    below = driver.children(recursive=True)
    found = {name: one for name, one in runs.actors(run_dir).items() if one in below}
    found["driver"] = driver
    for one in below:
        if one.name() in SYSTEM:
            found[one.name()] = one
        elif any(part.endswith("supervision.watchdog") for part in one.cmdline()):
            found["watchdog"] = one
    return found


def stall(one: psutil.Process, seconds: float) -> None:
    """Stop a process for so long."""
    one.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        one.send_signal(signal.SIGCONT)


def expect_unmoved(tmp_path: Path, variant: str, *, steps: int, stalls: int, seed: int) -> None:
    """Compare a run in which `stalls` stalls begin at random moments with an undisturbed one."""
    overrides = (*COMMON, *VARIANTS[variant], f"algorithm.steps={steps}")
    code, output = runs.run(tmp_path / "whole", *overrides, timeout_s=600)
    assert code == 0, output
    expected = figures_of(tmp_path / "whole")
    assert list(expected) == list(range(1, steps + 1))

    dice, run_dir = random.Random(seed), tmp_path / "run"
    process = runs.start(run_dir, *overrides)
    runs.wait_for_step(run_dir, 1, process)
    began = processes(run_dir, process)
    actors = {actor.name: actor.pid for actor in read_actors(run_dir)}
    assert {"driver", "watchdog", "directory", "rollout 0", "train worker 0", *SYSTEM} <= set(began), sorted(began)
    order: list[str] = []
    for number in range(stalls):
        order = order or dice.sample(sorted(began), len(began))
        name, seconds = order.pop(), dice.uniform(*STALL_S)
        wanted, deadline = num_steps(run_dir) + dice.randint(0, 2), time.monotonic() + 120
        while num_steps(run_dir) < wanted and process.poll() is None:
            assert time.monotonic() < deadline, f"no step for 120 s after stall {number}"
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, 0.3))
        assert process.poll() is None, f"the run ended after {number} stalls: {process.communicate()[0]}"
        print(f"stall {number}: {name} for {seconds:.1f} s, step {num_steps(run_dir)}", flush=True)
        stall(began[name], seconds)
    output = runs.succeed(process, timeout_s=600)
    assert {actor.name: actor.pid for actor in read_actors(run_dir)} == actors, "a process was replaced"
    found = figures_of(run_dir)
    assert list(found) == list(expected)
    for step, figures in expected.items():
        assert found[step] == pytest.approx(figures, rel=1e-6), f"step {step}"
    lines = [line for line in runs.metrics(run_dir) if "reward/mean" in line]
    assert len(lines) == steps and lines[-1]["run/restarts"] == lines[-1]["rollout/actors_replaced"] == 0
    assert all(line["sync/engines_left_out"] == 0 for line in lines if "sync/engines_left_out" in line)
    assert not (run_dir / "watchdog.txt").exists() and not (run_dir / "error.txt").exists()
    assert not runs.shared_memory(run_dir)


@pytest.mark.timeout(600)
def test_five_stalls_change_no_figure(tmp_path: Path) -> None:
    expect_unmoved(tmp_path, "async", steps=150, stalls=5, seed=5)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("variant", "steps", "stalls"), [("async", 800, 50), ("sync", 800, 50), ("engines", 400, 20)])
def test_many_stalls_change_no_figure(tmp_path: Path, variant: str, steps: int, stalls: int) -> None:
    expect_unmoved(tmp_path, variant, steps=steps, stalls=stalls, seed=50)
