"""The examples of environments, verifiers and agents learn on three seeds: their rewards rise by more than chance."""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLES = runs.ROOT / "examples"
WINDOW = 20
NEEDS = {
    "own-environment": (),
    "verifiers": ("verifiers", "renderers", "openai", "uvicorn"),
    "agent": ("pydantic_ai", "renderers", "openai", "uvicorn"),
}
"""Packages that an example needs. verifiers may be that of another Python, HEADRACE_VERIFIERS_PYTHON."""


def rewards_of(example: str, folder: Path, *overrides: str) -> list[float]:
    """The mean reward of each step of an example, which is started as its first line says."""
    missing = [name for name in NEEDS[example] if importlib.util.find_spec(name) is None]
    other = os.environ.get("HEADRACE_VERIFIERS_PYTHON", "")
    if other and "verifiers" in missing:
        missing.remove("verifiers")
        overrides = (*overrides, f"environment.options.python={other}")
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    if example != "own-environment":
        model = folder / "tiny-chat-model"
        subprocess.run([sys.executable, str(EXAMPLES / "agent" / "make_model.py"), str(model)], check=True)
        overrides = (*overrides, f"model.path={model}")
    command = [sys.executable, "-m", "headrace.cli", "train", "run.yaml", f"run.dir={folder / 'run'}", *overrides]
    done = subprocess.run(
        command, cwd=EXAMPLES / example, env=runs.environment(), capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line["reward/mean"] for line in runs.metrics(folder / "run") if "reward/mean" in line]


def has_risen(rewards: list[float]) -> bool:
    """Whether the mean of the last steps lies at least three standard errors over that of the first."""
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / WINDOW)
    return statistics.mean(last) - statistics.mean(first) >= 3 * error


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("example", NEEDS)
def test_an_example_learns(example: str, seed: int, tmp_path: Path) -> None:
    rewards = rewards_of(example, tmp_path, f"run.seed={seed}")
    assert len(rewards) >= 2 * WINDOW and has_risen(rewards), rewards


@pytest.mark.parametrize("example", NEEDS)
def test_an_example_that_does_not_train_does_not_pass(example: str, tmp_path: Path) -> None:
    rewards = rewards_of(example, tmp_path, "trainer.lr=1e-12", "algorithm.steps=40")
    assert len(rewards) >= 2 * WINDOW and not has_risen(rewards), rewards
