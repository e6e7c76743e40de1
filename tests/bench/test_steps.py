"""`headrace bench step`: a short run of the whole, and what its figures are made of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.actors.engines.scripted import request_latency
from headrace.actors.rollout.prompts import base36
from headrace.bench import steps
from headrace.bench.steps import CASES, ModeResult, StepOptions
from headrace.cli import main

TINY = replace(StepOptions.quick(Path("unused")), warm=1, counted=3, prompts=8, train_s=0.25)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("own_ray")
def test_a_short_run_writes_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real system in all modes; its simulation is of the same seconds, give or take a noisy machine."""
    monkeypatch.setattr(StepOptions, "quick", staticmethod(lambda out: replace(TINY, out=out)))
    assert main(["bench", "step", "--quick", "--out", str(tmp_path)]) == 0
    assert "headrace bench step" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("conditions")["counted"] == 3
    assert all(math.isfinite(value) for value in summary.values())
    for case in CASES:
        assert summary[f"step.{case.name}.seconds"] > case.train_share * TINY.train_s
        assert 0 <= summary[f"step.{case.name}.trainer_idle_share"] < 1
        assert -0.5 < summary[f"simulated.step.{case.name}.relative_difference"] < 2.0
    assert summary["step.sync.seconds"] > 2 * TINY.train_s
    assert summary["simulated.step.async_vs_sync"] > 1
    for mode in ("streaming", "async"):
        ratio = summary["step.sync.seconds"] / summary[f"step.{mode}.seconds"]
        assert summary[f"step.{mode}_vs_sync"] == pytest.approx(ratio)
    assert summary["step.sync.staleness_max"] == summary["step.streaming.staleness_max"] == 0
    assert summary["step.async.staleness_max"] == summary["step.async_streaming.staleness_max"] == 1
    ratio = summary["step.async_in_order.seconds"] / summary["step.async_streaming.seconds"]
    assert summary["step.async_streaming_vs_async"] == pytest.approx(ratio)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["case"]) for line in lines] == [
        (kind, case.name) for kind in ("measured", "simulated") for case in CASES
    ]
    assert all(len(line["times_s"]) == 3 for line in lines)
    assert "steps.png" in (tmp_path / "report.md").read_text() and (tmp_path / "steps.png").stat().st_size > 10_000
    assert main(["bench", "step", "--quick", "--out", str(tmp_path)]) == 2, "runs are never written over"


def test_the_trainer_is_as_slow_as_the_mean_generation() -> None:
    options = StepOptions(Path("unused"))
    config = steps.case_config(options, CASES[0])
    scripted = config.scripted
    latencies = np.array(
        [
            request_latency(base36(position), config.run.seed, scripted.latency_s, scripted.latency_sigma)
            for position in range(options.steps * options.prompts)
        ]
    ).reshape(options.steps, options.prompts)
    slowest = latencies.max(axis=1)[options.warm : options.warm + options.counted]
    trained = scripted.train_row_s * config.rows_per_step + scripted.train_step_s
    assert slowest.mean() == pytest.approx(trained) == pytest.approx(options.train_s)
    assert scripted.latency_sigma == 1.0
    others = [steps.case_config(options, case).model_dump(exclude={"run", "algorithm"}) for case in CASES[:3]]
    assert others[0] == others[1] == others[2]


def test_ratios_are_over_one_for_what_is_faster() -> None:
    def results(*step_s: float) -> list[ModeResult]:
        names = [case.name for case in CASES]
        return [ModeResult(name, (seconds,) * 4, 4.0, 0.0, 0.0, 0) for name, seconds in zip(names, step_s, strict=True)]

    summary = steps.summarise(results(3.0, 2.0, 1.5, 1.2, 1.0), results(3.0, 1.0, 1.5, 1.2, 1.0))
    assert summary["step.async_streaming_vs_async"] == pytest.approx(1.2)
    assert "step.async_streaming_vs_sync" not in summary
    assert summary["step.streaming_vs_sync"] == 1.5 and summary["simulated.step.streaming_vs_sync"] == 3.0
    assert summary["simulated.step.streaming.relative_difference"] == 1.0
    assert summary["step.async.trainer_idle_share"] == pytest.approx(1 / 3)
