"""Tests how the final answer is found in a response, and the rewards `boxed` and `math_verify`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from headrace.actors.protocols import Prompt, Sample
from headrace.actors.rewards import builtin as math_equality
from headrace.actors.rewards.builtin import Boxed, last_boxed
from headrace.actors.rewards.config import RewardConfig, RewardFunctionConfig
from headrace.actors.rewards.rubric import build_rubric, check_rewards
from headrace.dataplane.imports import MissingExtra


def prompt(answer: str) -> Prompt:
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
    assert reward(prompt("1 200"), r"it is \boxed{1200}", "stop") == 1.0
    assert reward(prompt(r"thus \boxed{$x + 1$}"), r"\boxed{x+1}", "stop") == 1.0
    assert reward(prompt("7"), r"\boxed{7} no, \boxed{8}", "stop") == 0.0
    assert reward(prompt("7"), "7", "stop") == 0.0 and reward.answer_of("7") is None
    with pytest.raises(ValueError, match="prompt '0' has no answer to compare with"):
        reward(prompt(""), r"\boxed{7}", "stop")


def test_the_reward_that_judges_gives_the_answer_that_is_voted_for() -> None:
    config = RewardConfig(functions=(RewardFunctionConfig(kind="boxed"), RewardFunctionConfig(kind="exact_match")))
    for voter, answer in (("boxed", "7"), ("exact_match", r"so \boxed{ 7 }"), (None, None)):
        score = build_rubric(config, voter=voter).score(prompt("7"), r" so \boxed{ 7 }", "stop", 3)
        assert (score.components["boxed"], score.answer) == (1.0, answer)


@pytest.mark.parametrize("options", [{"extract": "all"}, {"timeout_s": 0}, {"timeout_s": True}, {"tolerance": 1}])
def test_wrong_options_of_math_verify_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="math_verify"):
        check_rewards([RewardFunctionConfig(kind="math_verify", options=options)])


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
            prompt(gold), at, np.zeros(1, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32), text, "stop",
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
    assert found[3][0] == reward + "SystemExit: it died"
    assert found[4][0] == reward + "the process of 'MathVerifier' died: it closed its output"
    start = time.monotonic()
    [hung] = judged(["hang"], "7", extract="any", timeout_s=0.5)
    assert time.monotonic() - start < 60
    assert hung == (reward + "'MathVerifier' did not return within 1.5 s", None)
    boxes = judged(["7", r"so \boxed{ 7 }", r"\boxed{8}"], "7", timeout_s=30)
    assert boxes == [(0.0, None), (1.0, "7"), (0.0, "8")]
    [unknown] = judged([r"\boxed{7}"], "", timeout_s=30)
    assert unknown[0] == reward + "ValueError: prompt '0' has no answer to compare with"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_equality, "_PACKAGE", "math_verify_that_is_not_there")
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
