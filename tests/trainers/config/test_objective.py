"""The `loss` and `advantage` sections of a run: what reaches the factories, and sentences on keys that do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.actors.rewards.factory import REWARD_KINDS as BUILT_REWARDS
from headrace.trainers.advantages.factory import AdvantageConfig
from headrace.trainers.cluster.actor_specs import advantage_config, backend_config, loss_config, rewards
from headrace.trainers.config.config import REWARD_KINDS, Config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import ConfigError
from headrace.trainers.losses.factory import LossConfig

RECOMPUTE = {"algorithm": {"prev_logprobs": "recompute"}}
TWO = {"reward": {"functions": [{"kind": "exact_match", "weight": 0.5}, {"kind": "per_position", "weight": 2}]}}


def test_both_configs_have_the_same_keys() -> None:
    config = Config()
    assert set(type(config.loss).model_fields) == {field.name for field in dataclasses.fields(LossConfig)}
    fields = {field.name for field in dataclasses.fields(AdvantageConfig)}
    assert {*type(config.advantage).model_fields, "weights"} == fields
    assert set(REWARD_KINDS) == set(BUILT_REWARDS)


def test_every_key_arrives() -> None:
    keys: dict[str, Any] = {
        "kind": "ppo_clip",
        "aggregation": "sequence_sum",
        "length_norm": 100,
        "clip_low": 0.1,
        "clip_high": 0.3,
        "clip_dual": 3.0,
        "correction": "icepop",
        "correction_low": 0.25,
        "correction_high": 4.0,
        "kl_coef": 0.01,
        "kl_kind": "k2",
        "kl_in": "reward",
        "entropy_coef": 0.001,
    }
    config = build_config({"loss": keys, **RECOMPUTE})
    assert loss_config(config) == LossConfig(**keys) == backend_config(config, "model").loss


def test_the_longest_answer_is_dr_grpos_constant_by_default() -> None:
    config = build_config({"loss": {"aggregation": "sequence_sum"}, "rollout": {"max_new_tokens": 77}})
    assert loss_config(config).length_norm == 77
    assert loss_config(Config()).length_norm is None


def test_gdpo_gets_the_weights_and_asks_for_tags() -> None:
    config = build_config({"advantage": {"kind": "gdpo"}, **TWO})
    assert advantage_config(config).weights == {"exact_match": 0.5, "per_position": 2.0}
    assert [reward.tagged for reward in rewards(config)] == [True, True]
    assert [reward.tagged for reward in rewards(build_config(TWO))] == [False, False]
    functions = [*TWO["reward"]["functions"], {"kind": "format", "weight": 0, "options": {"pattern": "x"}}]
    config = build_config({"advantage": {"kind": "gdpo"}, "reward": {"functions": functions}})
    assert [reward.tagged for reward in rewards(config)] == [True, True, False]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"loss": {"correction": "tis"}},
            "loss.correction: got 'tis' with algorithm.prev_logprobs='rollout', expected",
        ),
        ({"loss": {"correction_high": 2}}, "loss.correction_high: got 2.0 with loss.correction='none', expected null"),
        (
            {"loss": {"correction": "sequence", "correction_low": 0.5}, **RECOMPUTE},
            "loss.correction_low: got 0.5 with loss.correction='sequence', expected null",
        ),
        (
            {"loss": {"correction": "icepop", "correction_low": 6}, **RECOMPUTE},
            "loss.correction_high: got 5.0, expected a number above loss.correction_low=6.0",
        ),
        ({"loss": {"kind": "gspo", "clip_dual": 3}}, "loss.clip_dual: got 3.0 with loss.kind='gspo', expected null"),
        ({"loss": {"length_norm": 9}}, "loss.length_norm: got 9 with loss.aggregation='token', expected null"),
        ({"loss": {"clip_dual": 1}}, "loss.clip_dual: got 1, expected a number > 1"),
        ({"loss": {"clip_low": 1.5}}, "loss.clip_low: got 1.5, expected a number <= 1"),
        ({"loss": {"length_norm": True}}, "loss.length_norm: got true, expected a number"),
        ({"loss": {"kind": "gspo_"}}, "expected one of ppo_clip, gspo, cispo, reinforce (did you mean gspo?)"),
        (
            {"advantage": {"kind": "gdpo"}},
            "advantage.kind: got 'gdpo' with 1 reward functions whose weight is not 0",
        ),
        ({"advantage": {"kind": "rloo", "normalize_std": False}}, "advantage.normalize_std: got false with"),
        ({"advantage": {"baseline": "group"}}, "advantage.baseline: got 'group' with advantage.kind='grpo', expected"),
    ],
)
def test_one_sentence_for_each_mistake(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(data)
    [problem] = caught.value.problems
    assert sentence in problem and "\n" not in problem


def test_the_defaults_of_a_run_are_the_quickstarts() -> None:
    """Nothing new is on unless asked for."""
    assert loss_config(Config()) == LossConfig(clip_low=0.2, clip_high=0.28)
    assert advantage_config(Config()) == AdvantageConfig(weights={"exact_match": 1.0})
