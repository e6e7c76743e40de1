"""Tests the train step's state machine, sums and counts, without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace.trainers.backends.train_step import WORST, TrainStep, clip_coefficient
from headrace.trainers.losses.terms import Denominator, LossInputs, PolicyLoss, TermSums

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SumOfLogprobs:
    denominator: Denominator = "tokens"
    name = "sum"
    metrics = ("square",)

    def __call__(self, inputs: LossInputs) -> TermSums:
        return TermSums(inputs.logprobs.sum(), {"square": inputs.logprobs.detach().square().sum()})


def new_step(denominator: Denominator = "tokens", with_entropy: bool = False) -> TrainStep:
    return TrainStep(PolicyLoss([(2.0, SumOfLogprobs(denominator))]), CPU, None, with_entropy=with_entropy)


def add(step: TrainStep, row_tokens: list[int], groups: list[int], entropy: torch.Tensor | None = None) -> None:
    tokens = torch.tensor(row_tokens, dtype=torch.int64)
    ones = torch.ones(int(tokens.sum()))
    rows = torch.repeat_interleave(torch.arange(len(tokens)), tokens)
    inputs = LossInputs(ones.clone().requires_grad_(), ones, ones, None, ones, rows, tokens)
    with step.accumulating():
        step.add(inputs, tokens.numpy(), np.array(groups), entropy).backward()


def test_an_exact_step_names_the_token_with_the_largest_mismatch() -> None:
    step = TrainStep(PolicyLoss([(2.0, SumOfLogprobs("tokens"))]), CPU, None, exact=True)
    for changes, expected in (({}, None), ({3: 0.75, 4: 0.5}, [0.5, 1.0, 0.5, 7.0, 1.0])):
        step.begin(1.0)
        rows, ones = torch.tensor([0, 0, 0, 2, 2]), torch.ones(5)
        engine = torch.tensor([changes.get(token, 1.0) for token in range(5)])
        tokens = torch.tensor([3, 0, 2])
        with step.accumulating():
            step.add(
                LossInputs(ones, ones, engine, None, ones, rows, tokens), tokens.numpy(), np.array([5, 6, 7]), None
            )
        found = [value for name, value in step.finish(square(1.0)).metrics.items() if name in WORST]
        assert found == (expected or [])


def square(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(("denominator", "count"), [("tokens", 8.0), ("sequences", 4.0), ("groups", 3.0)])
def test_one_division_by_what_the_loss_declares(denominator: Denominator, count: float) -> None:
    step = new_step(denominator)
    step.begin(1.0)
    add(step, [3, 0, 2], [5, 6, 7])  # the row without tokens counts nowhere, nor does its group
    add(step, [], [])
    add(step, [1, 2], [5, 9])
    totals = step.finish(square(100.0))
    assert totals.denominator == count
    assert totals.grad_norm == 10.0 / count
    own = {name: value for name, value in totals.metrics.items() if name.startswith("train/")}
    assert own == pytest.approx(
        {
            "train/loss": 2 * 8 / count, "train/square": 1.0, "train/tokens": 8.0, "train/sequences": 4.0,
            "train/token_gradient_share": 1 / 8, "train/sampled_entropy": -1.0,
        }
    )  # fmt: skip
    assert totals.applies


def test_the_share_of_the_token_with_the_largest_gradient() -> None:
    step = new_step()
    step.begin(1.0)
    for factors in ([1.0, -2.0], [], [0.0, 5.0]):
        tokens = torch.tensor([len(factors)])
        ones = torch.ones(len(factors))
        logprobs = ones.clone().requires_grad_()
        rows = torch.zeros(len(factors), dtype=torch.int64)
        inputs = LossInputs(logprobs * torch.tensor(factors), ones, ones, None, ones, rows, tokens)
        with step.accumulating():
            loss = step.add(inputs, tokens.numpy(), np.array([0]), None)
        loss.backward()
    assert step.finish(square(1.0)).metrics["train/token_gradient_share"] == pytest.approx(1 / 4)


def test_a_step_starts_from_nothing() -> None:
    step = new_step(with_entropy=True)
    step.begin(1.0)
    add(step, [2], [0], torch.tensor([1.0, 3.0]))
    assert step.finish(square(1.0)).metrics["train/entropy"] == 2.0
    step.begin(1.0)
    totals = step.finish(square(0.0))
    assert totals.denominator == 0 and totals.grad_norm == 0 and not totals.applies
    assert set(totals.metrics.values()) == {0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_do_not_apply(bad: float) -> None:
    step = new_step()
    step.begin(1.0)
    add(step, [2], [0])
    assert not step.finish(square(bad)).applies


def test_calls_out_of_order_are_refused() -> None:
    step = new_step()
    with pytest.raises(RuntimeError, match="accumulate: no step is open"), step.accumulating():
        pass
    with pytest.raises(RuntimeError, match="finish_step: no step is open"):
        step.finish(square(0.0))
    with pytest.raises(ValueError, match="temperature: got 0, expected a number above 0"):
        step.begin(0)
    step.begin(0.5)
    with pytest.raises(RuntimeError, match="begin_step: a step is open"):
        step.begin(1.0)
    with pytest.raises(RuntimeError, match="save: a step is open"):
        step.require_closed("save")
    with step.accumulating() as temperature:
        assert temperature == 0.5
    step.finish(square(0.0))
    step.require_closed("save")


def test_half_a_microbatch_is_never_applied() -> None:
    step = new_step()
    step.begin(1.0)
    with pytest.raises(KeyError), step.accumulating():
        raise KeyError("in the middle")
    with pytest.raises(RuntimeError, match="finish_step: a microbatch of the open step failed"):
        step.finish(square(1.0))
    with pytest.raises(RuntimeError, match="accumulate: a microbatch of the open step failed"), step.accumulating():
        pass
    step.abort()
    step.abort()
    step.begin(1.0)


def test_clipping_only_shrinks() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0 and clip_coefficient(1e9, None) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-5)
