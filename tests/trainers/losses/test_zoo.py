"""Tests value, gradient and metrics of every loss, aggregation and correction against the formulas of `reference`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from headrace.tests.trainers.losses.reference import (
    AGGREGATIONS,
    CORRECTIONS,
    KINDS,
    config_of,
    finite_differences,
    group_tokens,
    loss_inputs,
    random_rows,
    reference_loss,
    reference_metrics,
)
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.policy_loss import build_loss

EXTRAS = (
    {},
    {"kl_coef": 0.7, "kl_kind": "k3", "entropy_coef": 0.2},
    {"kl_coef": 0.6, "kl_kind": "k2", "kl_in": "reward"},
)


def check(config: LossConfig, seed: int) -> None:
    rows = random_rows(seed)
    inputs = loss_inputs(rows, group_tokens(rows))
    sums = build_loss(config)(inputs)
    expected = reference_loss(config, rows, [row.now for row in rows], [row.entropy for row in rows])
    assert sums.loss.item() == pytest.approx(expected, rel=1e-10)
    leaves = (inputs.logprobs, inputs.entropy)
    by_logprob, by_entropy = torch.autograd.grad(sums.loss, leaves, materialize_grads=True)  # type: ignore[arg-type]
    slopes, entropy_slopes = finite_differences(config, rows)
    np.testing.assert_allclose(by_logprob, slopes, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(by_entropy, entropy_slopes, rtol=1e-6, atol=1e-8)
    metrics = reference_metrics(config, rows)
    assert {name: value.item() for name, value in sums.metrics.items()} == pytest.approx(
        {name: metrics[name] for name in sums.metrics}, rel=1e-10, abs=1e-12
    )
    assert not any(value.requires_grad for value in sums.metrics.values())


@pytest.mark.parametrize(
    ("kind", "aggregation", "correction"), list(itertools.product(KINDS, AGGREGATIONS, CORRECTIONS))
)
def test_every_combination_is_its_formula(kind: str, aggregation: str, correction: str) -> None:
    for seed, extra in enumerate(EXTRAS):
        check(config_of(kind, aggregation, correction, **extra), seed)


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_kl(estimator: str, where: str) -> None:
    for kind in KINDS:
        check(config_of(kind, "sequence", kl_coef=0.4, kl_kind=estimator, kl_in=where), seed=11)


def test_no_second_clip_and_no_lower_bound() -> None:
    check(config_of("ppo_clip", clip_dual=None), seed=3)
    check(config_of("cispo", clip_low=1.0), seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_meet_every_branch(kind: str) -> None:
    """Every bound acts on some of the random rows; otherwise the comparison above would test nothing."""
    rows = [row for seed in range(len(EXTRAS)) for row in random_rows(seed)]
    tokens = sum(len(row.now) for row in rows)
    for correction in CORRECTIONS[1:]:
        corrected = reference_metrics(config_of(kind, correction=correction), rows)
        assert 0 < corrected["correction_fraction"] < tokens
    metrics = reference_metrics(config_of(kind), rows)
    if kind != "reinforce":
        assert 0 < metrics["clip_fraction"] < tokens
    if kind == "ppo_clip":
        single = reference_metrics(config_of(kind, clip_dual=None), rows)
        assert single["clip_fraction"] < metrics["clip_fraction"]


def test_metrics_of_each_loss() -> None:
    drift = ("approx_kl", "rollout_kl")
    clipped = ("ratio_mean", "clip_fraction", *drift)
    names = {"ppo_clip": clipped, "gspo": clipped, "cispo": clipped, "reinforce": drift}
    assert {kind: build_loss(config_of(kind)).metrics for kind in KINDS} == names
    every = config_of("gspo", correction="tis", kl_coef=0.1, kl_in="reward", entropy_coef=0.1)
    assert build_loss(every).metrics == (*clipped, "correction_weight", "correction_fraction", "reference_kl")
    assert build_loss(config_of("reinforce", kl_coef=0.1)).metrics == (*drift, "reference_kl")


@pytest.mark.parametrize("correction", CORRECTIONS[1:])
def test_a_correction_of_equal_policies_changes_nothing(correction: str) -> None:
    rows = random_rows(5)
    inputs = loss_inputs([type(row)(**{**vars(row), "rollout": row.prev}) for row in rows], group_tokens(rows))
    plain, corrected = (build_loss(config_of("ppo_clip", correction=name))(inputs) for name in ("none", correction))
    assert corrected.loss.item() == plain.loss.item()
    assert corrected.metrics["correction_fraction"].item() == 0


@pytest.mark.parametrize("correction", ["icepop", "sequence_mask"])
def test_a_nan_is_not_masked_away(correction: str) -> None:
    """A NaN must skip the step; a weight of 0 would hide it."""
    inputs = loss_inputs(random_rows(5), group_tokens(random_rows(5)))
    inputs.rollout_logprobs[3] = float("nan")
    assert build_loss(config_of("ppo_clip", correction=correction))(inputs).loss.isnan()


def test_long_rows_do_not_overflow() -> None:
    rows = random_rows(2)
    far = [type(row)(**{**vars(row), "rollout": row.prev - 400.0}) for row in rows]
    for correction, weight in (("sequence", 1.4), ("sequence_mask", 0.0)):
        sums = build_loss(config_of("reinforce", correction=correction))(loss_inputs(far, group_tokens(far)))
        tokens = sum(len(row.now) for row in rows)
        assert sums.loss.isfinite() and sums.metrics["correction_weight"].item() == pytest.approx(weight * tokens)
