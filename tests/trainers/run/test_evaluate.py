"""The file with the results of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.trainers.config.load import load_config
from headrace.trainers.errors import UserError
from headrace.trainers.run import evaluate
from headrace.trainers.run.evaluate import SetResult, write_results


def test_results_are_written_below_folders_that_are_made_and_overwrite_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here" / "eval.json"
    for rows in (4, 8):
        write_results([SetResult("validation", "m", "a.jsonl", rows, 0, "", {"n": 1}, {"reward": 0.5}, 2.0)], path)
        (found,) = json.loads(path.read_text())
        assert found["name"] == "validation" and found["rows"] == rows and found["metrics"] == {"reward": 0.5}


def test_the_engine_has_room_for_sets_that_the_run_does_not_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets with `every=0`, and the validation with `validation.every=0`, are evaluated all the same."""

    def refuse(config: Any, *args: Any) -> None:
        raise UserError(f"room for {config.engine_length} tokens")

    monkeypatch.setattr(evaluate, "rollout_setup", refuse)
    monkeypatch.setattr(evaluate, "check_evaluation", lambda config: None)
    quickstart = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
    for override, length in (
        ("validation.max_new_tokens=900", 900),
        ("evaluation.x={data: {source: task:reverse}, num_prompts: 8, every: 0, max_new_tokens: 800}", 800),
    ):
        config = load_config(quickstart, [override, "validation.every=0"])
        with pytest.raises(UserError, match=f"room for {config.data.max_prompt_tokens + length} tokens"):
            evaluate.evaluate_model(config, "some/model")
