"""Tests the scripted backend: step states, counts and seconds, changing weights, checkpoints and two ranks."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.actors.engines.config import ScriptedConfig
from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import micro_batch, random_rows, run_on_ranks, run_step, weights_of
from headrace.trainers.backends.config import BackendConfig, TrainerConfig
from headrace.trainers.backends.factory import build_backend
from headrace.trainers.backends.scripted import ScriptedBackend


def config(topology: Topology = Topology(1), scripted: ScriptedConfig = ScriptedConfig()) -> BackendConfig:  # noqa: B008
    return BackendConfig("none", TrainerConfig(backend="scripted", **asdict(topology)), scripted=scripted)


def test_a_step_counts_its_rows_and_takes_its_seconds() -> None:
    rows = random_rows(0, 12)
    backend = build_backend(config(scripted=ScriptedConfig(train_row_s=0.01, train_step_s=0.05)), 0, 1)
    before = weights_of(backend)
    started = time.perf_counter()
    metrics = run_step(backend, [rows[:5], rows[5:]])
    assert time.perf_counter() - started >= 12 * 0.01 + 0.05
    assert metrics == {
        "train/tokens": sum(int(row.mask.sum()) for row in rows),
        "train/sequences": sum(bool(row.mask.any()) for row in rows),
        "train/skipped": 0.0,
    }
    after = weights_of(backend)
    assert sum(weight.nbytes for weight in after.values()) == 4096
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight + 1)


def test_a_step_without_tokens_or_aborted_changes_nothing() -> None:
    backend = ScriptedBackend(config(), 0, 1)
    before = weights_of(backend)
    failed = [row for row in random_rows(0, 12) if not row.mask.any()]
    assert run_step(backend, [failed, []])["train/skipped"] == 1.0
    backend.begin_step()
    backend.accumulate([micro_batch(random_rows(1, 3))], 1)
    backend.abort_step()
    backend.abort_step()
    with pytest.raises(RuntimeError, match="finish_step: no step is open"):
        backend.finish_step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(backend).items())


def test_calls_out_of_order_are_refused() -> None:
    backend = ScriptedBackend(config(), 0, 1)
    with pytest.raises(RuntimeError, match="accumulate: no step is open"):
        backend.accumulate([], 0)
    backend.begin_step()
    with pytest.raises(RuntimeError, match="begin_step: a step is open"):
        backend.begin_step()
    with pytest.raises(RuntimeError, match="save: a step is open"):
        backend.save("nowhere")


def test_logprobs_are_zeros_of_every_token() -> None:
    rows = random_rows(2, 4)
    [column] = ScriptedBackend(config(), 0, 1).logprobs([micro_batch(rows)], 1)
    assert column.dtype == torch.float32 and torch.equal(column, torch.zeros(sum(len(row.ids) for row in rows)))


def test_checkpoints_and_exports_hold_the_weights(tmp_path: Path) -> None:
    backend = ScriptedBackend(config(), 0, 1)
    run_step(backend, [random_rows(0, 4)])
    backend.save(str(tmp_path / "one"), wait=False)
    run_step(backend, [random_rows(0, 4)])
    backend.wait_saved()
    backend.export_model(str(tmp_path / "model"))
    exported, two = load_file(tmp_path / "model" / "model.safetensors"), weights_of(backend)
    assert all(torch.equal(weight, exported[name]) for name, weight in two.items())
    again = ScriptedBackend(config(), 0, 1)
    again.load(str(tmp_path / "one"))
    assert all(torch.equal(weight + 1, two[name]) for name, weight in weights_of(again).items())
    backend.close()
    again.close()


def _two_ranks(rank: int, world: int) -> list[dict[str, object]]:
    found = []
    for topology in (Topology(2), Topology(1, tp=2)):
        backend = build_backend(config(topology=topology), rank, world)
        rows = random_rows(5, 8)
        shard = rows[rank * 4 : rank * 4 + 4] if topology.dp == 2 else rows
        columns = backend.logprobs([micro_batch(shard)], 1)
        metrics = run_step(backend, [shard])
        found.append({"metrics": metrics, "columns": len(columns), "weights": len(weights_of(backend))})
    return found


@pytest.mark.processes
def test_two_ranks_count_every_row_once(tmp_path: Path) -> None:
    """Run two ranks as two replicas, and as one replica that is split in two."""
    tokens = sum(int(np.sum(row.mask)) for row in random_rows(5, 8))
    for topology, found in enumerate(zip(*run_on_ranks(_two_ranks, 2, tmp_path), strict=True)):
        assert [rank["metrics"]["train/tokens"] for rank in found] == [tokens, tokens]
        assert [rank["columns"] for rank in found] == [[1, 1], [1, 0]][topology]
        assert [rank["weights"] for rank in found] == [4, 0]
