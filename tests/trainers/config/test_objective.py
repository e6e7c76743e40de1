"""The `loss` and `advantage` sections of a run: what reaches the factories, and sentences on keys that do not fit."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from headrace.actors.rewards.config import REWARD_KINDS
from headrace.actors.rewards.rubric import BUILT_REWARDS
from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.advantages.config import AdvantageConfig
from headrace.trainers.advantages.estimators import RewardRows, build_advantages
from headrace.trainers.cluster.worker_specs import backend_config
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.losses.config import LossConfig

RECOMPUTE = {"algorithm": {"prev_logprobs": "recompute"}}
TWO = {"reward": {"functions": [{"kind": "exact_match", "weight": 0.5}, {"kind": "per_position", "weight": 2}]}}


def test_the_kinds_of_rewards_are_those_that_can_be_built() -> None:
    assert set(REWARD_KINDS) == set(BUILT_REWARDS)


def test_every_key_arrives() -> None:
    keys: dict[str, Any] = {
        "kind": "ppo_clip", "aggregation": "sequence_sum", "length_norm": 100, "clip_low": 0.1, "clip_high": 0.3,
        "clip_dual": 3.0, "correction": "icepop", "correction_low": 0.25, "correction_high": 4.0, "kl_coef": 0.01,
        "kl_kind": "k2", "kl_in": "reward", "entropy_coef": 0.001,
    }  # fmt: skip
    config = Config.model_validate({"loss": keys})  # not all of them have an effect together
    assert backend_config(config, "model").loss == LossConfig(**keys)


def test_the_longest_answer_is_dr_grpos_constant_by_default() -> None:
    config = build_config({"loss": {"aggregation": "sequence_sum"}, "rollout": {"max_new_tokens": 77}})
    assert backend_config(config, "model").loss.length_norm == 77
    assert backend_config(Config(), "model").loss.length_norm is None


def test_gdpo_gets_the_weights() -> None:
    config = build_config({"advantage": {"kind": "gdpo"}, **TWO})
    assert config.reward.weights == {"exact_match": 0.5, "per_position": 2.0}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"loss": {"correction": "tis"}},
         "loss.correction: got 'tis' with algorithm.prev_logprobs='rollout', expected"),
        ({"loss": {"correction_high": 2}},
         "loss.correction_high: got 2 with loss.correction='none', expected it unset"),
        ({"loss": {"correction": "sequence", "correction_low": 0.5}, **RECOMPUTE},
         "loss.correction_low: got 0.5 with loss.correction='sequence', expected it unset"),
        ({"loss": {"correction": "icepop", "correction_low": 6}, **RECOMPUTE},
         "loss.correction_high: got 5.0, expected a number above loss.correction_low=6.0"),
        ({"loss": {"kind": "gspo", "clip_dual": 3}}, "loss.clip_dual: got 3 with loss.kind='gspo', expected it unset"),
        ({"loss": {"length_norm": 9}}, "loss.length_norm: got 9 with loss.aggregation='token', expected it unset"),
        ({"loss": {"clip_dual": 1}}, "loss.clip_dual: got 1, expected a number > 1"),
        ({"loss": {"clip_low": 0}}, "loss.clip_low: got 0, expected a number > 0"),
        ({"loss": {"clip_high": 0}}, "loss.clip_high: got 0, expected a number > 0"),
        ({"loss": {"length_norm": 0, "aggregation": "sequence_sum"}}, "length_norm: got 0, expected a number >= 1"),
        ({"loss": {"kl_coef": -1}}, "loss.kl_coef: got -1, expected a number >= 0"),
        ({"loss": {"reference_model": "m"}}, "loss.reference_model: got 'm' with loss.kl_coef=0, expected it unset"),
        ({"loss": {"reference_model": "m", "kl_coef": 0.1}, "trainer": {"backend": "megatron", "pp": 2}},
         "loss.reference_model: got 'm' with trainer.pp=2, expected trainer.pp=1"),
        ({"loss": {"kl_kind": "k4"}}, "loss.kl_kind: got 'k4', expected one of k1, k2, k3, k3_is"),
        ({"loss": {"kl_in": "rewards"}}, "loss.kl_in: got 'rewards', expected one of loss, reward"),
        ({"loss": {"entropy_coef": -0.1}}, "loss.entropy_coef: got -0.1, expected a number >= 0"),
        ({"loss": {"aggregation": "tokens"}}, "expected one of token, sequence, sequence_sum, prompt"),
        ({"loss": {"correction": "is"}}, "expected one of none, tis, icepop, sequence, sequence_mask"),
        ({"loss": {"correction": "tis", "correction_high": -1.0}, **RECOMPUTE},
         "loss.correction_high: got -1.0, expected a number > 0"),
        ({"advantage": {"baseline": "none"}}, "advantage.baseline: got 'none', expected one of step, group"),
        ({"loss": {"clip_low": 1.5}}, "loss.clip_low: got 1.5, expected a number <= 1"),
        ({"loss": {"length_norm": True}}, "loss.length_norm: got true, expected a number"),
        ({"loss": {"kind": "gspo_"}}, "expected one of ppo_clip, gspo, cispo, reinforce (did you mean gspo?)"),
        ({"advantage": {"kind": "gdpo"}}, "advantage.kind: got 'gdpo' with 1 reward functions whose weight is not 0"),
        ({"advantage": {"kind": "rloo", "normalize_std": False}}, "advantage.normalize_std: unknown key"),
        ({"algorithm": {"group_size": 1}},
         "algorithm.group_size: got 1 with advantage.kind='grpo', expected at least 2 (or advantage.kind="),
        ({"algorithm": {"group_size": 1}, "advantage": {"kind": "reinforce_pp", "baseline": "group"}},
         "algorithm.group_size: got 1 with advantage.kind='reinforce_pp', expected at least 2"),
        ({"algorithm": {"group_size": 1, "dynamic_sampling": {"enabled": True}}, "advantage": {"kind": "reinforce_pp"}},
         "algorithm.dynamic_sampling.enabled: got true with algorithm.group_size=1, expected false"),
        ({"advantage": {"baseline": "group"}}, "advantage.baseline: got 'group' with advantage.kind='grpo', expected"),
    ],
)  # fmt: skip
def test_one_sentence_for_each_mistake(data: dict[str, Any], sentence: str) -> None:
    assert sentence in only_problem(data)


@pytest.mark.parametrize("kind", get_args(AdvantageConfig.model_fields["kind"].annotation))
@pytest.mark.parametrize("baseline", ["step", "group"])
def test_a_group_of_one_sample_is_for_estimators_that_compare_the_step(kind: str, baseline: str) -> None:
    advantage = AdvantageConfig.model_validate({"kind": kind, "baseline": baseline})
    values = np.array([0.0, 1.0, 3.0])
    rows = RewardRows(values, np.ones(3), np.arange(3), {"one": values})
    assert advantage.compares_group == (not build_advantages(advantage, {"one": 1.0})(rows).any())
    if not advantage.compares_group:
        build_config({"algorithm": {"group_size": 1}, "advantage": {"kind": kind}})


def test_the_defaults_of_a_run_are_the_quickstarts() -> None:
    """Nothing new is on unless asked for."""
    assert backend_config(Config(), "model").loss == LossConfig(clip_low=0.2, clip_high=0.28)
    assert Config().advantage == AdvantageConfig() and Config().reward.weights == {"exact_match": 1.0}


def test_another_reference_model_takes_the_place_of_the_initial_weights() -> None:
    given = {"kl_coef": 0.1, "reference_model": "other"}
    assert backend_config(build_config({"loss": {"kl_coef": 0.1}}), "model").with_reference
    assert not backend_config(build_config({"loss": given}), "model").with_reference
