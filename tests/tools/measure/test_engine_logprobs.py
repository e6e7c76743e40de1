"""Tests of `headrace bench gpu --work engine-logprobs`: its summary, and the whole on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench import records
from headrace.bench.gpu.work_report import WorkReport
from headrace.tools.measure import engine_logprobs
from headrace.tools.measure.engine_load import EngineOptions
from headrace.tools.measure.engine_logprobs import run_engine_logprobs, summarise_engine
from headrace.trainers.errors import UserError


def test_ratios_are_those_of_rounds() -> None:
    rates = {"plain": [10.0, 20.0, 40.0], "vllm": [5.0, 20.0, 10.0], "arrays": [10.0, 19.0, 40.0]}
    summary = summarise_engine("w", 7, rates, 0)  # type: ignore[arg-type]
    assert summary["gpu.w.plain.tokens_per_s"] == 20.0 and summary["gpu.w.vllm_vs_plain"] == 0.5
    assert (summary["gpu.w.arrays_vs_plain_min"], summary["gpu.w.arrays_vs_plain_max"]) == (0.95, 1.0)


def test_it_reads_the_section_rollout_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer.tp=2: no run is made .*, expected keys of rollout.\* only"):
        options = EngineOptions(tmp_path, "engine-logprobs-tiny", overrides=("trainer.tp=2",))
        run_engine_logprobs(options, WorkReport(options.work, tmp_path))


def test_whole_rounds_of_an_engine_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round is interrupted when only some of its ways were timed; the engine is closed."""

    class FakeEngine:
        logprob_way = "auto"
        closed = False

        async def close(self) -> None:
            self.closed = True

    class FakeBench:
        setup = load = None

        def __init__(self, options: EngineOptions) -> None:
            self.options = options

    async def none_differ(engine: object, load: object) -> int:
        return 0

    async def timed(engine: object, load: object, way: str, number: int) -> float:
        timings.append(way)
        if len(timings) == 8:  # three that warm up, and three of the first round
            raise KeyboardInterrupt
        return 20.0 if way == "plain" else 10.0

    timings: list[str] = []
    engine = FakeEngine()
    monkeypatch.setattr(engine_logprobs, "prepare", lambda options, folder: FakeBench(options))
    monkeypatch.setattr(engine_logprobs, "build_engine", lambda setup: engine)
    monkeypatch.setattr(engine_logprobs, "differing_logprobs", none_differ)
    monkeypatch.setattr(engine_logprobs, "_timed", timed)
    monkeypatch.setattr(records, "_commit", lambda: "unknown")
    report = WorkReport("engine-logprobs-tiny", tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run_engine_logprobs(EngineOptions(report.out, report.work, pairs=3), report)
    assert engine.closed
    found = json.loads((report.out / "summary.json").read_text())
    assert found["gpu.engine-logprobs-tiny.arrays_vs_plain"] == 0.5
    assert found["gpu.engine-logprobs-tiny.differing_logprobs"] == 0
    assert "in the phase 'round 2 of 3'" in found["conditions"]["interrupted"]
    assert found["conditions"]["interrupted"].endswith("not to the end: round 2 to 3")


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.vllm
@pytest.mark.processes
@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    report = WorkReport("engine-logprobs-tiny", tmp_path / "out")
    run_engine_logprobs(EngineOptions(report.out, report.work, pairs=2), report)
    assert report.complaints == []
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["gpu.engine-logprobs-tiny.differing_logprobs"] == 0 and found["conditions"]["way"] == "auto"
    assert found["gpu.engine-logprobs-tiny.arrays_vs_plain"] > 0
