"""kill -9 of a whole run, and its resume: the steps taken again are the same ones, from the journal's groups."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from headrace.actors.rollout.journal_segments import read_heads
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_end_to_end import FIGURES

pytestmark = pytest.mark.processes

GROUPS, ROWS = 8, 8
"""Prompts per step, and samples per prompt."""
EVERY = 3
"""Steps between checkpoints: the kill comes two steps behind the second, so that it has steps to take again, and has
trimmed before."""
OPTIONS = ("validation.every=0", f"run.checkpoint_every={EVERY}", f"algorithm.group_size={ROWS}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more", [(), pytest.param(("rollout.top_p=0.9", "rollout.top_k=8"), marks=pytest.mark.slow)], ids=["all", "cut"]
)
def test_a_killed_run_takes_its_steps_again_without_generating(tmp_path: Path, more: tuple[str, ...]) -> None:
    run_dir, options = tmp_path / "run", (*OPTIONS, *more)
    process = runs.start(run_dir, *options, "algorithm.steps=100000")
    runs.wait_for_step(run_dir, 2 * EVERY + 2, process)
    kill_all(process, run_dir)
    before = {line["step"]: line for line in runs.steps_of(run_dir)}
    resumed_steps = max(before) + 2
    runs.finish(run_dir, *options, f"algorithm.steps={resumed_steps}", "--resume")
    lines = runs.metrics(run_dir)
    [at] = [index for index, line in enumerate(lines) if line.get("event") == "resumed"]
    after = {line["step"]: line for line in lines[at:] if "reward/mean" in line}
    first = lines[at]["step"]
    # A run that is killed right behind a step may have written its figures, and not yet its checkpoint.
    assert first in {last // EVERY * EVERY for last in (max(before), max(before) - 1)}
    assert list(after) == list(range(first + 1, resumed_steps + 1))
    again = after.keys() & before.keys()
    assert again, "killed right behind a checkpoint: nothing was taken again"
    for step in again:
        assert after[step]["rollout/restored_rows"] == GROUPS * ROWS, "generated again"
        assert after[step]["staleness/max"] == 0
        assert [after[step][name] for name in FIGURES] == pytest.approx(
            [before[step][name] for name in FIGURES], rel=1e-6
        )
    assert after[resumed_steps]["rollout/restored_rows"] == 0
    kept = {head.position for path in (run_dir / "journal").iterdir() for _, head in read_heads(path, 0)[0]}
    assert not kept, "the checkpoint at the end covers every group"


def kill_all(process, run_dir: Path) -> None:
    """kill -9 of every process of a run, and the end of its shared memory, as of a host's."""
    family = [*runs.descendants(process), psutil.Process(process.pid)]
    left = runs.shared_memory(run_dir)
    for one in family:
        one.kill()
    process.communicate(timeout=60)
    psutil.wait_procs(family, timeout=30)
    for name in left:
        shutil.rmtree(Path("/dev/shm") / name, ignore_errors=True)
