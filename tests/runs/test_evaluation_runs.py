"""Runs with named evaluation sets, and `headrace eval` on the models that they leave behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cli.outcome import DONE, MISTAKE
from headrace.tests.runs.cli_runs import ROOT, finish
from headrace.trainers.observe.metrics import read_metrics

SETS = (
    "evaluation={greedy: {data: {source: task:reverse}, every: 2, num_prompts: 24, background: false},"
    " sampled: {data: {source: task:reverse}, every: 2, num_prompts: 8, n: 4, temperature: 1.0, top_k: 20}}"
)


@pytest.mark.processes
def test_a_run_s_last_evaluation_is_that_of_its_model(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    finish(folder, SETS, "algorithm.steps=3", "validation.every=0", "algorithm.mode=async")
    path = ROOT / "examples" / "quickstart.yaml"
    records, _ = read_metrics(folder / "metrics.jsonl")
    greedy = {record["step"]: record for record in records if "eval/greedy/avg@1" in record}
    assert sorted(greedy) == [0, 2, 3]
    assert all(record["eval/greedy/version_last"] == step for step, record in greedy.items())
    last = records[-1]
    assert (last["eval/sampled/step"], last["eval/sampled/version_first"]) == (3, 3)
    assert {"eval/sampled/avg@4", "eval/sampled/pass@2", "eval/sampled/pass@4", "eval/sampled/maj@4"} <= set(last)

    monkeypatch.chdir(tmp_path)
    sets = ["--set", "greedy", "sampled", "--model", str(folder / "model")]
    assert main(["eval", str(path), SETS, *sets]) == DONE
    assert "eval/sampled/pass@4" in capsys.readouterr().out
    [first, second] = json.loads(Path("eval.json").read_text())
    assert (first["name"], first["rows"], second["rows"], first["failed"]) == ("greedy", 24, 32, 0)
    for key, value in first["metrics"].items():
        assert value == pytest.approx(last[key], abs=1e-6), key
    assert main(["eval", str(path), SETS, "--set", "gsm8k", "--model", str(folder / "model")]) == MISTAKE
    assert "--set: got 'gsm8k', expected some of validation, greedy, sampled" in capsys.readouterr().err
    assert main(["eval", str(path)]) == MISTAKE
    assert "each run makes the built-in model again" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "runs")
