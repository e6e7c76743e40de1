"""Whole runs on GPUs: in each layout the figures are right, and they continue after kills of every kind.

    pytest -m gpu tests/runs/test_gpu_runs.py

The runs are those of the quickstart's tiny model with vLLM. A test is skipped where there are fewer GPUs than it needs.
The same functions run on a CPU with the engine `hf`, as `slow` tests.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.gpu.nvml import visible_gpus
from headrace.bench.gpu.works import CPU, Layout
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_healing import kill
from headrace.tests.runs.test_journal_resume import kill_all
from headrace.trainers.grpo.checkpoints import Checkpoints

ROWS = 8 * 8
EXACT, HALF = (2e-3, 5e-2), (3e-2, 0.5)
"""Largest mean and largest single difference between the log-probs of trainer and engine in a step, for float32 and
bfloat16. With another version of the weights the mean is over 0.1."""
FLOAT32 = ("model.dtype=float32",)
BFLOAT16 = ("model.dtype=bfloat16", "trainer.mixed_precision=true", "trainer.packing=packed")
MEGATRON = ("trainer.backend=megatron", "trainer.packing=packed")


@dataclass(frozen=True)
class Place:
    """Where a run's engines and train ranks stand, and its other settings."""

    layout: Layout
    overrides: tuple[str, ...] = FLOAT32
    bounds: tuple[float, float] = EXACT

    def settings(self, *, own_ray: bool = False) -> list[str]:
        """The overrides of a run. A run on a CPU joins this process's Ray, unless it needs its own."""
        engine = ["rollout.engine=vllm"]
        if self.layout.name == CPU:
            engine = ["rollout.engine=hf"] if own_ray else ["rollout.engine=hf", runs.shared_ray()]
        return [*engine, "validation.every=0", *self.layout.overrides(), *self.overrides]


def colocated(gpus: int) -> Layout:
    return Layout(f"colocated-{gpus}", "colocated", gpus)


PLACES = {
    "cpu": Place(Layout(CPU, CPU, 0)),
    "one GPU": Place(colocated(1)),
    "one GPU, bfloat16": Place(colocated(1), BFLOAT16, HALF),
    "one GPU, megatron": Place(colocated(1), (*FLOAT32, *MEGATRON)),
    "one GPU, by turns": Place(colocated(1), (*FLOAT32, "resources.switch_roles=always")),
    "one GPU, megatron, by turns": Place(colocated(1), (*FLOAT32, *MEGATRON, "resources.switch_roles=always")),
    "two GPUs": Place(colocated(2)),
    "two GPUs, by turns": Place(colocated(2), (*FLOAT32, "resources.switch_roles=always")),
    "two GPUs, apart": Place(Layout("separate-2", "separate", 2)),
    "two GPUs, both roles tp 2": Place(Layout("tensor-2", "tensor", 2)),
    "two GPUs, apart by a map": Place(
        Layout("separate-by-map", "one-engine", 2), (*FLOAT32, "trainer.dp=1", "resources.trainer_gpus=[1]")
    ),
    "two GPUs, an engine of two": Place(colocated(2), (*FLOAT32, "rollout.num_engines=1", "rollout.tp=2")),
    "two GPUs, one engine": Place(Layout("one-engine-2", "one-engine", 2)),
    "four GPUs, apart": Place(Layout("separate-4", "separate", 4)),
}


def places(*names: str) -> pytest.MarkDecorator:
    """The parameter `place`. Those on GPUs run with `-m gpu` alone, that on the CPU with the slow tests."""
    parameters = []
    for name in names:
        marks = [pytest.mark.gpu, pytest.mark.vllm] if name != "cpu" else [pytest.mark.processes, pytest.mark.slow]
        marks += [pytest.mark.megatron] if "megatron" in name else []
        parameters.append(pytest.param(PLACES[name], marks=marks, id=name))
    return pytest.mark.parametrize("place", parameters)


@pytest.fixture(autouse=True)
def only_its_gpus(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run sees as many GPUs as its place has; the test is skipped where there are fewer."""
    gpus, found = place.layout.gpus, torch.cuda.device_count()
    if found < gpus:
        pytest.skip(f"needs {gpus} GPUs, this machine has {found}")
    if gpus:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(visible_gpus(gpus)))


def check(steps: list[dict[str, Any]], place: Place) -> None:
    """Every step trained on all of its rows, and engine and trainer had the same weights."""
    assert steps
    mean, largest = place.bounds
    for step in steps:
        assert step["train/sequences"] == ROWS and step["rollout/failed_rows"] == 0 == step["train/skipped"], step
        assert step["logprob/mismatch_mean"] <= mean and step["logprob/mismatch_max"] <= largest, step
        assert math.isfinite(step["train/loss"]) and 0 < step["train/grad_norm"] < 100, step
        assert step["staleness/max"] == 0 and step["dataplane/leased_rows"] == 0, step


@pytest.mark.timeout(600)
@places(*PLACES)
def test_figures_are_right_wherever_the_roles_stand(place: Place, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = runs.start(run_dir, *place.settings(), "algorithm.steps=8", "validation.every=8")
    output = runs.succeed(process, timeout_s=500)
    steps = runs.steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, 9)), output
    check(steps, place)
    assert [step["policy/version"] for step in steps] == list(range(1, 9))
    if place.layout.gpus:
        assert ("GPUs: separate, " in output) == place.layout.label.startswith("separate")
    engines = dict(setting.split("=", 1) for setting in place.settings()).get("rollout.num_engines", "1")
    assert all(step["sync/engines"] == int(engines) and step["sync/bytes"] > 0 for step in steps)
    assert not runs.shared_memory(run_dir)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["engine 0", "train worker 0"])
@places("cpu", "one GPU", "one GPU, by turns", "two GPUs")
def test_figures_go_on_after_the_kill_of_a_role(place: Place, name: str, tmp_path: Path) -> None:
    """The engine is replaced by one that gets the newest weights; train workers go back to the last checkpoint."""
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir, *place.settings(), "rollout.num_actors=1", "algorithm.steps=30", "run.checkpoint_every=3"
    )
    runs.wait_for_step(run_dir, 5, process, timeout_s=400)
    kill(run_dir, name)
    output = runs.succeed(process, timeout_s=400)
    steps = runs.steps_of(run_dir)
    check(steps, place)
    assert steps[-1]["step"] == 30 and f"{name}" in output
    if name == "engine 0":
        assert [step["step"] for step in steps] == list(range(1, 31)), "no step was made twice"
        assert steps[-1]["rollout/actors_replaced"] == 1
    else:
        [resumed] = [line for line in runs.metrics(run_dir) if line.get("event") == "resumed"]
        assert resumed["step"] >= 3 and steps[-1]["run/restarts"] == 1
    assert not runs.shared_memory(run_dir)


@pytest.mark.timeout(900)
@places("cpu", "one GPU", "one GPU, megatron", "one GPU, by turns", "two GPUs")
def test_figures_go_on_after_the_kill_of_the_whole_run(place: Place, tmp_path: Path) -> None:
    """Steps that are taken again are the same ones, from the groups that were kept; then new ones follow."""
    run_dir = tmp_path / "run"
    options = (*place.settings(own_ray=True), "run.checkpoint_every=4")
    process = runs.start(run_dir, *options, "algorithm.steps=100000")
    runs.wait_for_step(run_dir, 6, process, timeout_s=400)
    kill_all(process, run_dir)
    before = {step["step"]: step for step in runs.steps_of(run_dir)}
    whole = Checkpoints(run_dir / "checkpoints").latest_state().step
    assert whole in (due := max(before) // 4 * 4, due - 4), "the next checkpoint waits until the one before is complete"
    last = max(before) + 3
    runs.succeed(runs.start(run_dir, *options, f"algorithm.steps={last}", "--resume"), timeout_s=400)
    lines = runs.metrics(run_dir)
    [at] = [index for index, line in enumerate(lines) if line.get("event") == "resumed"]
    after = [line for line in lines[at:] if "reward/mean" in line]
    first = lines[at]["step"]
    assert first == whole and [step["step"] for step in after] == list(range(first + 1, last + 1))
    check(after, place)
    for step in after:
        if step["step"] in before:
            assert step["rollout/restored_rows"] == ROWS, "generated again"
            assert step["reward/mean"] == pytest.approx(before[step["step"]]["reward/mean"], rel=1e-6)
            assert step["train/grad_norm"] == pytest.approx(before[step["step"]]["train/grad_norm"], rel=0.05)


@pytest.mark.timeout(900)
@places("one GPU")
def test_the_benchmark_of_the_tiny_work_runs(place: Place, tmp_path: Path) -> None:
    """`headrace bench gpu` with vLLM on a GPU; the same command on a CPU is in tests/bench/gpu."""
    out = tmp_path / "out"
    command = ["headrace.cli", "bench", "gpu", "--work", "grpo-tiny", "--layout", place.layout.label, "--out", str(out)]
    output = runs.succeed(runs.start_command(command, tmp_path), timeout_s=600)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["gpu.grpo-tiny.colocated-1.step_s"] > 0, output
    notes = summary["conditions"]["notes"]
    assert notes or 0 <= summary["gpu.grpo-tiny.colocated-1.idle_share.0"] <= 1
