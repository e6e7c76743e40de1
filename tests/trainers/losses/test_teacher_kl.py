"""Tests the losses of a distillation against exact divergences over whole vocabularies, computed apart from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.tests.trainers.losses.reference import group_tokens, loss_inputs, random_rows
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.distillation_config import DistillationConfig
from headrace.trainers.losses.step_loss import build_loss
from headrace.trainers.losses.teacher_kl import TeacherAdvantage, TeacherKl, TopKl
from headrace.trainers.losses.terms import LossInputs

VOCAB = 9
REINFORCE = LossConfig(kind="reinforce")


def section(**keys: object) -> DistillationConfig:
    return DistillationConfig.model_validate({"teachers": [{"model": "teacher"}], **keys})


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy (a leaf) and log-probs of a teacher at one position."""
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = torch.randn(2, VOCAB, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.log_softmax(teacher, -1)


def divergence(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The reverse KL divergence over the whole vocabulary."""
    return torch.nn.functional.kl_div(teacher, torch.log_softmax(logits, -1), log_target=True, reduction="sum")


def every_token(logits: torch.Tensor, teacher: torch.Tensor) -> LossInputs:
    """One row per token of the vocabulary, as if each had been sampled once."""
    own = torch.log_softmax(logits, -1)
    ones, ids = torch.ones(VOCAB, dtype=torch.int64), torch.arange(VOCAB)
    zeros = torch.zeros(VOCAB, dtype=torch.float64)
    return LossInputs(own, own.detach(), own.detach(), None, zeros, ids, ones, teacher_logprobs=teacher)


@pytest.mark.parametrize("where", ["advantage", "loss"])
@pytest.mark.parametrize("kind", ["reinforce", "ppo_clip"])
def test_the_expected_gradient_is_that_of_the_reverse_kl(where: str, kind: str) -> None:
    """The sum over all tokens, weighted with the policy's probabilities, is the expectation over its samples."""
    for seed in range(5):
        logits, teacher = policies(seed)
        inputs = every_token(logits, teacher)
        loss = build_loss(LossConfig(kind=kind), (), section(kl_in=where, coef=0.7))
        weights = inputs.logprobs.exp().detach()
        rows = [replace(inputs, **one_token(inputs, token)) for token in range(VOCAB)]
        expected = torch.stack([weight * loss(row).loss for weight, row in zip(weights, rows, strict=True)]).sum()
        (got,) = torch.autograd.grad(expected, [logits])
        (exact,) = torch.autograd.grad(0.7 * divergence(logits, teacher), [logits])
        torch.testing.assert_close(got, exact)
        estimate = sum(weight * loss(row).metrics["teacher_kl"] for weight, row in zip(weights, rows, strict=True))
        torch.testing.assert_close(estimate, divergence(logits, teacher).detach())


def one_token(inputs: LossInputs, token: int) -> dict[str, torch.Tensor]:
    names = ("logprobs", "prev_logprobs", "rollout_logprobs", "advantages", "teacher_logprobs")
    found = {name: getattr(inputs, name)[token : token + 1] for name in names}
    return {**found, "row_ids": torch.zeros(1, dtype=torch.int64), "row_tokens": torch.ones(1, dtype=torch.int64)}


@pytest.mark.parametrize("k", [1, 3, VOCAB])
def test_top_tokens_give_the_divergence_of_the_coarser_distributions(k: int) -> None:
    for seed in range(5):
        logits, teacher = policies(seed)
        ids = teacher.topk(k).indices
        inputs = replace(
            every_token(logits, teacher),
            teacher_candidates=teacher[ids][None],
            candidate_logprobs=torch.log_softmax(logits, -1)[ids][None],
        )
        loss = TopKl()(inputs).loss
        p, q = torch.softmax(logits, -1), teacher.exp()
        outside = torch.tensor([token not in ids.tolist() for token in range(VOCAB)])
        expected = sum((p[i] * (p[i].log() - q[i].log()) for i in ids.tolist()), torch.zeros((), dtype=torch.float64))
        if k < VOCAB:
            rest, of_teacher = p[outside].sum(), q[outside].sum()
            expected = expected + rest * (rest.log() - of_teacher.log())
            assert 0 < loss < divergence(logits, teacher)
        else:
            torch.testing.assert_close(expected, divergence(logits, teacher))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
        (got,) = torch.autograd.grad(loss, [logits], retain_graph=True)
        (exact,) = torch.autograd.grad(expected, [logits])
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-8)


def test_a_bound_limits_the_pull_of_one_token() -> None:
    one = torch.tensor([-1.0], dtype=torch.float64)
    zeros, ids = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    own = one.clone().requires_grad_()
    inputs = LossInputs(own, one, one, None, zeros, ids, ids + 1, teacher_logprobs=one - 50)
    (slope,) = torch.autograd.grad(TeacherKl(max_log_ratio=20.0)(inputs).loss, [own])
    assert slope.item() == 20.0
    shaped, metrics = TeacherAdvantage(2.0, 20.0)(inputs)
    assert shaped.advantages.item() == -40.0 and metrics["teacher_kl"].item() == 50.0
    assert TeacherAdvantage(2.0)(inputs)[0].advantages.item() == -100.0


def test_advantages_of_rewards_and_teachers_add_up() -> None:
    rows = random_rows(3)
    inputs = loss_inputs(rows, group_tokens(rows))
    teacher = torch.from_numpy(np.random.default_rng(0).normal(-1.0, 0.3, len(inputs.logprobs)))
    given = replace(inputs, teacher_logprobs=teacher)
    loss = build_loss(REINFORCE, (), section(coef=0.5))(given)
    by_hand = -((inputs.advantages + 0.5 * (teacher - inputs.prev_logprobs)) * inputs.logprobs).sum()
    torch.testing.assert_close(loss.loss, by_hand)
    assert build_loss(REINFORCE)(given).loss.item() != pytest.approx(by_hand.item())


@pytest.mark.parametrize(("keys", "column"), [({}, "teacher_logprobs"), ({"kl_in": "loss"}, "teacher_logprobs"),
                                              ({"kind": "topk"}, "teacher_top_logprobs")])  # fmt: skip
def test_a_missing_column_is_named(keys: dict[str, str], column: str) -> None:
    inputs = loss_inputs(rows := random_rows(3), group_tokens(rows))
    with pytest.raises(ValueError, match=f"the rows have no {column}; write these before the step"):
        build_loss(REINFORCE, (), section(**keys))(inputs)
