"""Rewards, the rubric that weighs them, and what happens when one raises."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.protocols import Prompt
from headrace.actors.rewards.exact_match import exact_match
from headrace.actors.rewards.factory import RewardConfig, build_reward, build_rubric
from headrace.actors.rewards.format import Format
from headrace.actors.rewards.per_position import per_position
from headrace.actors.rewards.rubric import Rubric


def constant(value: Any) -> Any:
    """A reward that always returns `value`."""
    return lambda prompt, response, finish_reason: value


def prompt(answer: str) -> Prompt:
    return Prompt("0", "text", answer, {})


def test_exact_match() -> None:
    assert exact_match(prompt("42"), " 42\n", "stop") == 1.0
    assert exact_match(prompt("42"), "420", "stop") == 0.0
    with pytest.raises(ValueError, match="prompt '0' has no answer"):
        exact_match(prompt(""), "", "stop")


@pytest.mark.parametrize(
    ("answer", "response", "share"),
    [
        ("1234", "1234", 1.0),
        ("1234", "1294", 0.75),
        ("12", "1234", 0.5),
        ("1234", "12", 0.5),
        ("12", "", 0.0),
        ("", "", 1.0),
    ],
)
def test_per_position(answer: str, response: str, share: float) -> None:
    assert per_position(prompt(answer), response, "stop") == share


def test_format_needs_the_whole_response_and_a_stop() -> None:
    digits = Format(r"\d+")
    assert digits(prompt(""), " 123 ", "stop") == 1.0
    assert digits(prompt(""), "123", "length") == 0.0
    assert digits(prompt(""), "123a", "stop") == 0.0
    assert Format(r"<think>.*</think>\d")(prompt(""), "<think>a\nb</think>7", "stop") == 1.0
    with pytest.raises(ValueError, match="is no regular expression"):
        Format("(")


def test_rubric_weighs_and_keeps_the_unweighted_values() -> None:
    rubric = Rubric([("a", constant(0.5), 2.0), ("b", constant(True), -0.25), ("c", constant(np.float32(1)), 0.0)])
    score = rubric.score(prompt("x"), "y", "stop")
    assert score.valid and score.reward == 0.75 and dict(score.components) == {"a": 0.5, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize("bad", [float("nan"), math.inf, "1.0", None, torch.tensor(1.0)])
def test_a_reward_that_fails_costs_its_row_and_no_other_reward(bad: object) -> None:
    def raises(*_: object) -> float:
        raise KeyError("column\n'x'")

    rubric = Rubric([("good", constant(1.0), 1.0), ("raises", raises, 1.0), ("odd", constant(bad), 1.0)])
    score = rubric.score(prompt("x"), "y", "stop")
    assert not score.valid and score.reward == 0.0 and dict(score.components) == {"good": 1.0}
    assert score.error.startswith("reward 'raises' raised KeyError") and "\n" not in score.error
    alone = Rubric([("odd", constant(bad), 1.0)]).score(prompt("x"), "y", "stop")
    assert not alone.valid and "'odd' returned" in alone.error and "ValueError" in alone.error


def test_rubrics_that_cannot_be() -> None:
    for rewards, message in (
        ([], "expected at least one"),
        ([("a", exact_match, 1.0), ("a", exact_match, 1.0)], "'a' is given twice"),
        ([("a", exact_match, math.nan)], "weight nan, expected a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            Rubric(rewards)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_rewards.py").write_text(
        "def shorter(prompt, response, finish_reason, limit=3):\n    return float(len(response) < limit)\n"
        "class Constant:\n    def __init__(self, value): self.value = value\n"
        "    def __call__(self, prompt, response, finish_reason): return self.value\n"
        "number = 3\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def test_rewards_of_the_user(user_module: str) -> None:
    rubric = build_rubric(
        [
            RewardConfig("exact_match", 0.5),
            RewardConfig("format", 0.1, {"pattern": r"\d+"}),
            RewardConfig(f"{user_module}:shorter", 1.0, {"limit": 5}),
            RewardConfig(f"{user_module}:Constant", 1.0, {"value": 2.0}, name="constant"),
        ]
    )
    assert rubric.names == ["exact_match", "format", "shorter", "constant"]
    assert rubric.score(prompt("1234"), "1234", "stop").reward == pytest.approx(3.6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig("exact_mach"), "got 'exact_mach', expected one of .*did you mean 'exact_match'"),
        (RewardConfig("my_rewards:missing"), "module 'my_rewards' has no 'missing'"),
        (RewardConfig("my_rewards:number"), "'my_rewards:number' is a int, expected a function or class"),
        (RewardConfig("no_such_package.rewards:f"), "cannot be imported: ModuleNotFoundError"),
        (
            RewardConfig("broken_rewards:f"),
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        (RewardConfig("my_rewards:"), "expected an import path like"),
        (RewardConfig("my_rewards:shorter", options={"limt": 3}), "unexpected keyword argument 'limt'"),
        (RewardConfig("format"), "missing a required argument: 'pattern'"),
        (RewardConfig("exact_match", options={"x": 1}), "unexpected keyword argument 'x'"),
    ],
)
def test_reward_mistakes_get_one_sentence(user_module: str, config: RewardConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_reward(config)
