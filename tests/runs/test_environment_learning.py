"""The examples of environments, verifiers and agents learn on three seeds: their rewards rise by more than chance."""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLES = runs.ROOT / "examples"
WINDOW = 20
EPISODES = 16
"""Number of episodes of a step of examples/agent."""
ENDPOINT = ("renderers", "openai", "uvicorn")


@dataclass(frozen=True)
class Example:
    """An example that trains, and what a test of it needs."""

    folder: str
    needs: tuple[str, ...] = ()
    """Packages that it imports, besides those of the core."""
    overrides: tuple[str, ...] = ()
    model: str = "agent"
    """Example that makes the tiny model which this one trains; "" if it makes none."""
    several_rows: bool = False
    """True if each episode of the example has more than one row."""


LEARNS = {
    "own": Example("own-environment", model=""),
    "verifiers": Example("verifiers", ("verifiers", *ENDPOINT)),
    "pydantic-ai": Example("agent", ("pydantic_ai", *ENDPOINT)),
    "smolagents": Example(
        "agent",
        ("smolagents", *ENDPOINT),
        ("environment.kind=rewriting_agent:play", "rollout.max_new_tokens=1536"),
        several_rows=True,
    ),
    "textarena": Example("textarena", ("textarena",), model="textarena"),
    "openenv": Example("openenv", ("openenv",), model="textarena"),
}
PYTHONS = {
    "verifiers": "HEADRACE_VERIFIERS_PYTHON",
    "textarena": "HEADRACE_GAMES_PYTHON",
    "openenv": "HEADRACE_GAMES_PYTHON",
}
"""Variables with the Python of a library that can have one of its own."""


def train(example: Example, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train an example, which is started as its first line says, and return the metrics of each step."""
    missing = [name for name in example.needs if importlib.util.find_spec(name) is None]
    for name in {*example.needs} & PYTHONS.keys():
        if python := os.environ.get(PYTHONS[name], ""):
            missing = [other for other in missing if other != name]
            overrides = (*overrides, f"environment.options.python={python}")
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; make test-all installs what these runs need")
    if example.model:
        model = folder / "model"
        subprocess.run([sys.executable, str(EXAMPLES / example.model / "make_model.py"), str(model)], check=True)
        overrides = (*overrides, f"model.path={model}")
    if example.folder == "openenv":
        command = Path(os.environ[PYTHONS["openenv"]]).with_name("openenv")
        subprocess.run([str(command), "init", "echo_env"], cwd=folder, check=True)
        overrides = (*overrides, f"environment.options.path=[{folder}]")
    command = [sys.executable, "-m", "headrace.cli", "train", "run.yaml", f"run.dir={folder / 'run'}"]
    overrides = (f"algorithm.steps={2 * WINDOW}", *example.overrides, *overrides)
    done = subprocess.run(
        [*command, *overrides],
        cwd=EXAMPLES / example.folder, env=runs.environment(), capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in runs.metrics(folder / "run") if "reward/mean" in line]


def rise(rewards: Sequence[float]) -> float:
    """Return by how many standard errors the mean reward of the last steps lies over that of the first."""
    assert len(rewards) >= 2 * WINDOW, rewards
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / WINDOW)
    return (statistics.mean(last) - statistics.mean(first)) / error


def risen(name: str, lines: Sequence[dict[str, float]], started: float) -> float:
    """Return `rise` of the rewards of a run, and print it with the run's time."""
    rewards = [line["reward/mean"] for line in lines]
    errors = rise(rewards)
    first, last = statistics.mean(rewards[:WINDOW]), statistics.mean(rewards[-WINDOW:])
    print(f"{name}: {first:.3f} -> {last:.3f}, {errors:.1f} standard errors, {time.monotonic() - started:.0f} s")
    return errors


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", LEARNS)
def test_an_example_learns(name: str, seed: int, tmp_path: Path) -> None:
    started = time.monotonic()
    lines = train(LEARNS[name], tmp_path, f"run.seed={seed}")
    assert risen(f"{name}, seed {seed}", lines, started) >= 3.0
    if LEARNS[name].several_rows:
        assert statistics.mean(line["train/sequences"] for line in lines) > 1.5 * EPISODES


@pytest.mark.parametrize("name", LEARNS)
def test_an_example_that_does_not_train_does_not_pass(name: str, tmp_path: Path) -> None:
    started = time.monotonic()
    lines = train(LEARNS[name], tmp_path, "trainer.lr=0")
    assert risen(f"{name}, lr 0", lines, started) < 3.0
