"""Tests of `headrace bench gpu --work engine-logprobs`: its summary, and the whole on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.bench.gpu.engine_logprobs import EngineOptions, made_up_load, run_engine_logprobs, summarise_engine
from headrace.trainers.errors import UserError


def test_ratios_are_those_of_rounds() -> None:
    rates = {"plain": [10.0, 20.0, 40.0], "vllm": [5.0, 20.0, 10.0], "arrays": [10.0, 19.0, 40.0]}
    summary = summarise_engine("w", 7, rates, 0)  # type: ignore[arg-type]
    assert summary["gpu.w.plain.tokens_per_s"] == 20.0 and summary["gpu.w.vllm_vs_plain"] == 0.5
    assert (summary["gpu.w.arrays_vs_plain_min"], summary["gpu.w.arrays_vs_plain_max"]) == (0.95, 1.0)


def test_the_load_is_the_same_every_time() -> None:
    load = made_up_load(3, 4, (5, 9), 100, 16)
    assert load == made_up_load(3, 4, (5, 9), 100, 16) and load.tokens == 3 * 4 * 16
    assert all(5 <= len(prompt) <= 9 and max(prompt) < 97 for prompt in load.prompts)


def test_options_that_do_not_fit_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer.tp=2: no run is made .*, expected keys of rollout.\* only"):
        run_engine_logprobs(EngineOptions(tmp_path, "engine-logprobs-tiny", overrides=("trainer.tp=2",)), print)
    if not torch.cuda.device_count():
        with pytest.raises(UserError, match="--work: got 'engine-logprobs' on a machine without a GPU"):
            run_engine_logprobs(EngineOptions(tmp_path, "engine-logprobs"), print)


@pytest.mark.vllm
@pytest.mark.processes
@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    report = run_engine_logprobs(EngineOptions(tmp_path / "out", "engine-logprobs-tiny", pairs=2), lambda _: None)
    assert report.complaints == []
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["gpu.engine-logprobs-tiny.differing_logprobs"] == 0 and found["conditions"]["way"] == "auto"
    assert found["gpu.engine-logprobs-tiny.arrays_vs_plain"] > 0
