"""Tests value, gradient and metrics of every loss against its formula, and in any microbatches and over any ranks."""

from __future__ import annotations

import itertools
import math
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.tests.trainers.losses.reference import (
    AGGREGATIONS,
    CORRECTIONS,
    KINDS,
    Row,
    config_of,
    finite_differences,
    group_tokens,
    loss_inputs,
    random_rows,
    reference_loss,
    reference_metrics,
)
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.step_loss import build_loss
from headrace.trainers.losses.terms import LossInputs, PolicyLoss, TermSums

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


@pytest.mark.parametrize("bound", [None, 0.2])
@pytest.mark.parametrize(
    ("estimator", "where"), [*itertools.product(["k1", "k2", "k3"], ["loss", "reward"]), ("k3_is", "loss")]
)
def test_every_kl(estimator: str, where: str, bound: float | None) -> None:
    for kind in KINDS:
        keys = {"kl_coef": 0.4, "kl_kind": estimator, "kl_in": where, "kl_max_log_ratio": bound}
        check(config_of(kind, "sequence", **keys), seed=11)


@pytest.mark.parametrize(
    ("kind", "bound", "expected"),
    [("k3", None, 1 - math.exp(11)), ("k3", 5.0, 0.0), ("k3_is", None, -11 * math.exp(-11))],
)
def test_a_token_that_training_made_unlikely(kind: str, bound: float | None, expected: float) -> None:
    """An update lowered the token's log-prob by 11 nats. The gradient of k3 explodes there; the bound or the ratio
    keeps it small."""
    one = np.array([-1.0])
    rows = [Row(np.array([-12.0]), one, one, one, one, 0.0, 0)]
    inputs = loss_inputs(rows, group_tokens(rows))
    config = config_of("ppo_clip", kl_coef=1.0, kl_kind=kind, kl_max_log_ratio=bound)
    (slope,) = torch.autograd.grad(build_loss(config)(inputs).loss, [inputs.logprobs])
    assert slope.item() == pytest.approx(expected, abs=1e-12)


def test_the_ratio_has_no_meaning_in_a_reward() -> None:
    with pytest.raises(ValueError, match="k3_is with loss.kl_in=reward: expected loss.kl_kind=k3"):
        config_of("ppo_clip", kl_coef=0.1, kl_kind="k3_is", kl_in="reward")


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


WITH_KL = ({"kl_coef": 0.3, "entropy_coef": 0.1}, {"kl_coef": 0.3, "kl_in": "reward"})
COMBINATIONS = list(itertools.product(KINDS, AGGREGATIONS, CORRECTIONS))


def configs(kind: str, aggregation: str, correction: str) -> list[LossConfig]:
    return [config_of(kind, aggregation, correction, **extra) for extra in WITH_KL]


def gradient(sums: TermSums, inputs: LossInputs) -> np.ndarray:
    """Gradient with respect to log-probs and entropies: float64 `[2, T]`."""
    leaves = [inputs.logprobs, inputs.entropy]
    return torch.stack(torch.autograd.grad(sums.loss, leaves, materialize_grads=True)).numpy()  # type: ignore[arg-type]


def in_microbatches(
    loss: PolicyLoss, rows: Sequence[Row], micros: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64
) -> tuple[float, np.ndarray, np.ndarray]:
    """Sum loss, gradient (`[2, T]` in the order of `rows`) and metrics over microbatches of row numbers."""
    groups = group_tokens(rows)
    starts = np.cumsum([0, *(len(row.now) for row in rows)])
    total, metrics, slopes = 0.0, np.zeros(len(loss.metrics)), np.zeros((2, starts[-1]))
    for micro in micros:
        inputs = loss_inputs([rows[row] for row in micro], groups, dtype)
        sums = loss(inputs)
        place = np.concatenate([np.zeros(0, int), *(np.arange(starts[row], starts[row + 1]) for row in micro)])
        slopes[:, place] = gradient(sums, inputs)
        total += sums.loss.item()
        metrics += [value.item() for value in sums.metrics.values()]
    return total, slopes, metrics


@pytest.mark.parametrize(("kind", "aggregation", "correction"), COMBINATIONS)
def test_any_chunking_in_any_order(kind: str, aggregation: str, correction: str) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {aggregation} {correction}".encode()))
    for seed, config in enumerate(configs(kind, aggregation, correction)):
        rows, loss = random_rows(seed, num_rows=12), build_loss(config)
        whole = in_microbatches(loss, rows, [range(len(rows))])
        order = rng.permutation(len(rows)).tolist()
        cuts = sorted(rng.integers(0, len(rows) + 1, rng.integers(1, 6)).tolist())  # equal cuts: an empty microbatch
        micros = [order[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(rows)])]
        for got, expected in zip(in_microbatches(loss, rows, micros), whole, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_too(kind: str) -> None:
    loss = build_loss(config_of(kind, "prompt", "sequence", kl_coef=0.3))
    rows = random_rows(1, num_rows=12)
    whole = in_microbatches(loss, rows, [range(12)], torch.float32)
    parts = in_microbatches(loss, rows, [[5, 1], [], [0, 11, 3, 7], [2, 4, 6, 8, 9, 10]], torch.float32)
    scale = np.abs(whole[1]).max()
    assert parts[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-6, atol=1e-6 * scale)


class ThreadRanks:
    """Runs ranks as threads whose `reduce_rows` sums the values of all; autograd then sums their gradients."""

    def __init__(self, num: int) -> None:
        self._barrier = threading.Barrier(num, timeout=30)
        self._brought: dict[int, torch.Tensor] = {}
        self.calls = 0

    def reduce_of(self, rank: int):
        def reduce_rows(sums: torch.Tensor) -> torch.Tensor:
            self._brought[rank] = sums
            self._barrier.wait()
            total = torch.stack([self._brought[other] for other in sorted(self._brought)]).sum(0)
            self._barrier.wait()  # the next comes only after all have taken this
            self.calls += rank == 0
            return total

        return reduce_rows


def shares_of(inputs: LossInputs, ranks: ThreadRanks, owner: torch.Tensor, num: int) -> list[LossInputs]:
    """Give each rank the tokens that `owner` `[T]` assigns to it; rows and their counts stay whole."""
    names = ("logprobs", "prev_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "row_ids", "entropy")
    return [
        replace(
            inputs, **{name: getattr(inputs, name)[owner == rank] for name in names}, reduce_rows=ranks.reduce_of(rank)
        )
        for rank in range(num)
    ]


@pytest.mark.parametrize(("kind", "aggregation", "correction"), COMBINATIONS)
def test_rows_split_over_context_parallel_ranks(kind: str, aggregation: str, correction: str) -> None:
    num = 3
    for seed, config in enumerate(configs(kind, aggregation, correction)):
        rows, loss = random_rows(seed), build_loss(config)
        inputs = loss_inputs(rows, group_tokens(rows))
        whole = loss(inputs)
        generator = torch.Generator().manual_seed(seed)
        owner = torch.randint(0, num, (len(inputs.row_ids),), generator=generator)
        ranks = ThreadRanks(num)
        with ThreadPoolExecutor(num) as pool:
            parts = list(pool.map(loss, shares_of(inputs, ranks, owner, num), timeout=60))
        together = TermSums(torch.stack([part.loss for part in parts]).sum(), {})
        assert together.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
        np.testing.assert_allclose(gradient(together, inputs), gradient(whole, inputs), rtol=1e-12, atol=1e-13)
        for name, value in whole.metrics.items():
            got = sum(part.metrics[name].item() for part in parts)
            assert got == pytest.approx(value.item(), rel=1e-12), name
        assert ranks.calls == (kind == "gspo") + (correction in ("sequence", "sequence_mask"))
