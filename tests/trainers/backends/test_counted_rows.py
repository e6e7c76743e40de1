"""The N of a mean over rows counts masked rows, which teach nothing, and each row once however ranks share it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.tests.trainers.backends.backend_ranks import TEMPERATURE, Row, micro_batch, random_rows, run_on_ranks
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, Case, train
from headrace.trainers.losses.config import LossConfig

both = pytest.mark.parametrize("kind", ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])


def masked(rows: list[Row], which: set[int]) -> list[Row]:
    return [dataclasses.replace(row, mask=row.mask * 0) if index in which else row for index, row in enumerate(rows)]


def step(backend: Any, rows: list[Row], counted: list[int] | None) -> dict[str, float]:
    """A step in two microbatches. counted: as in `MicroBatch`."""
    backend.begin_step(TEMPERATURE)
    for part in (slice(0, 3), slice(3, None)):
        micro = micro_batch(rows[part])
        if counted is not None:
            micro = dataclasses.replace(micro, counted=np.array(counted[part], np.int64))
        backend.accumulate([micro], 1)
    return backend.finish_step()


@both
@pytest.mark.parametrize(
    ("aggregation", "share"), [("sequence", 6 / 8), ("sequence_sum", 6 / 8), ("prompt", 1.0), ("token", 1.0)]
)
def test_masked_rows_count_in_means_over_rows(kind: str, folder: Path, aggregation: Any, share: float) -> None:
    """Two of eight rows are masked: TRL's gradient is 6/8 of that without them. Both prompts have rows that are not."""
    loss = LossConfig(clip_low=0.1, clip_high=0.15, aggregation=aggregation, length_norm=10, kl_coef=0.05)
    rows = masked([row for row in random_rows(0, 12) if row.mask.any()][:8], {1, 6})
    norms, sequences = [], []
    for counted in (None, [1] * 8):
        with contextlib.closing(Case(f"{kind} untied", {"loss": loss}).build(0, folder)) as backend:
            found = step(backend, rows, counted)
        norms.append(found["train/grad_norm"])
        sequences.append(found["train/sequences"])
    assert sequences == [6, 8] and norms[1] == pytest.approx(share * norms[0], rel=1e-5)


@both
def test_a_step_of_masked_rows_alone_is_skipped(kind: str, folder: Path) -> None:
    loss = LossConfig(aggregation="sequence", kl_coef=0.05)
    with contextlib.closing(Case(f"{kind} untied", {"loss": loss}).build(0, folder)) as backend:
        assert step(backend, masked(random_rows(0, 8), set(range(8))), [1] * 8)["train/skipped"] == 1


def run_cases(rank: int, world: int, chosen: tuple[Case, ...], folder: str) -> list[dict[str, float]]:
    found = []
    for case in chosen:
        with contextlib.closing(case.build(rank, folder)) as backend:
            found.append(train(backend, case.topology, rank, random_rows(0, NUM_ROWS)))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["fsdp", pytest.param("megatron", marks=[pytest.mark.megatron, pytest.mark.slow])])
def test_each_row_counts_once_on_two_ranks(kind: str, folder: Path, tmp_path: Path) -> None:
    changes = {"loss": LossConfig(clip_low=0.1, clip_high=0.15, aggregation="sequence", kl_coef=0.05)}
    packed = "" if kind == "megatron" else " packed"
    cases = tuple(Case(f"{kind} llama {mesh}{packed}", changes) for mesh in ("cp2", "dp2"))
    [alone] = run_cases(0, 1, (Case(f"{kind} llama", changes),), str(folder))
    for rank in run_on_ranks(run_cases, 2, tmp_path, cases, str(folder)):
        for found in rank:
            assert found["train/sequences"] == alone["train/sequences"] == 8
            for name in ("train/loss", "train/grad_norm"):
                assert found[name] == pytest.approx(alone[name], rel=1e-4)
