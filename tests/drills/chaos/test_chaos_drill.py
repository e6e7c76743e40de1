"""Two minutes of chaos break no promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tests.drills.chaos.drill import ChaosOptions, run_chaos, summarise


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_two_minutes_of_chaos_break_no_promise(tmp_path: Path):
    report = run_chaos(ChaosOptions(tmp_path / "out", minutes=2.0, seed=1), lambda line: None)
    figures = summarise(report)
    assert report.complaints == []
    assert figures["faults"] >= 4 and all(run.balance.steps >= 10 for run in report.runs)
    assert (tmp_path / "out" / "summary.json").exists()
