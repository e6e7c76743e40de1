"""The comparison of runs before and after a change sees a last digit, a metric that is gone and other weights."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
DONE = subprocess.CompletedProcess[str]([], 0)


@pytest.fixture
def differences(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The function that counts the differences of runs, in `tools/same_as_before.py`."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("same_as_before")._differences


def write(folder: Path, lines: list[dict[str, Any]], weights: bytes = b"weights") -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(weights)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 0),
        ({"train/loss": 0.30000000000000004}, 1),
        ({"train/loss": 1}, 1),
        ({"new": 1.0}, 1),
        ({"time/step_s": 7.0}, 0),
        ({"time/step_s": None}, 0),
        ({"reward/mean": 0.5 + 1e-15}, 0),
        ({"reward/mean": 0.5 + 1e-9}, 1),
        ({"staleness/max": 3.0}, 0),
        ({"dataplane/calls": 9.0}, 0),
    ],
)
def test_what_counts_as_a_difference(
    tmp_path: Path, differences: Callable[..., int], changed: dict[str, Any], count: int
) -> None:
    one = {"step": 1, "train/loss": 0.3, "time/step_s": 1.0, "reward/mean": 0.5, "staleness/max": 0.0}
    one["dataplane/calls"] = 3.0
    other = {**one, "time/step_s": 2.0, "reward/mean": 0.5 + 2e-15, "staleness/max": 1.0}
    known = [write(tmp_path / "1", [one]), write(tmp_path / "2", [other])]
    new = write(tmp_path / "new", [{**one, **changed}])
    assert differences("run", known, new, DONE) == count
    without = {name: value for name, value in one.items() if name != "time/step_s"}
    assert differences("run", known, write(tmp_path / "fewer", [without]), DONE) == 1
    assert differences("run", known, write(tmp_path / "other", [one], b"others"), DONE) == 1


def test_what_varies_in_a_run_of_the_same_kind_can_vary(tmp_path: Path, differences: Callable[..., int]) -> None:
    line = {"step": 1, "sync/engines": 1.0, "reward/mean": 0.5, "train/loss": 0.3}
    known = [write(tmp_path / name, [line]) for name in ("1", "2")]
    varied = {**line, "sync/engines": 0.0, "reward/mean": 0.5 + 1e-15}
    other = [write(tmp_path / "1b", [line]), write(tmp_path / "2b", [varied])]
    new = write(tmp_path / "new", [varied])
    assert differences("a", known, new, DONE) == 2
    assert differences("a", known, new, DONE, alike=[other]) == 0
    wrong = write(tmp_path / "wrong", [{**varied, "train/loss": 0.4}])
    assert differences("a", known, wrong, DONE, alike=[other]) == 1


def test_a_resume_is_compared_from_its_checkpoint_on(tmp_path: Path, differences: Callable[..., int]) -> None:
    whole = [{"step": step, "train/loss": float(step)} for step in (1, 2, 3)]
    known = [write(tmp_path / "1", whole), write(tmp_path / "2", whole)]
    before = [{"step": 1, "train/loss": 7.0}, {"step": 2, "train/loss": 7.0}, {"event": "resumed", "step": 1}]
    good, bad = write(tmp_path / "good", [*before, *whole[1:]]), write(tmp_path / "bad", [*before, *whole[1:2]])
    assert differences("resumed", known, good, DONE, 1) == 0
    assert differences("resumed", known, bad, DONE, 1) == 2
