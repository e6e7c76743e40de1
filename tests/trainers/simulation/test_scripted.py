"""Tests simulations of runs on the scripted engine and backend, with their own latencies and measured overheads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.scripted import request_latency
from headrace.actors.rollout.prompts import base36
from headrace.trainers.config.load import build_config
from headrace.trainers.simulation.config import SimulationConfig
from headrace.trainers.simulation.scenario import DIRECTORY_S, Scenario, build_scenario, measure_run
from headrace.trainers.simulation.simulate import simulate

STEPS, PROMPTS, ROWS = 12, 8, 2
CONFIG = build_config(
    {
        "run": {"seed": 5},
        "algorithm": {"steps": STEPS, "prompts_per_step": PROMPTS, "group_size": ROWS},
        "rollout": {"engine": "scripted", "max_batch": 4},
        "trainer": {"backend": "scripted"},
        "sync": {"in_flight": "keep"},
        "scripted": {"latency_s": 2.0, "latency_sigma": 1.0, "train_row_s": 0.5, "train_step_s": 1.0},
    }
)
LATENCIES = np.array([request_latency(base36(at), 5, 2.0, 1.0) for at in range(STEPS * PROMPTS)]).reshape(STEPS, -1)
BARE: dict[str, Any] = dict.fromkeys(("call_s", "put_bytes", "got_bytes", "sync_s", *DIRECTORY_S), 0.0)
TRAIN_S = PROMPTS * ROWS * 0.5 + 1.0


def test_groups_take_the_engines_latencies_whatever_else_it_does() -> None:
    run = simulate(build_scenario(CONFIG, SimulationConfig(**BARE), {}), "sync")
    assert [step.seconds for step in run.steps] == pytest.approx((LATENCIES.max(axis=1) + TRAIN_S).tolist())
    assert [step.trainer_busy_s for step in run.steps] == pytest.approx([TRAIN_S] * STEPS)


def test_streaming_trains_on_chunks_of_what_is_ready() -> None:
    """The trainer takes chunks of exactly `chunk_groups` groups, as the controller does. The default is a quarter of a
    step."""
    run = simulate(build_scenario(CONFIG, SimulationConfig(**BARE), {}), "streaming")
    for step, latencies in zip(run.steps, LATENCIES, strict=True):
        at = 0.0
        for chunk in np.sort(latencies).reshape(4, -1):
            at = max(at, chunk[-1]) + len(chunk) * ROWS * 0.5
        assert step.seconds == pytest.approx(at + 1.0)


def test_async_replaces_groups_that_grow_too_old_while_they_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one prompt per step and two in flight, a very slow prompt is replaced once it is too old."""
    latencies = np.full(60, 1.0)
    latencies[0] = 1000.0
    monkeypatch.setattr(Scenario, "draw_latencies", lambda _, num_prompts: latencies[:num_prompts])
    section = SimulationConfig(**BARE, sampler="ready_first", train_row_s=0.5, train_step_s=0.0)
    case = replace(build_scenario(CONFIG, section, {}), prompts_per_step=1)
    run = simulate(case, "async")
    assert [step.seconds for step in run.steps] == pytest.approx([2.0] * 3 + [1.0] * (STEPS - 3))
    assert run.dropped == 0 and run.in_flight >= 1, "it is still being generated"


def test_what_a_sync_run_took_besides_is_found_again(tmp_path: Path) -> None:
    """From a run's metrics with known overheads, the simulation recovers the overheads and the run's step times."""
    claim_s, wait_s, put_s, plan_s, calls_s, sync_s, rest_s = 0.01, 0.01, 0.04, 0.02, 0.03, 0.25, 0.05
    records = [
        {
            "step": number + 1, "rollout/response_length_mean": 8.0, "rollout/response_length_max": 30.0,
            "time/rollout_s": latencies.max() + put_s + claim_s, "time/plan_s": plan_s,
            "time/train_s": TRAIN_S + wait_s + calls_s, "time/data_wait_s": wait_s, "time/sync_s": sync_s,
            "sync/pause_s": 0.001,
            "time/step_s": latencies.max() + TRAIN_S + sum((claim_s, wait_s, put_s, plan_s, calls_s, sync_s, rest_s)),
        }
        for number, latencies in enumerate(LATENCIES)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    measured = measure_run(tmp_path, CONFIG, SimulationConfig())
    expected = {
        "chunk_s": calls_s / 2, "train_step_s": 1.0 + calls_s / 2, "plan_s": plan_s, "call_s": wait_s,
        "sync_s": sync_s, "controller_s": rest_s, "train_token_s": 0.0,
    }  # fmt: skip
    assert {name: measured[name] for name in expected} == pytest.approx(expected)
    again = simulate(build_scenario(CONFIG, SimulationConfig(), measured), "sync")
    for step, record in zip(again.steps, records, strict=True):
        assert step.seconds == pytest.approx(record["time/step_s"], rel=1e-4)
