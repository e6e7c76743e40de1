"""Tests FLOP counts against torch's own counter, and the speed metrics that a step reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config

from headrace.tests.trainers.backends.backend_ranks import (
    MEASURED,
    backend_config,
    micro_batch,
    random_rows,
    save_tiny_llama,
    save_tiny_model,
    save_tiny_moe,
)
from headrace.trainers.backends import throughput
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.throughput import StepMeter, flop_model


@pytest.mark.parametrize("save", [save_tiny_model, save_tiny_moe, save_tiny_llama])
def test_counts_are_those_of_the_products_that_torch_runs(tmp_path: Path, save: Callable[[Path], str]) -> None:
    # The eager forms: their products are plain ones, which the counter knows.
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path), attn_implementation="eager")
    model.set_experts_implementation("eager")
    flops = flop_model(model.config)
    assert flops is not None
    rows, length = 2, 11
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(rows * length).reshape(rows, length), use_cache=False)
    tokens, pairs = rows * length, rows * length * length  # eager attention computes what it masks, too
    adds = (flops.per_token + flops.per_logits) * tokens + flops.per_pair * pairs
    angles = length * rows * 4  # the rotary angles, where the model makes them by a product
    assert counter.get_total_flops() - 2 * adds in (0, 2 * angles)


def test_a_step_is_three_forwards_over_causal_pairs(tmp_path: Path) -> None:
    flops = flop_model(AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path)).config)
    assert flops is not None
    lengths = np.array([3, 0, 5], np.int64)
    expected = 6 * (flops.per_token * 8 + flops.per_pair * (6 + 15) + flops.per_logits * 4)
    assert flops.step(lengths, 4) == expected
    assert flops.step(lengths[:1], 1) + flops.step(lengths[1:], 3) == expected, "microbatches add up"
    assert flop_model(GPT2Config()) is None


def test_a_step_reports_its_speed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    backend = FsdpBackend(backend_config(save_tiny_model(tmp_path)), 0, 1)
    backend.begin_step()
    backend.accumulate([micro_batch(random_rows(0, 8))], 1)
    metrics = backend.finish_step()
    assert metrics.keys() > MEASURED and all(metrics[name] > 0 for name in MEASURED)
    assert "train/mfu" not in metrics, "a CPU's peak is not known"
    assert 0.05 < metrics["memory/peak_gib"] < 64


def test_rates_are_over_the_seconds_worked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter([10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    flops = flop_model(AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path)).config)
    assert flops is not None
    meter = StepMeter(flops, torch.device("cpu"), 1, None, half=True)
    meter._peak = 1e6  # as on a device that is known
    lengths = np.array([4, 6], np.int64)
    with meter.working():
        meter.add(lengths, 5)
    with meter.working():
        meter.add(lengths, 5)
    metrics = meter.metrics()
    assert metrics["train/tokens_per_s"] == 20 / 5
    assert metrics["train/tflops"] == pytest.approx(2 * flops.step(lengths, 5) / 5 / 1e12)
    assert metrics["train/mfu"] == pytest.approx(metrics["train/tflops"] * 1e12 / 1e6)
    meter.begin()
    assert meter.metrics()["train/tokens_per_s"] == 0
