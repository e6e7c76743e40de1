"""A loss of the user's own: it reads the columns, and one that is no plain sum, or is malformed, is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.actors.columns import ColumnConfig
from headrace.tests.trainers.losses.reference import group_tokens, loss_inputs, random_rows
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.step_loss import build_loss
from headrace.trainers.losses.terms import LossInputs

HERE = "headrace.tests.trainers.losses.test_own_objective"
COLUMNS = (ColumnConfig(name="weight"), ColumnConfig(name="credit", kind="per_token"))


def weighted(inputs: LossInputs, scale: float = 1.0) -> torch.Tensor:
    weight = inputs.columns["weight"][inputs.row_ids] + inputs.columns["credit"]
    return -scale * weight * inputs.advantages * inputs.logprobs


def averaged(inputs: LossInputs) -> torch.Tensor:
    return -inputs.advantages * inputs.logprobs / max(1, len(inputs.logprobs))


def detached(inputs: LossInputs) -> torch.Tensor:
    return -inputs.logprobs.detach()


def summed(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs.sum()


def own(name: str, **keys: object) -> LossConfig:
    return LossConfig.model_validate({"kind": f"{HERE}:{name}", **keys})


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt"])
def test_weights_of_one_are_reinforce_and_others_scale_rows_and_tokens(aggregation: str) -> None:
    rows = random_rows(3)
    inputs = loss_inputs(rows, group_tokens(rows))
    ones = {"weight": torch.ones(len(inputs.row_tokens)), "credit": torch.zeros(len(inputs.logprobs))}
    loss = build_loss(own("weighted", aggregation=aggregation, options={"scale": 2.0}), COLUMNS)
    plain = build_loss(LossConfig.model_validate({"kind": "reinforce", "aggregation": aggregation}))
    assert loss(replace(inputs, columns=ones)).loss.item() == pytest.approx(2 * plain(inputs).loss.item(), rel=1e-9)

    weight, credit = torch.rand(len(inputs.row_tokens)), torch.rand(len(inputs.logprobs))
    scaled = replace(inputs, advantages=inputs.advantages * (weight[inputs.row_ids] + credit))
    got = loss(replace(inputs, columns={"weight": weight, "credit": credit}))
    assert got.loss.item() == pytest.approx(2 * plain(scaled).loss.item(), rel=1e-6)
    assert tuple(got.metrics) == ("approx_kl", "rollout_kl")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (own("averaged"), "depends on which rows share a microbatch"),
        (own("detached"), "a loss without gradient"),
        (own("summed"), r"returned \(\), expected the loss at each token"),
        (own("nothing"), "has no 'nothing'"),
        (own("HERE"), "is a str, expected a function"),
        (own("weighted", options={"beta": 1}), r"loss.options: \['beta'\] do not fit"),
    ],
)
def test_a_loss_that_would_train_something_else_is_refused_at_the_start(config: LossConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_loss(config, COLUMNS)


def test_a_loss_that_asks_for_another_column_says_so() -> None:
    with pytest.raises(ValueError, match="raised KeyError: 'weight'"):
        build_loss(own("weighted"), COLUMNS[1:])
    with pytest.raises(ValueError, match="got 'ppo', expected one of ppo_clip, .* or package.module"):
        LossConfig(kind="ppo")
