"""Rewards are told by the names of their arguments, so that those of other libraries are not called by mistake."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from headrace.actors.rewards.config import RewardFunctionConfig
from headrace.actors.rewards.rubric import build_reward, check_rewards

HERE = __name__


def good(prompt: Any, response: str, finish_reason: str) -> float: ...
def unused(_prompt: Any, response: str, _finish_reason: str, *, scale: float = 1.0) -> float: ...
def tokens(prompt: Any, response: str, finish_reason: str, response_tokens: int, episode: Any) -> float: ...
async def judge(prompt: Any, response: str, finish_reason: str) -> float: ...
def whatever(*arguments: Any, **options: Any) -> float: ...
def group(prompt: Any, responses: list[str], finish_reasons: list[str]) -> list[float]: ...


@functools.wraps(good)
def wrapped(*arguments: Any) -> float: ...


class Called:
    def __call__(self, prompt: Any, response: str, finish_reason: str) -> float: ...


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float: ...
def openrlhf(queries: list[str], prompts: list[str], labels: list[str]) -> float: ...
def trl(completions: list[str], **kwargs: Any) -> list[float]: ...
def trl_prompts(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]: ...
def areal(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str) -> float: ...
def verifiers(prompt: str, completion: str, answer: str) -> float: ...
def swapped(response: str, prompt: Any, finish_reason: str) -> float: ...
def short(response: str) -> float: ...
def nothing() -> float: ...
def more(prompt: Any, response: str, finish_reason: str, answer: str) -> float: ...


class TrlClass:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]: ...


class NotCalled:
    def score(self) -> float: ...


WRONG = {
    "verl": "like a reward of verl: call it from .* as `f.prompt.fields.get.'data_source'., response, prompt.ans",
    "openrlhf": r"takes \(queries, prompts, labels\), expected .* like a reward of OpenRLHF",
    "trl": r"takes \(completions, \*\*kwargs\), expected \(prompt, response, finish_reason\); it .*TRL",
    "trl_prompts": "it looks like a reward of TRL",
    "TrlClass": "it looks like a reward of TRL",
    "areal": "it looks like a reward of TRL",
    "verifiers": r"takes \(prompt, completion, answer\), expected \(prompt, response, finish_reason\)$",
    "swapped": r"expected \(prompt, response, finish_reason\) in this order",
    "short": r"takes \(response\), expected \(prompt, response, finish_reason\)$",
    "nothing": r"takes \(\), expected",
    "more": "missing a required argument: 'answer'",
    "group": "expected .prompt, response, finish_reason., or per='group'",
    "NotCalled": "objects of '.*:NotCalled' cannot be called, expected `__call__`",
}


@pytest.mark.parametrize("name", ["good", "unused", "tokens", "judge", "whatever", "wrapped", "Called"])
def test_ours_are_taken(name: str) -> None:
    for runs in ("thread",) if name == "tokens" else ("thread", "process"):
        check_rewards([RewardFunctionConfig(kind=f"{HERE}:{name}", runs=runs)])
    build_reward(RewardFunctionConfig(kind=f"{HERE}:{name}"))
    check_rewards([RewardFunctionConfig(kind=f"{HERE}:group", per="group")])


@pytest.mark.parametrize("name", WRONG)
def test_others_are_refused_with_what_is_expected(name: str) -> None:
    for function in (RewardFunctionConfig(kind=f"{HERE}:{name}", runs=runs) for runs in ("thread", "process")):
        with pytest.raises(ValueError, match=f"^reward.functions: .*'.*:{name}'? .*") as caught:
            check_rewards([function])
        assert caught.match(WRONG[name]) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"expected \(prompt, responses, finish_reasons\), or per='sample'"):
        check_rewards([RewardFunctionConfig(kind=f"{HERE}:good", per="group")])


def test_a_process_does_not_get_the_episode() -> None:
    with pytest.raises(ValueError, match=r"'response_tokens', and runs='process' does not give response_tokens and ep"):
        check_rewards([RewardFunctionConfig(kind=f"{HERE}:tokens", runs="process")])


def test_what_no_process_can_import_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward.functions: got '__main__:f', expected a module in a file of its own"):
        check_rewards([RewardFunctionConfig(kind="__main__:f")])
