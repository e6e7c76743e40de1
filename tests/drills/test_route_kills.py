"""The drill of router replay: a run with routes that is killed at random moments and resumed repeats its figures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.tests.drills.test_kill_drill import FIGURES, figures_of
from headrace.tests.drills.test_random_kills import wait_for_a_moment
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_journal_resume import kill_all

pytestmark = pytest.mark.drill

ROUTED = (
    "model.path=builtin:tiny-qwen3-moe",
    "router_replay.enabled=true",
    "router_replay.verify=forward",
    "router_replay.native_agreement_every=1",
    "trainer.moe.aux_loss_coef=0.01",
    "algorithm.mode=async",
    "run.deterministic=true",
    "run.checkpoint_every=4",
    "rollout.num_engines=2",
    "validation.every=0",
)
ROUTE_FIGURES = (*FIGURES, "routes/native_agreement", "logprob/mismatch_mean", "moe/aux_loss", "moe/load_imbalance")


@pytest.mark.timeout(9000)
@pytest.mark.parametrize(("kills", "steps"), [(2, 16), (10, 60)])
def test_a_killed_run_repeats_its_figures_and_its_routes(tmp_path: Path, kills: int, steps: int) -> None:
    settings = (*ROUTED, f"algorithm.steps={steps}")
    code, output = runs.run(tmp_path / "whole", *settings, timeout_s=2400)
    assert code == 0, output
    expected = figures_of(tmp_path / "whole", ROUTE_FIGURES)
    assert list(expected) == list(range(1, steps + 1))
    dice, run_dir = random.Random(19), tmp_path / "run"
    process = runs.start(run_dir, *settings)
    for number in range(kills):
        wait_for_a_moment(run_dir, process, dice, number)
        kill_all(process, run_dir)
        process = runs.start(run_dir, *settings, "--resume")
    runs.succeed(process, timeout_s=2400)
    found = figures_of(run_dir, ROUTE_FIGURES)
    assert list(found) == list(expected)
    for step, figures in expected.items():
        assert found[step] == pytest.approx(figures, rel=1e-6), f"step {step}"
    counted = [line for line in runs.metrics(run_dir) if "routes/missing_share" in line]
    assert counted and all(line["routes/missing_share"] == 0 for line in counted)
    assert not runs.shared_memory(run_dir)
