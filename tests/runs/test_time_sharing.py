"""Runs that share the GPUs of a pool: both finish, lose no token, have the figures of their runs alone, and survive
the deaths of others."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
def test_a_tenant_has_the_figures_of_its_run_alone(tmp_path: Path) -> None:
    """Its rows, its losses and its weights are those of the run with the same seed that has its GPUs to itself. The
    other tenant, whose requests are cut off in the middle, loses no token."""
    asked = (
        "run.deterministic=true", "rollout.engine=hf", "trainer.lr=0.01", "algorithm.steps=3", "validation.every=0",
        "algorithm.mode=async", "rollout.num_engines=2", "rollout.num_actors=1",
    )  # fmt: skip
    with shared_pool(tmp_path) as pool, ThreadPoolExecutor() as threads:
        runs_beside = [threads.submit(pool.run, "a", 0, *asked), threads.submit(pool.run, "b", 1, *SLOW)]
        for done in (threads.submit(runs.run, tmp_path / "alone", *asked), *runs_beside):
            code, output = done.result()
            assert code == 0, output
        pool.wait_until_empty()
    pool.expect_kept_rules()
    alone, shared = steps_of(tmp_path / "alone"), steps_of(tmp_path / "a")
    assert len(alone) == 3
    for line, expected in zip(shared, alone, strict=True):
        wanted = {key: value for key, value in figures(expected).items() if not key.startswith(DECIDED_BY_TIMING)}
        assert len(wanted) > 25 and {key: line[key] for key in wanted} == wanted
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("alone", "a")]
    assert models[0] == models[1]
    last = expect_whole(tmp_path / "b")[-1]
    # Two trainings in a row without a wake between are right, too: the next step's groups may be ready already.
    assert pool.grants("b", "train") >= STEPS and pool.grants("b", "rollout") > 2, "its engines slept and woke again"
    assert last["pool/moved_requests"] > 0


DECIDED_BY_TIMING = ("sync/", "queue/", "dataplane/", "driver/")
"""First parts of the keys of figures about the engines that happen to be awake, and about calls of the driver."""


DEATHS = {"pool": None, "engine 0": "rollout/actors_replaced", "train worker 0": "run/restarts", "driver": None}
"""Victim -> key of the figure that counts its death in its own run."""


@pytest.mark.timeout(900)
def test_deaths_in_one_tenant_and_of_the_pool_cost_the_other_nothing(tmp_path: Path) -> None:
    more = (*SCRIPTED, "scripted.latency_s=0.3", "scripted.train_step_s=0.1", "run.checkpoint_every=1")
    with shared_pool(tmp_path) as pool, ThreadPoolExecutor() as threads:
        both = [threads.submit(pool.run, name, gpu, *more, "algorithm.steps=500") for gpu, name in enumerate("ab")]
        step = 0
        for victim, count in DEATHS.items():
            for name, running in zip("ab", both, strict=True):
                _wait_for_step(tmp_path / name, step + 2, running)
            step = steps_of(tmp_path / "a")[-1]["step"]
            _kill(pool, tmp_path / "a", victim)
            if count is not None:  # an engine that dies asleep is replaced when the pool next orders it to wake
                step = _wait_for(tmp_path / "a", lambda line, count=count: line.get(count) == 1, both[0])
            assert not pool.suspects
        pool.wait_until_left("a")
        _wait_for_step(tmp_path / "b", steps_of(tmp_path / "b")[-1]["step"] + 3, both[1])
        os.kill(pool.driver("b"), signal.SIGINT)
        pool.wait_until_empty()
    pool.expect_kept_rules()
    steps = [line for line in runs.metrics(tmp_path / "a") if "reward/mean" in line]
    assert {line["step"] for line in steps} >= set(range(1, step)), "it made every step, some perhaps twice"
    assert steps[-1]["rollout/actors_replaced"] == 1 and steps[-1]["run/restarts"] == 1
    done = expect_whole(tmp_path / "b", steps_of(tmp_path / "b")[-1]["step"])
    assert done[-1]["run/restarts"] == 0 and done[-1]["rollout/actors_replaced"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_runs_take_little_longer_than_one(tmp_path: Path) -> None:
    """Prints how long two runs of scripted engines take together, against one that has both GPUs to itself."""
    more = (*SCRIPTED, "algorithm.steps=40", "scripted.latency_s=0.3", "scripted.train_step_s=0.3")
    with shared_pool(tmp_path) as pool, ThreadPoolExecutor() as threads:
        code, output = pool.run("alone", 0, *more)
        assert code == 0, output
        both = [threads.submit(pool.run, "a", 0, *more), threads.submit(pool.run, "b", 1, *more)]
        for done in both:
            code, output = done.result()
            assert code == 0, output
        pool.wait_until_empty()
    pool.expect_kept_rules()
    lines = {name: expect_whole(tmp_path / name, 40) for name in ("alone", "a", "b")}
    alone_s = sum(line["time/step_s"] for line in lines["alone"])
    together_s = max(sum(line["time/step_s"] for line in lines[name]) for name in "ab")
    print(f"two tenants: {together_s:.1f} s, one alone: {alone_s:.1f} s, ratio {together_s / alone_s:.2f}")


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["driver", "engine 0", "engine 1", "train worker 0", "rollout 0", "pool"])
def test_random_deaths_cost_the_other_tenant_nothing(tmp_path: Path, victim: str) -> None:
    """At random moments, six of each kind: the other tenant makes every step and loses no token."""
    more = (*SCRIPTED, "scripted.latency_s=0.3", "scripted.train_step_s=0.1")
    steps = {"a": 120, "b": 40}  # the victim still runs when the kill comes, though it may start long before the other
    rng = random.Random(victim)
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        with shared_pool(folder) as pool, ThreadPoolExecutor() as threads:
            first = threads.submit(pool.run, "a", 0, *more, f"algorithm.steps={steps['a']}", "run.checkpoint_every=2")
            second = threads.submit(pool.run, "b", 1, *more, f"algorithm.steps={steps['b']}")
            _wait_for_step(folder / "a", 1, first)
            _wait_for_step(folder / "b", 1, second)
            time.sleep(10 * rng.random())
            assert not first.done(), "a ended before the kill: the pool gave b too little for its first step"
            _kill(pool, folder / "a", victim)
            code, output = second.result()
            assert code == 0, output
            expect_whole(folder / "b", steps["b"])
            code, output = first.result()
            if victim != "driver":
                assert code == 0, output
                assert {line["step"] for line in steps_of(folder / "a")} == set(range(1, steps["a"] + 1))
            pool.wait_until_empty()
        pool.expect_kept_rules()
        assert not runs.shared_memory(folder / "a") and not runs.shared_memory(folder / "b")


def _kill(pool: SharedPool, run_dir: Path, victim: str) -> None:
    """kill -9 of one of the processes of the pool and of a tenant."""
    if victim == "pool":
        os.kill(pool.client.status().pid, signal.SIGKILL)
    elif victim == "driver":
        os.kill(pool.driver(run_dir.name), signal.SIGKILL)
    else:
        kill(run_dir, victim)


def _wait_for_step(run_dir: Path, step: int, running: Future[tuple[int, str]]) -> None:
    """Return when a run has logged `step`; raise when it ends or stands still before."""
    _wait_for(run_dir, lambda line: line["step"] >= step, running)


def _wait_for(run_dir: Path, holds: Callable[[dict], bool], running: Future[tuple[int, str]]) -> int:
    """Return the step of the first line of metrics.jsonl for which `holds` is true; raise when the run ends or stands
    still before there is one."""
    deadline = time.monotonic() + 300
    while not (found := [line["step"] for line in runs.metrics(run_dir) if holds(line)]):
        assert not running.done(), running.result()[1]
        assert time.monotonic() < deadline, f"{run_dir.name} stands still: {runs.metrics(run_dir)[-1:]}"
        time.sleep(0.2)
    return found[0]
