"""Tests the measurements and the files of the planner's benchmark."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from headrace.actors.train.microbatch_plan import ShardPlan
from headrace.tools.measure import directory
from headrace.tools.measure.plan import (
    LENGTHS,
    PlanCase,
    draw_lengths,
    judge,
    least_max_over_mean,
    main,
    measure_plan,
    plan_here,
    plan_table,
    run_plan,
)


@pytest.mark.processes
def test_a_plan_in_a_process_of_its_own():
    result = measure_plan(PlanCase(512, 8, "lognormal", False))
    assert result.microbatches_equal and result.blocks_read_over_needed >= 1
    assert 1 <= result.bound_max_over_mean <= result.flops_max_over_mean < 1.05
    assert 0 <= result.peak_mib < 64 and result.seconds > 0


@pytest.mark.processes
def test_files_and_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.tools.measure.plan.SIZES", ((512, 8),))
    monkeypatch.setattr("headrace.tools.measure.plan.measure_plan", plan_here)
    results = run_plan(tmp_path, quick=True, tell=lambda line: None)
    assert len(results) == 2 * len(LENGTHS) and len(plan_table(results).columns) == 11
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("conditions")["commit"]
    names = ("seconds", "peak_mib", "flops_max_over_mean", "microbatches_equal")
    assert {f"plan.512x8.{name}" for name in names} <= set(summary)
    assert summary["plan.512x8.microbatches_equal"] is True
    assert all(math.isfinite(value) for value in summary.values())
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(results)


def test_a_bad_plan_is_told():
    lengths, groups = np.array([100, 100, 100, 100]), np.array([0, 0, 1, 1])
    case = PlanCase(4, 2, "uniform", False)
    split = ShardPlan(np.array([0, 2, 1, 3]), np.array([[2], [2]]), "")
    result = judge(case, split, lengths, groups, lengths.astype(float), 0.1, 0)
    assert result.blocks_read_over_needed == 2 and result.flops_max_over_mean == 1
    twice = ShardPlan(np.array([0, 0, 1, 3]), np.array([[3], [1]]), "")
    assert not judge(case, twice, lengths, groups, lengths.astype(float), 0.1, 0).microbatches_equal


def test_the_bound_is_what_can_be_reached():
    assert least_max_over_mean(np.array([4.0, 1, 1, 1, 1]), 2) == 1
    assert least_max_over_mean(np.array([9.0, 1, 1, 1]), 2) == 18 / 12
    assert least_max_over_mean(np.array([5.0, 5, 5]), 2) == 10 * 2 / 15


def test_lengths():
    for name in LENGTHS:
        lengths = draw_lengths(name, 1000)
        assert lengths.min() >= 1 and lengths.max() <= 8192 and len(lengths) == 1000
    with pytest.raises(ValueError, match="lengths: got 'gamma'"):
        draw_lengths("gamma", 1)


def test_mistakes_exit_2_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["--out", str(file)]) == 2
    assert "is a file, expected a folder" in capsys.readouterr().err
    assert directory.main(["--rows", "0"]) == 2
    assert "--rows: got 0, expected at least 1" in capsys.readouterr().err
