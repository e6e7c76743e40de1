"""Tests the mismatch metrics of a microbatch against sums computed by hand in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.trainers.losses.correction import mismatch
from headrace.trainers.losses.terms import LossInputs


def inputs(now: np.ndarray, prev: np.ndarray, rollout: np.ndarray) -> LossInputs:
    """Make the inputs of a microbatch whose tokens all belong to one row."""
    ours, before, engine = (torch.from_numpy(values.astype(np.float32)) for values in (now, prev, rollout))
    num = len(now)
    return LossInputs(
        *(ours.requires_grad_(), before, engine, None),
        advantages=torch.ones(num),
        row_ids=torch.zeros(num, dtype=torch.int64),
        row_tokens=torch.tensor([num]),
    )


@pytest.mark.parametrize("size", [3.0, 0.1, 1e-3, 1e-5])
def test_sums_and_largest_of_one_policy_or_the_other(size: float) -> None:
    rng = np.random.default_rng(5)
    base = rng.normal(-2, 0.5, 400)
    now, prev, rollout = ((base + size * rng.normal(0, 1, 400)).astype(np.float32) for _ in range(3))
    given = inputs(now, prev, rollout)
    for trainer, recomputed in ((now, False), (prev, True)):
        delta = trainer.astype(np.float64) - rollout
        sums, largest = mismatch(given, recomputed=recomputed)
        expected = [np.abs(delta).sum(), (np.expm1(delta) - delta).sum(), np.exp(np.abs(delta)).sum()]
        assert sums.dtype == torch.float64 and not sums.requires_grad
        assert sums.tolist() == pytest.approx(expected, rel=1e-5), "also where k3 is below float32's resolution"
        assert float(largest) == pytest.approx(np.abs(delta).max(), rel=1e-12)


def test_an_engine_that_agrees_and_no_tokens() -> None:
    same = np.linspace(-3, 0, 5)
    for given in (inputs(same, same, same), inputs(same[:0], same[:0], same[:0])):
        sums, largest = mismatch(given, recomputed=True)
        assert sums.tolist() == [0.0, 0.0, len(given.logprobs)] and float(largest) == 0.0


def test_a_broken_log_prob_is_seen() -> None:
    sums, largest = mismatch(inputs(np.array([np.nan, -1.0]), np.zeros(2), np.zeros(2)), recomputed=False)
    assert sums.isnan().all() and largest.isnan()
