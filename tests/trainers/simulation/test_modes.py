"""Tests the files and the summary of `run_simulation`, scenarios from a measured run, and users' mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.simulation.config import SimulationConfig
from headrace.trainers.simulation.modes import SimulateOptions, run_simulation, simulation_table
from headrace.trainers.simulation.scenario import MODES, build_scenario, measure_run, sigma_of
from headrace.trainers.simulation.simulate import simulate

CONFIG = build_config({"algorithm": {"steps": 6, "prompts_per_step": 8, "group_size": 4}, "run": {"seed": 3}})
SECTION = SimulationConfig(response_tokens=50, response_sigma=1.0, train_token_s=1e-3, sync_s=0.5, prompt_tokens=10)


def test_summary_files_and_table_agree(tmp_path: Path) -> None:
    options = SimulateOptions(SECTION, gpus=(4,))
    summary = run_simulation(CONFIG, options, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    conditions = written.pop("conditions")
    assert written == summary and conditions["scenario"]["response_tokens"] == 50
    for mode in MODES:
        for name in ("seconds", "trainer_idle_share", "engine_idle_share", "staleness_max"):
            assert 0 <= summary[f"simulate.{mode}.{name}"] < 1e4
    assert summary["simulate.async_vs_sync"] == pytest.approx(
        summary["simulate.sync.seconds"] / summary["simulate.async.seconds"]
    )
    assert summary["simulate.sync.staleness_max"] == summary["simulate.streaming.staleness_max"] == 0
    assert summary["simulate.gpus4.sync.seconds"] < summary["simulate.sync.seconds"]
    steps = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 2 * len(MODES) * 6
    sync = [line for line in steps if line["run"] == "simulate" and line["mode"] == "sync"]
    busy = sum(line["trainer_busy_s"] for line in sync[1:]) / sum(line["seconds"] for line in sync[1:])
    assert summary["simulate.sync.trainer_idle_share"] == pytest.approx(1 - busy)
    depth = [json.loads(line) for line in (tmp_path / "out" / "depth.jsonl").read_text().splitlines()]
    assert {line["mode"] for line in depth} == set(MODES)
    console = Console(width=200, record=True, quiet=True)
    console.print(simulation_table(summary))
    assert simulation_table(summary).row_count == 2 * len(MODES)
    assert run_simulation(CONFIG, options, tmp_path / "again") == summary


def test_figures_of_a_run_stand_in_for_what_is_left_open(tmp_path: Path) -> None:
    """A scenario measured from the metrics of a simulated run takes as long as that run."""
    sizes = {"steps": 12, "prompts_per_step": 32, "group_size": 8}
    config = build_config({"algorithm": sizes, "rollout": {"max_new_tokens": 4000, "max_batch": 512}})
    truth = build_scenario(config, SECTION, {})
    calls_s = truth.directory_groups_s(32) + truth.directory_claim_s
    lengths = truth.draw_lengths(12 * 32).reshape(12, -1)
    records = [
        {
            "step": number + 1, "rollout/response_length_mean": float(of_step.mean()),
            "rollout/response_length_max": float(of_step.max()),
            "time/rollout_s": float(of_step.max()) * truth.decode_s + calls_s,
            "time/step_s": float(of_step.max()) * truth.decode_s + calls_s
            + (float(of_step.sum()) + 256 * 10) * 1e-3 + 1.75,
            "time/train_s": (float(of_step.sum()) + 256 * 10) * 1e-3 + 0.25, "time/data_wait_s": 0.25,
            "time/logprob_s": 0.0, "time/sync_s": 0.5, "sync/pause_s": 0.1,
        }
        for number, of_step in enumerate(lengths)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    open_section = SimulationConfig(prompt_tokens=10)
    measured = measure_run(tmp_path, config, open_section)
    assert measured["decode_s"] == pytest.approx(truth.decode_s)
    assert measured["train_token_s"] == pytest.approx(1e-3, rel=0.05)
    assert measured["controller_s"] == pytest.approx(1.0)
    assert (measured["sync_s"], measured["pause_s"]) == (0.5, 0.1)
    assert measured["response_sigma"] == pytest.approx(1.0, abs=0.2)
    again = build_scenario(config, open_section, measured)
    expected = np.mean([step.seconds for step in simulate(truth, "sync").steps])
    assert np.mean([step.seconds for step in simulate(again, "sync").steps]) == pytest.approx(1.0 + expected, rel=0.15)
    given = build_scenario(config, SimulationConfig(decode_s=1.0), measured)
    assert given.decode_s == 1.0, "the section is over what was measured"


def test_sigma_from_the_longest_of_many() -> None:
    rng = np.random.default_rng(0)
    for sigma in (0.0, 0.5, 1.0):
        draws = np.exp(sigma * rng.standard_normal((200, 256)))
        found = [sigma_of(float(draw.mean()), float(draw.max()), 256) for draw in draws]
        assert np.median(found) == pytest.approx(sigma, abs=0.15)


def test_more_gpus_are_more_engines_and_a_faster_trainer() -> None:
    section = SimulationConfig(gpus=8, num_engines=2, train_token_s=1e-3, scaling_efficiency=0.9, batch_grows=True)
    base = build_scenario(CONFIG, section, {})
    large = base.scaled(section, 32)
    assert (large.num_engines, large.prompts_per_step) == (8, 32)
    assert large.train_token_s == pytest.approx(1e-3 / (4 * 0.9**2))
    assert base.scaled(section, 8) == base


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (SimulationConfig(engine_rows=3), "engine_rows: got 3, expected room for a group of 4"),
        (SimulationConfig(sync_s=1.0, pause_s=2.0), "pause_s: got 2, expected at most sync_s=1"),
    ],
)
def test_what_cannot_be_simulated_is_told(section: SimulationConfig, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        run_simulation(CONFIG, SimulateOptions(section), tmp_path)


def test_a_folder_without_figures_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics.jsonl"):
        run_simulation(Config(), SimulateOptions(from_run=tmp_path), tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/reward": 0.5}\n')
    with pytest.raises(UserError, match="has no step"):
        run_simulation(Config(), SimulateOptions(from_run=tmp_path), tmp_path)
    with pytest.raises(UserError, match="gpus"):
        run_simulation(Config(), SimulateOptions(gpus=(0,)), tmp_path)
