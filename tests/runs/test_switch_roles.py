"""Runs whose engines and trainer take turns in memory: the figures of a run without turns, deaths, an interrupt."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs import pool_runs
from headrace.tests.runs.test_healing import kill

pytestmark = pytest.mark.processes

TURNS = "resources.switch_roles=always"
SCRIPTED = (*pool_runs.SCRIPTED[:-1], "validation.metric=val/reward")
TIMES = ("_s", "_ms", "_gib", "/seconds", "bytes_per_row", "fixed_us", "gb_per_s", "tokens_per_s", "tflops", "mfu")
TIMED = {
    f"dataplane/{name}" for name in ("calls", "put/calls", "claim/calls", "status/calls", "bytes_put", "put/bytes")
}
"""Counts that timing decides: groups that end together are put together, which saves bytes, and a claim that has waited
for a second is made again, after a look at the status. With two engines, groups do not always end in the same
company."""


def figures(line: dict[str, Any]) -> dict[str, Any]:
    """What a step's line says, without times, memory, what only a switch has and what timing decides."""
    shown = {
        key: value
        for key, value in line.items()
        if not key.endswith(TIMES)
        and not key.startswith(("idle/", "engine/idle", "switch/", "memory/"))
        and key not in TIMED
    }
    assert len(shown) > 30
    # Rewards are added up in the order in which groups end, which shows in the last digit of a mean.
    return {
        key: pytest.approx(value, rel=1e-12) if key.startswith("reward/") else value for key, value in shown.items()
    }


def compare(folder: Path, *overrides: str) -> None:
    """Train with and without turns, and expect the same figures and the same bytes of the model."""
    asked = ("run.deterministic=true", "algorithm.steps=3", "run.checkpoint_every=2", *overrides)
    runs.run_each(folder, {"never": [*asked, "resources.switch_roles=never"], "always": [*asked, TURNS]})
    alone, turns = (runs.steps_of(folder / name) for name in ("never", "always"))
    for line, expected in zip(turns, alone, strict=True):
        assert {key: line[key] for key in figures(line)} == figures(expected)
    assert not [key for line in alone for key in line if "switch" in key]
    for line in turns:
        parts = sum(line[f"time/{stage}_s"] for stage in ("rollout", "plan", "logprob", "train", "sync", "switch"))
        assert 0 < line["time/switch_s"] <= parts <= line["time/step_s"]
        assert line["switch/engine_gib_asleep"] > 0 and line["switch/trainer_gib_offloaded"] > 0
    models = [(folder / name / "model" / "model.safetensors").read_bytes() for name in ("never", "always")]
    assert models[0] == models[1]


@pytest.mark.timeout(400)
def test_a_run_with_turns_is_the_run_without_them(tmp_path: Path) -> None:
    compare(tmp_path, *SCRIPTED, "validation.every=2", "trainer.dp=2", "rollout.num_engines=2")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.lr=0.01", "validation.every=1", "run.keep_best=true", "validation.metric=val/reward"),
        ("trainer.lr=0.01", "trainer.dp=2", "rollout.num_engines=2", "rollout.num_actors=1", "loss.kl_coef=0.01"),
        ("trainer.lr=0.01", "sync.transport=collective", "sync.cache=true", "validation.every=0"),
    ],
)  # fmt: skip
def test_a_model_is_trained_alike_with_turns(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    compare(tmp_path, "rollout.engine=hf", *overrides)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["rollout 1", "train worker 1", "engine 0"])
def test_whoever_dies_is_replaced_and_every_step_is_made(tmp_path: Path, target: str) -> None:
    run_dir, steps = tmp_path / "run", 30
    more = ("rollout.num_actors=2", "rollout.num_engines=1") if target == "engine 0" else ("rollout.num_engines=2",)
    process = runs.start(
        run_dir, runs.shared_ray(), *SCRIPTED, TURNS, *more, "trainer.dp=2", f"algorithm.steps={steps}",
        "validation.every=0", "run.checkpoint_every=3", "scripted.latency_s=0.05", "scripted.train_step_s=0.2",
    )  # fmt: skip
    runs.wait_for_step(run_dir, 4, process)
    kill(run_dir, target)
    output = runs.succeed(process)
    done = runs.steps_of(run_dir)
    assert done[-1]["step"] == steps and {line["step"] for line in done} == set(range(1, steps + 1)), output
    replaced = done[-1]["rollout/actors_replaced"] + done[-1]["run/restarts"]
    assert replaced == 1 and target in output
    assert all(line["rollout/failed_rows"] == 0 and line["train/sequences"] == 64 for line in done)
    assert done[-1]["sync/engines"] == (1 if target == "engine 0" else 2)
    assert not runs.shared_memory(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("busy", ["scripted.latency_s=2.0", "scripted.train_step_s=2.0"])
def test_an_interrupt_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path: Path, busy: str) -> None:
    """While the engines generate, or while they sleep and the optimizer steps."""
    run_dir = tmp_path / "run"
    overrides = (*SCRIPTED, TURNS, "validation.every=0", "algorithm.steps=4", busy)
    process = runs.start(run_dir, runs.shared_ray(), *overrides)
    runs.wait_for_step(run_dir, 2, process)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode != 0 and "interrupted" in output, output
    assert runs.trained(run_dir, *overrides, "--resume")[-1]["step"] == 4
    assert not runs.shared_memory(run_dir)
