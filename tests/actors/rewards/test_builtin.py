"""Tests of the built-in rewards, of the rubric that weighs them, and of rewards that raise."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.protocols import Prompt, Sample
from headrace.actors.rewards import builtin
from headrace.actors.rewards.builtin import Boxed, Format, Overlong, exact_match, last_boxed, per_position
from headrace.actors.rewards.config import RewardConfig, RewardFunctionConfig
from headrace.actors.rewards.rubric import Rubric, build_reward, build_rubric, check_rewards
from headrace.dataplane.imports import MissingExtra

LIBRARY = """
import time
from . import errors

def parse(text, parsing_timeout):
    if "hang" in text: time.sleep(600)
    if "die" in text: raise SystemExit("it died")
    if "end" in text: import os; os._exit(3)
    if "slow" in text: raise errors.TimeoutException(parsing_timeout)
    numbers = [part for part in text.replace("$", " ").replace("{", " ").replace("}", " ").split() if part.isdigit()]
    return [float(numbers[-1]), numbers[-1]] if numbers else []

def verify(gold, target, timeout_seconds):
    assert timeout_seconds == 30
    return bool(target) and gold[0] == target[0]
"""


def question(answer: str) -> Prompt:
    return Prompt("0", "how many?", answer, {})


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} and then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed {x_{1}^{2}} \boxed{unfinished", "x_{1}^{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        ("boxed{3}", None),
        (r"\boxed{3", None),
        ("", None),
    ],
)
def test_the_last_whole_box_holds_the_answer(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_a_boxed_answer_is_compared_without_white_space() -> None:
    reward = Boxed()
    assert reward(question("1 200"), r"it is \boxed{1200}", "stop") == 1.0
    assert reward(question(r"thus \boxed{$x + 1$}"), r"\boxed{x+1}", "stop") == 1.0
    assert reward(question("7"), r"\boxed{7} no, \boxed{8}", "stop") == 0.0
    assert reward(question("7"), "7", "stop") == 0.0 and reward.answer_of("7") is None
    with pytest.raises(ValueError, match="prompt '0' has no answer to compare with"):
        reward(question(""), r"\boxed{7}", "stop")


def test_the_reward_that_judges_gives_the_answer_that_is_voted_for() -> None:
    config = RewardConfig(functions=(RewardFunctionConfig(kind="boxed"), RewardFunctionConfig(kind="exact_match")))
    for voter, answer in (("boxed", "7"), ("exact_match", r"so \boxed{ 7 }"), (None, None)):
        score = build_rubric(config, voter=voter).score(question("7"), r" so \boxed{ 7 }", "stop", 3)
        assert (score.components["boxed"], score.answer) == (1.0, answer)


@pytest.mark.parametrize("options", [{"extract": "all"}, {"timeout_s": 0}, {"timeout_s": True}, {"tolerance": 1}])
def test_wrong_options_of_math_verify_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="math_verify"):
        check_rewards([RewardFunctionConfig(kind="math_verify", options=options)])


@pytest.fixture
def library(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a small package in the place of math-verify, for processes that this one starts."""
    package = tmp_path / "math_verify"
    package.mkdir()
    (package / "__init__.py").write_text(LIBRARY)
    (package / "errors.py").write_text("class TimeoutException(BaseException): pass")
    monkeypatch.syspath_prepend(tmp_path)


def judged(responses: list[str], gold: str, **options: Any) -> list[tuple[float | str, str | None]]:
    """Return the value of math_verify (a text if there is none) and the answer that is voted for, for each response."""
    config = RewardConfig(functions=(RewardFunctionConfig(kind="math_verify", options=options),))
    rubric = build_rubric(config, voter="math_verify")
    assert rubric.apart is not None
    apart = rubric.apart
    samples = [
        Sample(
            question(gold), at, np.zeros(1, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32), text, "stop",
            np.zeros(1, np.int32),
        )
        for at, text in enumerate(responses)
    ]  # fmt: skip

    async def run() -> list[tuple[float | str, str | None]]:
        try:
            known = await apart.values(samples)
            scores = [
                rubric.score(one.prompt, one.text, "stop", 1, one, apart=given)
                for one, given in zip(samples, known, strict=True)
            ]
            return [(score.reward if score.valid else score.error, score.answer) for score in scores]
        finally:
            await apart.close()

    return asyncio.run(run())


@pytest.mark.processes
def test_math_verify_runs_in_processes_that_are_killed_at_their_deadline(library: None) -> None:
    responses = ["it is 7", "it is 8", "nothing", "die", "end", "slow", "again 7"]
    found = judged(responses, "7", extract="any", timeout_s=30)
    assert found[:3] == [(1.0, "7"), (0.0, "8"), (0.0, None)] and found[5:] == [(0.0, None), (1.0, "7")]
    reward = "reward 'math_verify' raised UserFunctionFailed: "
    assert found[3][0] == reward + "SystemExit: it died (__init__.py line 7)"
    assert (
        found[4][0]
        == reward.replace("UserFunctionFailed", "UserProcessDied")
        + "the process of 'MathVerifier' died: its output was closed"
    )
    start = time.monotonic()
    [hung] = judged(["hang"], "7", extract="any", timeout_s=0.5)
    assert time.monotonic() - start < 60
    assert hung == (reward + "'MathVerifier' did not return within 1.5 s", None)
    boxes = judged(["7", r"so \boxed{ 7 }", r"\boxed{8}"], "7", timeout_s=30)
    assert boxes == [(0.0, None), (1.0, "7"), (0.0, "8")]
    [unknown] = judged([r"\boxed{7}"], "", timeout_s=30)
    assert unknown[0] == reward + "ValueError: prompt '0' has no answer to compare with"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_PACKAGE", "math_verify_that_is_not_there")
    with pytest.raises(MissingExtra, match=r"math_verify needs math_verify_.* pip install 'headrace\[math\]'"):
        build_rubric(RewardConfig(functions=(RewardFunctionConfig(kind="math_verify"),)))


@pytest.mark.processes
def test_math_verify_compares_by_value() -> None:
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    equal = {"0.5": r"\frac{1}{2}", "1000": "1,000", r"2\sqrt{2}": r"\sqrt{8}", r"\text{east}": r"\text{east}"}
    for gold, text in equal.items():
        assert judged([f"so \\boxed{{{text}}}", r"\boxed{3}", text], gold)[0][0] == 1.0, gold
    halves = judged([r"\boxed{1/2}", r"\boxed{0.50}", r"\boxed{3}", "0.5"], "0.5")
    assert halves == [(1.0, "0.5"), (1.0, "0.5"), (0.0, "3"), (0.0, None)]


@pytest.mark.processes
@pytest.mark.slow
def test_math_verify_gives_up_what_takes_too_long() -> None:
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    assert judged(["$9^{9^{9^{9}}}$", "it is 7"], "7", extract="any", timeout_s=10)[1] == (1.0, "7")
    assert judged(["$9^{9^{9^{9}}}$"], "7", extract="any", timeout_s=2)[0][0] in (
        0.0, "reward 'math_verify' raised UserFunctionFailed: 'MathVerifier' did not return within 3 s",
    )  # fmt: skip


def constant(value: Any) -> Any:
    """A reward that always returns `value`."""
    return lambda prompt, response, finish_reason: value


def prompt(answer: str) -> Prompt:
    return Prompt("0", "text", answer, {})


def term(kind: str, weight: float = 1.0, options: dict[str, Any] | None = None, name: str | None = None) -> Any:
    return RewardFunctionConfig(kind=kind, weight=weight, options=options or {}, name=name)


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
    with pytest.raises(ValueError, match="is not a regular expression"):
        Format("(")


def test_overlong_is_equation_13_of_dapo() -> None:
    overlong = Overlong(max_length=20480, cache=4096)

    def formula(length: int) -> float:
        if length <= 20480 - 4096:
            return 0.0
        return ((20480 - 4096) - length) / 4096 if length <= 20480 else -1.0

    for length in (0, 1, 16384, 16385, 18432, 20479, 20480, 20481, 10**6):
        assert overlong(prompt(""), "", "stop", response_tokens=length) == formula(length)
    assert formula(18432) == -0.5
    for options in ({"max_length": 10, "cache": 11}, {"max_length": 10, "cache": 0}, {"max_length": 2.5, "cache": 1}):
        with pytest.raises(ValueError, match="reward overlong: got (cache|max_length)="):
            Overlong(**options)  # type: ignore[arg-type]


def test_rewards_that_ask_for_the_number_of_tokens_get_it(user_module: str) -> None:
    functions = (
        term("overlong", 2.0, {"max_length": 10, "cache": 4}),
        term(f"{user_module}:tokens_over", 1.0, {"limit": 3}),
        term("exact_match"),
    )
    rubric = build_rubric(RewardConfig(functions=functions))
    score = rubric.score(prompt("x"), "x", "stop", response_tokens=8)
    assert score.components == {"overlong": -0.5, "tokens_over": 5.0, "exact_match": 1.0} and score.reward == 5.0
    unknown = rubric.score(prompt("x"), "x", "stop")
    assert not unknown.valid
    assert "reward 'overlong' raised ValueError: the reward needs response_tokens" in unknown.error


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
        "def tokens_over(prompt, response, finish_reason, response_tokens, limit):\n"
        "    return float(response_tokens - limit)\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def test_rewards_of_the_user(user_module: str) -> None:
    functions = (
        term("exact_match", 0.5),
        term("format", 0.1, {"pattern": r"\d+"}),
        term(f"{user_module}:shorter", 1.0, {"limit": 5}),
        term(f"{user_module}:Constant", 1.0, {"value": 2.0}, name="constant"),
    )
    rubric = build_rubric(RewardConfig(functions=functions))
    assert rubric.names == ["exact_match", "format", "shorter", "constant"]
    assert rubric.score(prompt("1234"), "1234", "stop").reward == pytest.approx(3.6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (term("my_rewards:missing"), "module 'my_rewards' .*my_rewards.py. has no 'missing'"),
        (term("my_rewards:short"), "has no 'short'; did you mean 'shorter'"),
        (term("my_rewards:number"), "'my_rewards:number' is a int, expected a function or class"),
        (term("no_such_package.rewards:f"), "cannot be imported: ModuleNotFoundError"),
        (
            term("broken_rewards:f"),
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        (term("my_rewards:shorter", options={"limt": 3}), "unexpected keyword argument 'limt'"),
        (term("my_rewards:tokens_over"), "missing a required argument: 'limit'"),
        (term("my_rewards:tokens_over", options={"limit": 1, "response_tokens": 2}), "response_tokens"),
        (term("overlong", options={"max_length": 9}), "missing a required argument: 'cache'"),
        (term("format"), "missing a required argument: 'pattern'"),
        (term("exact_match", options={"x": 1}), "unexpected keyword argument 'x'"),
    ],
)
def test_reward_mistakes_get_one_sentence(user_module: str, config: RewardFunctionConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_reward(config)
