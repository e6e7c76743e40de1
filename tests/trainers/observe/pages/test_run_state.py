"""Tests that a page says whether its run is under way, finished, interrupted or failed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from headrace.trainers.config.load import build_config
from headrace.trainers.observe.pages.run_state import run_state
from headrace.trainers.observe.run_folder import RunFolder

FINISHED = {"event": "finished", "step": 37}


def test_a_run_is_under_way_while_its_process_has_it_open(tmp_path: Path) -> None:
    config = build_config({"run": {"dir": str(tmp_path / "run")}, "logging": {"tensorboard": False}})
    with RunFolder(config, resume=False) as folder:
        folder.metrics.log(1, {"reward/mean": 0.5})
        state = run_state(folder.path, 1, 200, [])
        assert state.kind == "running" and state.text.startswith("running, step 1 of 200 (last write 20")
        assert 0 <= state.age_s < 60
    state = run_state(folder.path, 1, 200, [])
    assert state.kind == "interrupted" and state.text.startswith("interrupted at step 1 of 200 (last write 20")


def test_a_process_that_has_the_number_of_an_ended_run_is_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(f"{os.getpid()}\n")
    assert run_state(tmp_path, 3, None, []).text == "interrupted at step 3"
    (tmp_path / "run.lock").write_text("?")
    assert run_state(tmp_path, 3, None, []).kind == "interrupted"


def test_a_failure_says_its_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (time.time() - 400, time.time() - 400))
    (tmp_path / "error.txt").write_text(
        'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: inner\n\nDuring handling of it:\n\n'
        "Traceback (most recent call last):\nheadrace.trainers.cluster.calls.ActorFailed: rollout 0 died\nwith a note\n"
    )
    state = run_state(tmp_path, 12, 200, [])
    assert state.text.startswith("failed at step 12 of 200 (last write ") and state.age_s >= 399
    assert state.detail == "ActorFailed: rollout 0 died"
    (tmp_path / "error.txt").unlink()
    (tmp_path / "watchdog.txt").write_text("stuck")
    assert run_state(tmp_path, 12, 200, []).detail == "the watchdog ended it, see watchdog.txt"


def test_a_finished_run_that_was_continued_is_not_finished(tmp_path: Path) -> None:
    assert run_state(tmp_path, 37, 37, [FINISHED]).text == "finished, 37 steps"
    assert run_state(tmp_path, 40, 60, [FINISHED]).text == "interrupted at step 40 of 60"
    resumed = {"event": "resumed", "step": 37}
    assert run_state(tmp_path, 37, 60, [FINISHED, resumed]).text == "interrupted at step 37 of 60"


def test_a_run_that_a_callback_ended_gives_its_reason(tmp_path: Path) -> None:
    state = run_state(tmp_path, 37, 60, [{**FINISHED, "stopped": "solved"}])
    assert (state.kind, state.text) == ("finished", "ended early at step 37 of 60: solved")
