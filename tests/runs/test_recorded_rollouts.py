"""A recorded run's rollouts made again without a trainer: the same, or it is said how far they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.tests.runs import cli_runs as runs

pytestmark = pytest.mark.processes

STEPS = 3
OPTIONS = (
    "run.record=true", "run.deterministic=true", "run.keep_best=true", f"algorithm.steps={STEPS}", "validation.every=1",
    "validation.metric=val/reward", "algorithm.group_size=4",
)  # fmt: skip
GROUPS, ROWS = 8, 8 * 4
"""Of a step."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    runs.finish(run_dir, *OPTIONS)
    return run_dir


def replayed(run_dir: Path) -> dict:
    return json.loads((run_dir / "replay.json").read_text())


@pytest.mark.timeout(400)
def test_the_same_weights_give_the_same_rollouts(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded)]) == 0
    found = replayed(recorded)
    assert (found["version"], found["groups"], found["rows"], found["rows_alike"]) == (0, GROUPS, ROWS, ROWS)
    assert found["logprob_diff_max"] == 0.0 and found["reward_diff_max"] == 0.0
    assert found["reward"] == found["reward_recorded"] and found["tokens"] == found["tokens_alike"] > ROWS
    assert f"rows with the same tokens: {ROWS} of {ROWS}" in capsys.readouterr().out


@pytest.mark.timeout(400)
def test_the_best_model_gives_its_versions_rollouts(recorded: Path) -> None:
    version = json.loads((recorded / "best.json").read_text())["version"]
    if version == STEPS:
        pytest.fail("the best model is the last: no group was made by it; choose another seed")
    assert version > 0, "the start is never the best"
    assert main(["replay", str(recorded), "--model", "best"]) == 0
    assert replayed(recorded)["version"] == version and replayed(recorded)["rows_alike"] == ROWS


@pytest.mark.timeout(400)
def test_other_weights_are_told(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "other.json"
    arguments = ["replay", str(recorded), "--model", str(recorded / "model"), "--version", "1", "--out", str(out)]
    assert main(arguments) == 1
    found = json.loads(out.read_text())
    assert found["rows"] == ROWS and (found["rows_alike"] < ROWS or found["logprob_diff_max"] > 1e-6)
    assert found["logprob_diff_max"] > 1e-6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--version", "2"], "--version: got 2 without --model"),
        (["--model", "somewhere"], "--model: got somewhere without --version"),
        (["--model", "somewhere", "--version", "99"], "holds no group of version 99, only of versions 0 to"),
    ],
)
def test_mistakes_are_one_sentence(
    recorded: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded), *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_run_without_a_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("{}\n")
    assert main(["replay", str(tmp_path)]) == 2
    assert "has no journal, expected a run with run.record=true" in capsys.readouterr().err
