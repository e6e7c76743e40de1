"""The file with the results of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.trainers.run.evaluate import SetResult, write_results


def test_results_are_written_below_folders_that_are_made_and_overwrite_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here" / "eval.json"
    for rows in (4, 8):
        write_results([SetResult("validation", "m", "a.jsonl", rows, 0, "", {"n": 1}, {"reward": 0.5}, 2.0)], path)
        (found,) = json.loads(path.read_text())
        assert found["name"] == "validation" and found["rows"] == rows and found["metrics"] == {"reward": 0.5}
