"""kill -9 of a rollout actor or an engine of a run: another takes its place, nothing is trained on twice or lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headrace.tests import cli_runs as runs
from headrace.tests.test_end_to_end import steps_of

STEPS = 30


def kill(run_dir: Path, process, name: str) -> None:
    [target] = [found for actor, found in runs.actors(run_dir).items() if actor == name]
    assert target in runs.descendants(process)  # never a process that this test's run did not start
    os.kill(target.pid, signal.SIGKILL)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_killed_rollout_actor_is_replaced(tmp_path: Path, mode: str) -> None:
    """Its engine lives in it: the new one has the version of the others before it answers."""
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir, f"algorithm.mode={mode}", f"algorithm.steps={STEPS}", "rollout.num_engines=2", "validation.every=0"
    )
    runs.wait_for_step(run_dir, 2, process)
    kill(run_dir, process, "rollout 1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["rollout/actors_replaced"] == 1 and steps[-1]["sync/engines"] == 2
    assert all(step["train/sequences"] == 8 * 8 and step["rollout/failed_rows"] == 0 for step in steps)
    assert max(step["staleness/max"] for step in steps) <= (1 if mode == "async" else 0)
    assert steps[-1]["dataplane/leased_rows"] == 0
    assert "rollout 1" in output and "replaced" in output
    assert not runs.shared_memory(run_dir)


@pytest.mark.timeout(400)
def test_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir, "rollout.num_actors=1", "rollout.num_engines=2", f"algorithm.steps={STEPS}", "validation.every=0"
    )
    runs.wait_for_step(run_dir, 2, process)
    kill(run_dir, process, "engine 1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    steps = steps_of(run_dir)
    assert len(steps) == STEPS and steps[-1]["rollout/actors_replaced"] == 1
    assert min(step["sync/engines"] for step in steps) <= 2 and steps[-1]["sync/engines"] == 2
    assert all(step["rollout/failed_rows"] == 0 for step in steps), "its requests went to the other"
    assert not runs.shared_memory(run_dir)
