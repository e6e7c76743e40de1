"""The accounts of the drill over agents notice what they should, and real runs that are killed break no promise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.actors.protocols import Prompt
from headrace.tests.drills.agents.accounts import accounts, chance, power
from headrace.tests.drills.agents.kills import plans_of, run_drill
from headrace.tests.drills.agents.recording import digest
from headrace.tests.drills.agents.shuffled import Shuffled
from headrace.tests.drills.agents.trainings import Result, Training, complaints, judged, write_results
from headrace.trainers.config.load import build_config

PLACE = {"plane": 1, "partition": "train"}


def notes_of(rows: dict[str, tuple[list[int], list[int]]], *, at: str = "train") -> list[dict[str, Any]]:
    """Notes about rows that were put and trained on, as key -> (token ids, mask)."""
    place = {**PLACE, "partition": at, "keys": list(rows)}
    tokens = [[ids, mask, [-0.5 * one for one in mask]] for ids, mask in rows.values()]
    return [{"tokens": tokens, **place}, {"trained": 1, **place}]


def made(episode: str, after: list[int], ids: list[int]) -> dict[str, Any]:
    return {"made": f"{episode}/0", "after": digest(after), "answers": [[ids, [-0.5] * len(ids)]]}


def test_each_turn_is_found_among_the_answers_and_differences_are_noticed() -> None:
    row = {"0.0": ([1, 8, 9, 3, 10, 11], [0, 1, 1, 0, 1, 1])}
    # The second turn was cut off by a weight update, and came in two answers.
    answers = [made("0.0", [1], [8, 9]), made("0.0", [1, 8, 9, 3], [10]), made("0.0", [1, 8, 9, 3, 10], [11])]
    found = accounts([*answers, *notes_of(row)], [("0.0", [8, 9]), ("1.0", [8])])
    assert (found.turns, found.tokens) == ({"0.0": 2}, {"0.0": 4})
    assert found.foreign == found.twice == found.lost == []
    assert accounts([*answers[:2], *notes_of(row)]).foreign == ["0.0 at 5"]
    assert accounts([made("0.0", [1], [8, 10]), *answers[1:], *notes_of(row)]).foreign == ["0.0 at 1"]
    redrawn = [made("0.0", [1], [12, 12]), *answers, *notes_of(row)]
    assert accounts(redrawn, [("0.0", [12, 12])]).lost == ["0.0: [12, 12]"], "the journal had another first turn"
    undone = notes_of({"0.0": ([1, 9], [0, 1])}, at="train")
    later = accounts([made("0.0", [1], [9]), *answers, *undone, *notes_of(row, at="train-1")])
    assert later.turns == {"0.0": 2} and not later.foreign, "the last training of a row counts"


def test_the_test_of_lengths_has_the_power_that_the_report_names() -> None:
    rng = np.random.default_rng(0)
    long = [20 if one else 1 for one in rng.random(800) < 0.125]
    same = [20 if one else 1 for one in rng.random(800) < 0.125]
    fewer = [20 if one else 1 for one in rng.random(800) < 0.06]
    assert chance(long, same) > 0.01 > chance(long, fewer)
    assert power(800, 0.125, 0.06, 0.01) > 0.9 > 0.05 > power(800, 0.125, 0.125, 0.01)


# ---------------------------------------------------------------- trainings


def test_rewards_that_rose_are_told_from_those_that_did_not(tmp_path: Path) -> None:
    config = tmp_path / "example" / "run.yaml"
    config.parent.mkdir()
    config.write_text("reward: {functions: [{kind: environment, weight: 2.0}]}\n")
    rng = np.random.default_rng(0)
    results = []
    for variant, rise in (("plain", 0.5), ("killed", 0.0), ("control", 0.5)):
        training = Training(config, variant, 0)
        folder = tmp_path / training.name / "run"
        folder.mkdir(parents=True)
        lines = []
        for step in range(1, 101):
            value = rise * step / 100 + rng.normal(0, 0.02)
            mean = {"reward/mean": 0.0, "reward/environment": value / 2} if variant == "control" else {}
            tested = {"val/reward": value, "val/reward/environment": value / 2} if not step % 10 else {}
            lines.append({"step": step, "reward/mean": value, **mean, **tested})
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        results.append(judged(training, Result(training.name, variant, 0), folder))
    assert [one.rose for one in results] == [True, False, True] and results[0].steps == 100
    assert results[0].last - results[0].first == pytest.approx(0.45, abs=0.03)
    assert results[2].evaluated[0] == pytest.approx(0.4, abs=0.05)
    assert [line.split(":")[0] for line in complaints(results)] == [one.name for one in results[1:]]
    write_results([*results, Result("none", "plain", 1, problem="it ended")], tmp_path, {})
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 4
    assert "| example-run-plain-0 | 100 |" in (tmp_path / "results.md").read_text()
    assert math.isnan(Result("none", "plain", 1).first) and not Result("none", "plain", 1).rose


def test_a_control_gives_the_rewards_of_other_prompts(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("reward: {functions: [{kind: environment}]}\n")
    [given] = [one for one in Training(config, "control", 3).overrides() if one.startswith("reward.functions=")]
    functions = json.loads(given.partition("=")[2])
    assert build_config({"reward": {"functions": functions}}).reward.weights == {"environment": 0.0, "Shuffled": 1.0}
    shuffled = Shuffled(**functions[1]["options"])

    def reward(uid: str, value: float) -> float:
        episode: Any = SimpleNamespace(rewards={"reward": value})
        return shuffled(Prompt(uid, "", "", {}), "", "stop", response_tokens=1, episode=episode)

    assert [reward("a", 1.0), reward("a", 2.0)] == [0.0, 0.0], "there is no other prompt yet"
    assert {reward("b", 9.0) for _ in range(20)} == {1.0, 2.0}
    assert {reward("a", 5.0) for _ in range(20)} == {9.0}


# ---------------------------------------------------------------- real runs


@pytest.mark.drill
@pytest.mark.timeout(7200)
def test_killed_agents_are_trained_on_without_bias(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_drill(plans_of(20, 14, 24, seed=0), out, lambda line: None, "make drill-agents") == []
    figures = json.loads((out / "summary.json").read_text())["summary"]
    assert figures["turn/kills"] == 20 and figures["restart/long_share"] < figures["turn/long_share"]
