"""The watchdog of a real run: a driver that hangs, and one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace.dataplane.owned_folder import process_start
from headrace.tests.runs import cli_runs as runs
from headrace.trainers.supervision.cleanup import is_running
from headrace.trainers.supervision.stuck_report import read_actors

pytestmark = pytest.mark.processes

HANGS = """
import sys, threading
from headrace.cli import main
from headrace.trainers.grpo.train_workers import TrainWorkers
from headrace.trainers.supervision import watchdog

watchdog.MARGIN_S = 1.0

def hang(workers):
    with workers.stages.timed("train"):
        workers.stages.heartbeat.enter("train", 1.0)
        threading.Event().wait()

TrainWorkers.finish = hang
sys.exit(main(sys.argv[1:]))
"""
STEPS = ("validation.every=0", "algorithm.steps=100000")


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow  # tests/trainers/supervision/test_watchdog.py watches stages that do not end
@pytest.mark.timeout(300)
def test_a_driver_that_hangs_is_reported_and_ended(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = str(runs.ROOT / "examples" / "quickstart.yaml")
    done = subprocess.run(
        [sys.executable, "-c", HANGS, "train", config, f"run.dir={run_dir}", *runs.SMALL, *STEPS],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "RunStuck: step 1, stage 'train': no progress for" in done.stdout
    report = (run_dir / "watchdog.txt").read_text()
    assert "rows: 64 (8 groups); a step takes 8 groups of 8" in report
    assert "leased: 64 rows (8 groups) by 1 claims, the oldest for " in report
    assert "waiting: 0 claims for rows, 0 puts for room" in report
    for name in ("rollout 0", "train worker 0"):
        _, _, stacks = report.partition(f"Stacks of {name}:\n")
        assert "most recent call first" in stacks.partition("\n\n")[0], name
    assert "in hang" in report.partition("Stacks of driver:\n")[2]
    assert report.endswith("The run stopped by itself when the watchdog asked it to.\n")
    assert "in hang" in (run_dir / "error.txt").read_text()
    actors = read_actors(run_dir)
    assert {"directory", "rollout 0", "train worker 0"} == {actor.name for actor in actors}
    assert not [actor for actor in actors if is_running(actor.pid) and process_start(actor.pid) == actor.start]
    assert not runs.shared_memory(run_dir)
    assert not (run_dir / "stacks").exists()


@pytest.mark.timeout(300)
def test_a_killed_driver_leaves_nothing_behind(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = runs.start(run_dir, *STEPS)
    runs.wait_for_step(run_dir, 1, process)
    family = runs.descendants(process)
    assert runs.shared_memory(run_dir)
    os.kill(process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)  # its watchdog holds the pipe open until it is through
    assert f"the driver (pid {process.pid}) ended without notice (last heartbeat: step " in output
    _, alive = psutil.wait_procs(family, timeout=20)
    assert all(gone(other) for other in alive), alive
    assert not runs.shared_memory(run_dir)
    assert "ended without notice" in (run_dir / "watchdog.txt").read_text()
