"""Runs that share the GPUs of a pool: both finish, lose no token, have the figures of their runs alone, and survive
the deaths of others."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.pool_runs import SCRIPTED, SharedPool, shared_pool
from headrace.tests.runs.test_end_to_end import steps_of
from headrace.tests.runs.test_healing import kill
from headrace.tests.runs.test_switch_roles import figures

pytestmark = pytest.mark.processes

STEPS = 6
SLOW = (*SCRIPTED, f"algorithm.steps={STEPS}", "scripted.latency_s=0.3", "scripted.train_step_s=0.3")


def expect_whole(run_dir: Path, steps: int = STEPS) -> list[dict]:
    """Expect that a run made all its steps, each with all of its samples, and lost no token."""
    done = steps_of(run_dir)
    assert [step["step"] for step in done] == list(range(1, steps + 1))
    assert all(step["rollout/failed_rows"] == 0 and step["train/sequences"] == 64 for step in done)
    assert done[-1]["pool/lost_tokens"] == 0 and max(step["staleness/max"] for step in done) <= 1
    return done


@pytest.mark.timeout(400)
def test_two_runs_share_two_gpus(tmp_path: Path) -> None:
    with shared_pool(tmp_path) as pool, ThreadPoolExecutor() as threads:
        for done in [threads.submit(pool.run, "a", 0, *SLOW), threads.submit(pool.run, "b", 1, *SLOW)]:
            code, output = done.result()
            assert code == 0, output
        pool.wait_until_empty()
    pool.expect_kept_rules()
    for name in "ab":
        last = expect_whole(tmp_path / name)[-1]
        assert last["pool/resizes"] >= 2 * STEPS - 1, "its own engine sleeps whenever it trains"
        assert last["pool/moved_requests"] > 0 and last["pool/kept_tokens"] > 0


@pytest.mark.timeout(400)
def test_a_tenant_has_the_figures_of_its_run_alone(tmp_path: Path) -> None:
    """Its rows, its losses and its weights are those of the run with the same seed that has its GPUs to itself."""
    asked = (
        "run.deterministic=true", "rollout.engine=hf", "trainer.lr=0.01", "algorithm.steps=3", "validation.every=0",
        "algorithm.mode=async", "rollout.num_engines=2", "rollout.num_actors=1",
    )  # fmt: skip
    with shared_pool(tmp_path) as pool, ThreadPoolExecutor() as threads:
        tenant = threads.submit(pool.run, "a", 0, *asked)
        beside = threads.submit(pool.run, "b", 1, *SLOW)
        code, output = runs.run(tmp_path / "alone", *asked)
        assert code == 0, output
        for done in (tenant, beside):
            code, output = done.result()
            assert code == 0, output
    pool.expect_kept_rules()
    alone, shared = steps_of(tmp_path / "alone"), steps_of(tmp_path / "a")
    assert len(alone) == 3
    for line, expected in zip(shared, alone, strict=True):
        wanted = {key: value for key, value in figures(expected).items() if key not in DECIDED_BY_TIMING}
        assert {key: line[key] for key in wanted} == wanted
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("alone", "a")]
    assert models[0] == models[1]


DECIDED_BY_TIMING = ("sync/engines", "sync/bytes", "sync/gathers", "sync/kept_requests")
"""Figures about the engines that happen to be awake at a sync."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["driver", "engine 0", "train worker 0", "pool"])
def test_a_death_costs_the_other_tenant_nothing(tmp_path: Path, victim: str) -> None:
    more = (*SLOW, "algorithm.steps=12", "run.checkpoint_every=2")
    with shared_pool(tmp_path) as pool:
        first, second = pool.start("a", 0, *more), pool.start("b", 1, *more)
        runs.wait_for_step(tmp_path / "a", 2, first)
        runs.wait_for_step(tmp_path / "b", 2, second)
        _kill(pool, tmp_path / "a", first.pid, victim)
        if victim == "driver":
            first.communicate(timeout=60)
        else:
            runs.succeed(first)
            expect_made(tmp_path / "a", 12)
        runs.succeed(second)
        expect_whole(tmp_path / "b", 12)
        pool.wait_until_empty()
        assert not pool.suspects
    pool.expect_kept_rules()


def expect_made(run_dir: Path, steps: int) -> None:
    """Expect that a run made all its steps, some of them perhaps twice."""
    assert {step["step"] for step in steps_of(run_dir)} == set(range(1, steps + 1))


def _kill(pool: SharedPool, run_dir: Path, driver: int, victim: str) -> None:
    """kill -9 of one of the processes of the pool and of a tenant."""
    if victim == "pool":
        os.kill(pool.client.status().pid, signal.SIGKILL)
    elif victim == "driver":
        os.kill(driver, signal.SIGKILL)
    else:
        kill(run_dir, victim)
