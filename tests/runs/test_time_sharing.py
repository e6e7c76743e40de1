"""Runs that share a pool's GPUs finish, lose no token, have the figures of runs alone, and survive deaths."""

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
from headrace.tests.runs.test_healing import kill
from headrace.tests.runs.test_switch_roles import figures

pytestmark = pytest.mark.processes

SLOW = (
    *SCRIPTED, "algorithm.steps=5000", "scripted.latency_s=0.3", "scripted.latency_sigma=1.0",
    "scripted.train_step_s=0.3",
)  # fmt: skip
"""Requests take from 0.1 to 3 s, so that some are in flight when an engine must sleep, even on a slow machine:
requests of equal length end together, and that is when a training asks for the GPU. Such a run lasts until it is
interrupted."""


def expect_whole(run_dir: Path, steps: int) -> list[dict]:
    """Expect that a run made all its steps, each with all of its samples, and lost no token."""
    done = runs.steps_of(run_dir)
    assert [step["step"] for step in done] == list(range(1, steps + 1))
    assert all(step["rollout/failed_rows"] == 0 and step["train/sequences"] == 64 for step in done)
    # The line of a step that was interrupted after its update has only what was known then.
    lost = [step["pool/lost_tokens"] for step in done if "pool/lost_tokens" in step]
    assert len(lost) >= steps - 1 and lost[-1] == 0 and max(step["staleness/max"] for step in done) <= 1
    return done


@pytest.mark.timeout(400)
def test_a_tenant_has_the_figures_of_its_run_alone(tmp_path: Path) -> None:
    """Its rows, its losses and its weights are those of the run with the same seed that has its GPUs to itself. The
    other tenant, whose requests are cut off in the middle, loses no token."""
    asked = (
        "run.deterministic=true", "rollout.engine=hf", "trainer.lr=0.01", "algorithm.steps=3", "validation.every=0",
        "algorithm.mode=async", "rollout.num_engines=2", "rollout.num_actors=1",
    )  # fmt: skip
    with ThreadPoolExecutor() as threads, shared_pool(tmp_path) as pool:
        beside = threads.submit(pool.run, "b", 1, *SLOW)
        of_equal_seed = [
            threads.submit(runs.run, tmp_path / "alone", *asked), threads.submit(pool.run, "a", 0, *asked)
        ]  # fmt: skip
        for done in of_equal_seed:
            code, output = done.result()
            assert code == 0, output
        _wait_for(tmp_path / "b", lambda line: line.get("pool/moved_requests", 0) > 0, beside)
        os.kill(pool.driver("b"), signal.SIGINT)
        code, output = beside.result()
        assert code == 128 + signal.SIGINT, output
        pool.wait_until_empty()
    pool.expect_kept_rules()
    alone, shared = runs.steps_of(tmp_path / "alone"), runs.steps_of(tmp_path / "a")
    assert len(alone) == 3
    for line, expected in zip(shared, alone, strict=True):
        wanted = {key: value for key, value in figures(expected).items() if not key.startswith(DECIDED_BY_TIMING)}
        assert len(wanted) > 25 and {key: line[key] for key in wanted} == wanted
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("alone", "a")]
    assert models[0] == models[1]
    steps = _last_step(tmp_path / "b")
    expect_whole(tmp_path / "b", steps)
    # Two trainings in a row without a wake between are right, too: the next step's groups may be ready already.
    assert pool.grants("b", "train") >= steps and pool.grants("b", "rollout") > 2, "its engines slept and woke again"


DECIDED_BY_TIMING = ("sync/", "queue/", "dataplane/", "driver/")
"""First parts of the keys of figures about the engines that happen to be awake, and about calls of the driver."""


DEATHS = {"pool": None, "engine 0": "rollout/actors_replaced", "train worker 0": "run/restarts", "driver": None}
"""Victim -> key of the figure that counts its death in its own run."""


@pytest.mark.slow  # tests/trainers/pool ends each part of a pool by itself
@pytest.mark.timeout(900)
def test_deaths_in_one_tenant_and_of_the_pool_cost_the_other_nothing(tmp_path: Path) -> None:
    more = (*SCRIPTED, "scripted.latency_s=0.3", "scripted.train_step_s=0.1", "run.checkpoint_every=1")
    with shared_pool(tmp_path) as pool, ThreadPoolExecutor() as threads:
        both = [threads.submit(pool.run, name, gpu, *more, "algorithm.steps=500") for gpu, name in enumerate("ab")]
        step = 0
        for victim, count in DEATHS.items():
            for name, running in zip("ab", both, strict=True):
                _wait_for_step(tmp_path / name, step + 2, running)
            step = runs.steps_of(tmp_path / "a")[-1]["step"]
            _kill(pool, tmp_path / "a", victim)
            if count is not None:  # an engine that dies asleep is replaced when the pool next orders it to wake
                step = _wait_for(tmp_path / "a", lambda line, count=count: line.get(count) == 1, both[0])
            assert not pool.suspects
        pool.wait_until_left("a")
        _wait_for_step(tmp_path / "b", runs.steps_of(tmp_path / "b")[-1]["step"] + 3, both[1])
        os.kill(pool.driver("b"), signal.SIGINT)
        pool.wait_until_empty()
    pool.expect_kept_rules()
    steps = [line for line in runs.metrics(tmp_path / "a") if "reward/mean" in line]
    assert {line["step"] for line in steps} >= set(range(1, step)), "it made every step, some perhaps twice"
    assert steps[-1]["rollout/actors_replaced"] == 1 and steps[-1]["run/restarts"] == 1
    done = expect_whole(tmp_path / "b", runs.steps_of(tmp_path / "b")[-1]["step"])
    assert done[-1]["run/restarts"] == 0 and done[-1]["rollout/actors_replaced"] == 0


COUNTED = {
    "engine 0": "rollout/actors_replaced",
    "engine 1": "rollout/actors_replaced",
    "train worker 0": "run/restarts",
}
"""Victim -> key of the figure that counts its deaths in its own run, where they count before the next one comes."""


@pytest.mark.drill
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("victim", "kills"),
    [
        ("driver", 5), ("hung driver", 5), ("engine 0", 5), ("engine 1", 5), ("train worker 0", 5), ("rollout 0", 5),
        ("pool", 20),
    ],
)  # fmt: skip
def test_random_deaths_cost_the_other_tenant_nothing(tmp_path: Path, victim: str, kills: int) -> None:
    """At random moments, in one tenant or of the pool itself: the other tenant makes every step and loses no token. A
    tenant whose driver was killed, or hung until the pool ended it, is started again and continues."""
    more = (
        *SCRIPTED, "scripted.latency_s=0.3", "scripted.train_step_s=0.1", "algorithm.steps=5000",
        "run.checkpoint_every=2", f"run.max_restarts={kills}",
    )  # fmt: skip
    rng = random.Random(victim)
    # Whatever fails here ends the pool first, and with it the runs that the threads wait for.
    with ThreadPoolExecutor() as threads, shared_pool(tmp_path) as pool:
        both = {name: threads.submit(pool.run, name, gpu, *more) for gpu, name in enumerate("ab")}
        for number in range(1, kills + 1):
            for name, running in both.items():
                _wait_for_step(tmp_path / name, _last_step(tmp_path / name) + 3, running)
            time.sleep(3 * rng.random())
            _kill(pool, tmp_path / "a", victim)
            if victim in COUNTED:
                _wait_for(tmp_path / "a", lambda line, number=number: line.get(COUNTED[victim]) == number, both["a"])
            elif victim.endswith("driver"):
                both["a"].result()
                pool.wait_until_left("a")
                both["a"] = threads.submit(pool.run, "a", 0, *more, "--resume")
        for name, running in both.items():
            _wait_for_step(tmp_path / name, _last_step(tmp_path / name) + 3, running)
        for name in both:
            os.kill(pool.driver(name), signal.SIGINT)
        for running in both.values():
            code, output = running.result()
            assert code == 128 + signal.SIGINT, output
        pool.wait_until_empty()
    pool.expect_kept_rules()
    expect_whole(tmp_path / "b", _last_step(tmp_path / "b"))
    assert {line["step"] for line in runs.steps_of(tmp_path / "a")} == set(range(1, _last_step(tmp_path / "a") + 1))
    assert not runs.shared_memory(tmp_path / "a") and not runs.shared_memory(tmp_path / "b")


def _last_step(run_dir: Path) -> int:
    return max((line["step"] for line in runs.steps_of(run_dir)), default=0)


def _kill(pool: SharedPool, run_dir: Path, victim: str) -> None:
    """kill -9 of one of the processes of the pool and of a tenant. A "hung" one stands still instead."""
    if victim == "pool":
        os.kill(pool.client.status().pid, signal.SIGKILL)
    elif victim == "hung driver":
        os.kill(pool.driver(run_dir.name), signal.SIGSTOP)
    elif victim == "driver":
        os.kill(pool.driver(run_dir.name), signal.SIGKILL)
    else:
        kill(run_dir, victim)


def _wait_for_step(run_dir: Path, step: int, running: Future[tuple[int, str]]) -> None:
    """Return when a run has logged `step`; raise when it ends or stands still before."""
    _wait_for(run_dir, lambda line: line["step"] >= step, running)


def _wait_for(run_dir: Path, holds: Callable[[dict], bool], running: Future[tuple[int, str]]) -> int:
    """Return the step of the first line of metrics.jsonl for which `holds` is true. Raises when the run ends or stands
    still before there is one."""
    deadline = time.monotonic() + 300
    while not (found := [line["step"] for line in runs.metrics(run_dir) if holds(line)]):
        assert not running.done(), running.result()[1]
        assert time.monotonic() < deadline, f"{run_dir.name} stands still: {runs.metrics(run_dir)[-1:]}"
        time.sleep(0.2)
    return found[0]
