"""Rewards with TRL's signature get what TRL gives them, and None means that a reward does not apply to a completion."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import Any

import numpy as np
import pytest

import headrace.rewards
from headrace.actors.protocols import Prompt, Sample
from headrace.actors.rewards.apart import ApartReward
from headrace.actors.rewards.config import RewardFunctionConfig
from headrace.actors.rewards.rubric import Rubric, check_rewards
from headrace.dataplane.imports import ship_objects

TEXT = Prompt("u", "2+2=", "4", {"solution": "four", "level": 3})
CHAT = Prompt("u", "<user>2+2=", "4", {}, ({"role": "user", "content": "2+2="},))


def samples(prompt: Prompt, *texts: str, version: int = 5) -> list[Sample]:
    """Finished episodes of a prompt of two tokens, with answers of two tokens."""
    return [
        Sample(
            prompt, index, np.arange(10 * index, 10 * index + 4, dtype=np.int32), np.array([0, 0, 1, 1], np.uint8),
            np.zeros(4, np.float32), text, "stop", np.array([-1, -1, version, version], np.int32),
        )
        for index, text in enumerate(texts)
    ]  # fmt: skip


def called(function: Any, prompt: Prompt, *texts: str, **options: Any) -> Any:
    episodes = samples(prompt, *texts)
    reward = headrace.rewards.from_trl(function, **options)
    return reward(prompt, list(texts), ["stop"] * len(texts), episode=episodes)


def test_a_reward_gets_texts_columns_ids_and_the_step() -> None:
    got: dict[str, Any] = {}

    def f(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        got.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [1.0, 0.0]

    assert called(f, TEXT, "4", "5") == [1.0, 0.0]
    assert got.pop("trainer_state").global_step == 5
    assert got == {
        "prompts": ["2+2="] * 2, "completions": ["4", "5"], "completion_ids": [[2, 3], [12, 13]],
        "answer": ["4"] * 2, "solution": ["four"] * 2, "level": [3] * 2,
    }  # fmt: skip


def test_chat_prompts_have_chat_completions() -> None:
    def f(prompts: Any, completions: Any) -> list[bool]:
        both = zip(prompts, completions, strict=True)
        return [prompt[-1]["role"] == "user" and said[0]["content"] == "4" for prompt, said in both]

    assert called(f, CHAT, "4", "5") == [True, False]


def test_a_reward_gets_only_the_arguments_that_it_takes_and_the_answers_name() -> None:
    def f(completions: list[str], gold: list[str]) -> list[float]:
        return [float(said == right) for said, right in zip(completions, gold, strict=True)]

    assert called(f, TEXT, "4", "5", answer="gold") == [1.0, 0.0]


@pytest.mark.parametrize("name", ["log_metric", "log_extra", "environments"])
def test_an_argument_that_only_trl_has_is_refused(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def f(completions, {name}): ...\ndef g(completions, {name}=None): ...", namespace)
    with pytest.raises(ValueError, match=f"^headrace.rewards.from_trl: 'f' needs the argument '{name}', expected"):
        headrace.rewards.from_trl(namespace["f"])
    headrace.rewards.from_trl(namespace["g"])


def scores(function: Any, *texts: str, other: bool = True) -> list[Any]:
    """Scores of answers by a rubric of the reward with weight 2 and, with `other`, one that is always 0.5."""
    reward = headrace.rewards.from_trl(function)
    rewards: list[Any] = [("trl", lambda prompt, response, finish_reason: 0.0, 2.0)]
    rewards += [("other", lambda prompt, response, finish_reason: 0.5, 1.0)] if other else []
    rubric = Rubric(rewards, apart=[ApartReward("trl", reward, True, 30.0, 0)])
    episodes = samples(TEXT, *texts)
    assert rubric.apart is not None
    values = asyncio.run(rubric.apart.values(episodes))
    return [rubric.score(TEXT, text, "stop", apart=one) for text, one in zip(texts, values, strict=True)]


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_none_is_left_out_of_the_sum_as_in_trl(nothing: Any) -> None:
    first, second = scores(lambda completions: [nothing, 1.0], "a", "b")
    assert (first.reward, first.components, first.valid) == (0.5, {"other": 0.5}, True)
    assert (second.reward, second.components) == (2.5, {"other": 0.5, "trl": 1.0})


def test_a_completion_without_any_reward_is_not_trained_on_as_in_trl() -> None:
    first, second = scores(lambda completions: [None, 0.0], "a", "b", other=False)
    assert (
        not first.valid
        and first.error == "none of the rewards applies to this sample, because each returned None for it"
    )
    assert second.valid and second.reward == 0.0


def test_an_async_reward_and_one_that_returns_an_array() -> None:
    async def judged(completions: list[str], **others: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(said)) for said in completions]

    assert [one.reward for one in scores(judged, "a", "bcd")] == [2.5, 6.5]
    assert [one.reward for one in scores(lambda completions: np.array([1.0, 2.0]), "a", "b")] == [2.5, 4.5]
    [first, _] = scores(lambda completions: [1.0], "a", "b")
    assert not first.valid and "returned 1 values for 2 samples" in first.error


def of_length(completions: list[str]) -> list[float]:
    return [float(len(said)) for said in completions]


def test_it_is_a_reward_of_groups_for_the_checks() -> None:
    ship_objects({"object@0:trl": pickle.dumps(headrace.rewards.from_trl(of_length))})
    check_rewards([RewardFunctionConfig(kind="object@0:trl", per="group")])
    with pytest.raises(ValueError, match="or per='group'"):
        check_rewards([RewardFunctionConfig(kind="object@0:trl")])
