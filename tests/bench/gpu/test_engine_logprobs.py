"""Tests of `headrace bench gpu --work engine-logprobs`: its summary, and the whole on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.gpu.engine.load import EngineOptions
from headrace.bench.gpu.engine.logprobs import run_engine_logprobs, summarise_engine
from headrace.bench.gpu.figures import Figures
from headrace.trainers.errors import UserError


def test_ratios_are_those_of_rounds() -> None:
    rates = {"plain": [10.0, 20.0, 40.0], "vllm": [5.0, 20.0, 10.0], "arrays": [10.0, 19.0, 40.0]}
    summary = summarise_engine("w", 7, rates, 0)  # type: ignore[arg-type]
    assert summary["gpu.w.plain.tokens_per_s"] == 20.0 and summary["gpu.w.vllm_vs_plain"] == 0.5
    assert (summary["gpu.w.arrays_vs_plain_min"], summary["gpu.w.arrays_vs_plain_max"]) == (0.95, 1.0)


def test_it_reads_the_section_rollout_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer.tp=2: no run is made .*, expected keys of rollout.\* only"):
        options = EngineOptions(tmp_path, "engine-logprobs-tiny", overrides=("trainer.tp=2",))
        run_engine_logprobs(options, Figures(options.work, tmp_path))


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.vllm
@pytest.mark.processes
@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    report = Figures("engine-logprobs-tiny", tmp_path / "out")
    run_engine_logprobs(EngineOptions(report.out, report.work, pairs=2), report)
    assert report.complaints == []
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["gpu.engine-logprobs-tiny.differing_logprobs"] == 0 and found["conditions"]["way"] == "auto"
    assert found["gpu.engine-logprobs-tiny.arrays_vs_plain"] > 0
