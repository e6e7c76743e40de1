"""The directory's benchmark, small."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from headrace.tools.measure.directory import directory_table, run_directory

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_ray")]


def test_files_and_summary(tmp_path: Path):
    summary = run_directory(tmp_path, num_rows=5000, tell=lambda line: None, in_process=True)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written.pop("conditions")["rows"] == 5000
    assert written == summary and all(math.isfinite(value) for value in summary.values())
    for op in ("put", "lookup", "claim", "claim_timeout", "claim_timeout_few", "clear", "actor.put", "actor.claim"):
        assert summary[f"directory.{op}.latency_us"] > 0
    assert summary["directory.put.rows_per_s"] > 1000
    assert directory_table(summary).row_count >= 12
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) >= 12
