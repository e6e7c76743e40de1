"""Mini-batches and epochs: how a step's rows are dealt, and how the figures of its updates are merged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.protocols import ROLLOUT_SCHEMA
from headrace.dataplane.meta import KVBatchMeta
from headrace.trainers.grpo.step_metrics import update_metrics
from headrace.trainers.grpo.training_modes import deal


def receipt(groups: int, size: int) -> KVBatchMeta:
    """A receipt for `groups` groups of `size` rows each, whose rows are interleaved."""
    rows = groups * size
    keys = tuple(f"{row % groups:x}.{row // groups}" for row in range(rows))
    numbers = np.arange(rows) % groups + 100
    ones = np.ones(rows, dtype=np.int64)
    return KVBatchMeta(
        "p", keys, (), ones, ones, numbers, {}, (), (), schema=ROLLOUT_SCHEMA, plane_id=1, generations=numbers
    )


def dealt(meta: KVBatchMeta, minibatches: int, epochs: int, seed: int = 0, step: int = 1) -> list[list[str]]:
    parts = deal(meta, minibatches=minibatches, epochs=epochs, seed=seed, step=step)
    return [list(part.keys) for part in parts]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**31))
def test_each_epoch_has_each_row_once_and_groups_stay_whole(
    groups: int, size: int, minibatches: int, epochs: int, seed: int
) -> None:
    meta = receipt(groups, size)
    minibatches = min(minibatches, groups)
    parts = dealt(meta, minibatches, epochs, seed)
    assert len(parts) == minibatches * epochs
    for epoch in range(epochs):
        mine = parts[epoch * minibatches : (epoch + 1) * minibatches]
        assert sorted(key for part in mine for key in part) == sorted(meta.keys)
        counts = [len({key.split(".")[0] for key in part}) for part in mine]
        assert max(counts) - min(counts) <= 1 and all(len(p) == c * size for p, c in zip(mine, counts, strict=True))
    assert parts == dealt(meta, minibatches, epochs, seed), "a resumed step deals the same"


def test_a_step_with_one_update_keeps_the_order_of_its_rows() -> None:
    meta = receipt(5, 2)
    assert dealt(meta, 1, 1) == [list(meta.keys)] and dealt(meta, 1, 2) == [list(meta.keys)] * 2


def test_epochs_and_steps_are_dealt_differently() -> None:
    meta = receipt(16, 1)
    first, second = dealt(meta, 2, 2)[::2]
    assert set(first) != set(second) and set(first) != set(dealt(meta, 2, 1, step=2)[0])


def test_the_figures_of_updates_are_merged() -> None:
    first = {
        "train/tokens": 10.0, "train/sequences": 2.0, "train/loss": 1.0, "train/lr": 0.1, "train/skipped": 0.0,
        "train/clip_fraction": 0.0, "train/grad_norm": 1.0, "logprob/mismatch_mean": 0.5,
    }  # fmt: skip
    second = {**first, "train/clip_fraction": 0.5, "train/lr": 0.2, "train/skipped": 1.0, "logprob/mismatch_mean": 9.0}
    assert update_metrics([first]) == first and update_metrics([]) == {}
    merged = update_metrics([first, second])
    assert merged["train/tokens"] == 20.0 and merged["train/sequences"] == 4.0
    assert merged["train/clip_fraction"] == pytest.approx(0.25) and merged["train/loss"] == 1.0
    assert merged["logprob/mismatch_mean"] == 0.5, "the policy before the step against the engine's"
    assert merged["train/lr"] == 0.2 and merged["train/skipped"] == 0.0 and merged["train/updates"] == 2.0
    assert (merged["update_1/clip_fraction"], merged["update_2/clip_fraction"]) == (0.0, 0.5)
    assert np.isfinite(list(merged.values())).all()
