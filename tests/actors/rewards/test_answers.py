"""Tests how the final answer is found in a response, and the rewards `boxed` and `math_verify`."""

from __future__ import annotations

import subprocess
import threading
import time
from typing import Any

import pytest

from headrace.actors.protocols import Prompt
from headrace.actors.rewards import math_equality
from headrace.actors.rewards.answers import Boxed, last_boxed
from headrace.actors.rewards.config import RewardConfig, RewardFunctionConfig
from headrace.actors.rewards.factory import build_reward, build_rubric
from headrace.actors.rewards.math_equality import MathVerify
from headrace.codecs.imports import MissingExtra


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
        build_reward(RewardFunctionConfig(kind="math_verify", options=options))


PROGRAM = """
import json, sys, time
print(json.dumps({"value": "ready"}), flush=True)
for line in sys.stdin:
    text = json.loads(line)["text"]
    if "hang" in text: time.sleep(600)
    if "die" in text: sys.exit("it died")
    print(json.dumps({"error": "boom"} if "raise" in text else {"value": "7" in text}), flush=True)
"""


@pytest.fixture
def program(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program without math-verify in the place of the one that has it."""
    path = tmp_path / "verifier.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(math_equality, "_PROGRAM", path)
    monkeypatch.setattr(math_equality, "_SPARE_S", 0.1)


@pytest.mark.processes
def test_a_verifier_that_hangs_is_killed_at_its_deadline_and_started_again(program: None) -> None:
    reward = MathVerify(extract="any", timeout_s=0.5)
    assert reward(prompt("7"), "it is 7", "stop") == 1.0 and reward(prompt("7"), "it is 8", "stop") == 0.0
    first: subprocess.Popen[bytes] = reward._process._process  # type: ignore[assignment]
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within 0.6 s: its process was killed"):
        reward(prompt("7"), "hang", "stop")
    assert time.monotonic() - start < 10 and first.poll() is not None
    assert reward(prompt("7"), "7", "stop") == 1.0, "a new process"
    with pytest.raises(RuntimeError, match="math-verify raised boom"):
        reward(prompt("7"), "raise", "stop")
    with pytest.raises(RuntimeError, match="math-verify's process ended: it died"):
        reward(prompt("7"), "die", "stop")
    assert reward(prompt("7"), "7", "stop") == 1.0
    last: subprocess.Popen[bytes] = reward._process._process  # type: ignore[assignment]
    del reward
    assert last.poll() is not None, "the process ends with its reward"


@pytest.mark.processes
def test_without_the_package_the_extra_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "verifier.py"
    path.write_text("import math_verify_that_is_not_there")
    monkeypatch.setattr(math_equality, "_PROGRAM", path)
    with pytest.raises(MissingExtra, match=r"math_verify needs math_verify, .* pip install 'headrace\[math\]'"):
        MathVerify()(prompt("7"), r"\boxed{7}", "stop")


@pytest.mark.processes
@pytest.mark.slow
def test_math_verify_compares_by_value_in_any_thread() -> None:
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    boxed, anything = MathVerify(), MathVerify(extract="any", timeout_s=2)
    found: dict[str, float] = {}

    def judge() -> None:
        for gold, text in (("0.5", r"\frac{1}{2}"), ("1000", "1,000"), (r"2\sqrt{2}", r"\sqrt{8}"), ("3", "4"),
                           (r"\text{east}", r"\text{east}")):  # fmt: skip
            found[text] = boxed(prompt(gold), f"so \\boxed{{{text}}}", "stop")

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join(120)
    assert found == {r"\frac{1}{2}": 1.0, "1,000": 1.0, r"\sqrt{8}": 1.0, "4": 0.0, r"\text{east}": 1.0}
    assert boxed(prompt("7"), "it is 7", "stop") == 0.0 and anything(prompt("7"), "it is 7", "stop") == 1.0
    assert boxed.answer_of(r"\boxed{1/2}") == boxed.answer_of(r"\boxed{0.50}") == "0.5"
    assert boxed.answer_of("nothing") is None
    start = time.monotonic()
    assert anything(prompt("7"), "$9^{9^{9^{9}}}$", "stop") == 0.0 and time.monotonic() - start < 30
    assert anything(prompt("7"), "it is 7", "stop") == 1.0
