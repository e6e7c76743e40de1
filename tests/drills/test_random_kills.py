"""The long drills: kills at random moments change no figure; kills for ten minutes leave memory and leases flat."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from headrace.tests.drills.test_kill_drill import figures_of
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_journal_resume import kill_all

pytestmark = pytest.mark.drill

STEPS = 120
DRILL = (
    "algorithm.mode=async",
    "run.deterministic=true",
    "run.checkpoint_every=5",
    "run.max_restarts=100",
    "rollout.num_engines=2",
    *runs.store("simple"),
    "dataplane.timeout_s=10",
    "validation.every=0",
    f"algorithm.steps={STEPS}",
)
VICTIMS = ("rollout 1", "train worker 0", "everything", "unit-0", "directory")
KILLS = 20
SOAK_S = 600.0
SOAK_KILL_S = 20.0


def num_steps(run_dir: Path) -> int:
    """Logged so far, those taken again counted again."""
    return sum("reward/mean" in line for line in runs.metrics(run_dir))


def kill(run_dir: Path, process: subprocess.Popen[str], victim: str) -> bool:
    """Nothing when it is just being replaced; whether it was there."""
    below = runs.descendants(process)
    found = [one for name, one in runs.actors(run_dir).items() if name.endswith(victim) and one in below]
    for target in found:
        target.send_signal(signal.SIGKILL)
    return bool(found)


def wait_for_a_moment(run_dir: Path, process: subprocess.Popen[str], dice: random.Random, number: int) -> None:
    """Wait until the run is 1 to 6 steps further, and up to half a second into the next. It counts from where the run
    stands, since a kill of everything may have sent it back. number: of the kills so far."""
    done = num_steps(run_dir)
    wanted, deadline = done + dice.randint(1, 6), time.monotonic() + 240
    while done < wanted and process.poll() is None:
        assert time.monotonic() < deadline, f"no step for 240 s after kill {number}"
        time.sleep(0.05)
        if (now := num_steps(run_dir)) > done:
            done, deadline = now, time.monotonic() + 240
    time.sleep(dice.uniform(0.0, 0.5))
    assert process.poll() is None, f"the run ended after {number} kills: {process.communicate()[0]}"


@pytest.mark.timeout(2400)
def test_twenty_kills_at_random_moments_change_no_figure(tmp_path: Path) -> None:
    code, output = runs.run(tmp_path / "whole", *DRILL, timeout_s=600)
    assert code == 0, output
    expected = figures_of(tmp_path / "whole")
    assert list(expected) == list(range(1, STEPS + 1))

    dice, run_dir = random.Random(20), tmp_path / "run"
    process = runs.start(run_dir, *DRILL)
    for number in range(KILLS):
        wait_for_a_moment(run_dir, process, dice, number)
        victim = VICTIMS[number % len(VICTIMS)]
        if victim == "everything":
            kill_all(process, run_dir)
            process = runs.start(run_dir, *DRILL, "--resume")
        else:
            kill(run_dir, process, victim)
    output = runs.succeed(process, timeout_s=900)
    found = figures_of(run_dir)
    assert list(found) == list(expected)
    for step, figures in expected.items():
        assert found[step] == pytest.approx(figures, rel=1e-6), f"step {step}"
    assert not runs.shared_memory(run_dir)


@pytest.mark.timeout(1500)
def test_ten_minutes_of_kills_leave_memory_and_leases_flat(tmp_path: Path) -> None:
    run_dir, dice = tmp_path / "run", random.Random(10)
    process = runs.start(
        run_dir, "algorithm.mode=async", "algorithm.sampler=ready_first", "algorithm.steps=1000000",
        "rollout.num_engines=2", "run.max_restarts=1000", "validation.every=0", "run.checkpoint_every=50",
    )  # fmt: skip
    runs.wait_for_step(run_dir, 50, process)
    lasting = {n: p for n, p in runs.actors(run_dir).items() if not n.startswith("rollout")}
    lasting["driver"] = psutil.Process(process.pid)
    sizes: dict[str, list[int]] = {name: [] for name in lasting}
    ends, kills, next_kill = time.monotonic() + SOAK_S, 0, time.monotonic()
    while time.monotonic() < ends:
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() >= next_kill:
            if kill(run_dir, process, f"rollout {dice.randrange(2)}"):  # else in a second, once it is there again
                kills, next_kill = kills + 1, next_kill + SOAK_KILL_S
        for name, one in lasting.items():
            sizes[name].append(one.memory_info().rss)
        time.sleep(1.0)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=120)
    lines = [line for line in runs.metrics(run_dir) if "reward/mean" in line]
    assert kills >= SOAK_S / SOAK_KILL_S - 1 and lines[-1]["rollout/actors_replaced"] >= kills - 1
    for name, measured in sizes.items():
        quarter = len(measured) // 4
        early, late = statistics.median(measured[quarter : 2 * quarter]), statistics.median(measured[-quarter:])
        assert late <= 1.05 * early, f"{name}: {early / 2**20:.0f} -> {late / 2**20:.0f} MiB"
    window = 2 * 8 * 8
    assert all(line["dataplane/leased_rows"] == 0 for line in lines), "leases are over at every step's end"
    assert max(line["dataplane/rows"] for line in lines) <= window
    assert max(line["staleness/max"] for line in lines) <= 1
    assert not runs.shared_memory(run_dir)
