"""A job that a scheduler starts again continues its run, or begins it again if that has no checkpoint yet."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headrace.trainers.jobs.start_again import RESUME


@pytest.fixture(params=["sh", "bash"])
def start(request: pytest.FixtureRequest, tmp_path: Path):
    """Begins a start of a job with a name. Returns its option, and the names of the files with earlier figures."""

    def begin(job: str) -> tuple[str, int]:
        script = f"RUN_DIR={tmp_path}\nJOB=$RUN_DIR/{job}\n{RESUME}echo $RESUME"
        said = subprocess.run([request.param, "-c", script], capture_output=True, text=True, check=True)
        assert not said.stderr
        return said.stdout.strip(), len(list((tmp_path / job).glob("metrics-before-*")))

    return begin


@pytest.mark.processes
def test_a_start_without_a_checkpoint_begins_again_and_keeps_the_figures(start, tmp_path: Path) -> None:
    figures, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoints" / "step_000005"
    assert start("job-1") == ("", 0) and start("job-1") == ("", 0)  # the first start ended before its first figures
    figures.write_text("{}\n")
    assert start("job-1") == ("", 1) and not figures.exists()
    figures.write_text("{}\n")
    checkpoint.parent.mkdir()
    checkpoint.with_suffix(".json").touch()  # without its folder, the checkpoint is not whole
    checkpoint.with_suffix(".tmp").mkdir()
    begun_again, _ = start("job-1")
    assert begun_again == "" and not figures.exists()
    figures.write_text("{}\n")
    checkpoint.mkdir()
    assert start("job-1")[0] == "--resume" and figures.exists()


@pytest.mark.processes
def test_figures_of_another_job_are_left_where_they_are(start, tmp_path: Path) -> None:
    """The run refuses to continue without a checkpoint, and the user hears it."""
    figures = tmp_path / "metrics.jsonl"
    assert start("job-1") == ("", 0)
    figures.write_text("{}\n")
    assert start("job-2") == start("job-2") == ("--resume", 0) and figures.exists()
