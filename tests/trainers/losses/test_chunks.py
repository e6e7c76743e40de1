"""Tests that loss, gradient and metrics do not depend on how a step's rows are divided into microbatches and ranks."""

from __future__ import annotations

import itertools
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
    group_tokens,
    loss_inputs,
    random_rows,
)
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.policy_loss import build_loss
from headrace.trainers.losses.terms import LossInputs, PolicyLoss, TermSums

EXTRAS = ({"kl_coef": 0.3, "entropy_coef": 0.1}, {"kl_coef": 0.3, "kl_in": "reward"})
COMBINATIONS = list(itertools.product(KINDS, AGGREGATIONS, CORRECTIONS))


def configs(kind: str, aggregation: str, correction: str) -> list[LossConfig]:
    return [config_of(kind, aggregation, correction, **extra) for extra in EXTRAS]


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
