"""kill -9 of one process of a run: the run ends soon, says who died, and leaves nothing behind."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from headrace.tests import cli_runs as runs


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("victim", "store", "extra"),
    [
        ("rollout 0", "shm", ()),
        ("train worker 1", "shm", ("trainer.dp=2",)),
        ("unit-0", "simple", ("dataplane.timeout_s=10",)),
        ("directory", "shm", ("dataplane.timeout_s=10",)),
    ],
)
def test_killed_process_is_named_and_nothing_is_left(tmp_path, victim, store, extra):
    run_dir = tmp_path / "run"
    process = runs.start(run_dir, f"dataplane.store.kind={store}", "algorithm.steps=100000", *extra)
    runs.wait_for_step(run_dir, 2, process)
    family = runs.descendants(process)
    [target] = [process for name, process in runs.actors(run_dir).items() if name.endswith(victim)]
    assert runs.shared_memory(run_dir)
    assert target in family  # never a process that this test's run did not start
    os.kill(target.pid, signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert process.returncode == 1, output
    assert victim in output and str(target.pid) in output, output
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [other for other in alive if other.status() != psutil.STATUS_ZOMBIE]
    assert not runs.shared_memory(run_dir)
    assert victim in Path(run_dir / "error.txt").read_text()


@pytest.mark.timeout(400)
def test_a_killed_engine_is_left_out_and_the_run_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    process = runs.start(run_dir, "rollout.num_actors=1", "rollout.num_engines=2", "algorithm.steps=40")
    runs.wait_for_step(run_dir, 2, process)
    [target] = [process for name, process in runs.actors(run_dir).items() if name == "engine 1"]
    assert target in runs.descendants(process)
    os.kill(target.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    steps = [line for line in runs.metrics(run_dir) if "sync/engines" in line]
    assert steps[0]["sync/engines"] == 2 and steps[0]["sync/engines_left_out"] == 0
    assert steps[-1]["sync/engines"] == 1 and steps[-1]["sync/engines_left_out"] == 1
    assert all(line["rollout/failed_rows"] == 0 for line in steps), "its requests went to the other"
    assert len(steps) == 40 and not runs.shared_memory(run_dir)
