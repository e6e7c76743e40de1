"""Drills the pool as a judge: its process is killed and stopped, its disk is full, and all of its tenants live on.

`make drill-two_minutes` is the short one.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.tests.process_pool import kill, suspend
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.pool_runs import SCRIPTED, SharedPool, shared_pool
from headrace.trainers.pool.state.pool import PoolBounds

pytestmark = [pytest.mark.drill, pytest.mark.timeout(7200)]

TRAIN_GPUS = {"a": 0, "b": 1, "c": 0}
"""Train GPU of each tenant. All of them generate on both GPUs of the pool."""
FULL_S = 10.0
"""Seconds for which the disk is full."""
BOUND_S = 600.0
Running = Mapping[str, Future[tuple[int, str]]]


@pytest.mark.parametrize(("times", "full"), [(1, 1), (20, 2)], ids=["two_minutes", "twenty_times"])
def test_no_tenant_ends_and_no_gpu_has_two(tmp_path: Path, times: int, full: int) -> None:
    """The pool's process is killed and stopped `times` times each, and cannot write `full` times. One of the stops
    lasts longer than the lease of a tenant."""
    rng = random.Random(times)
    kinds = ["kill"] * times + ["stop"] * (times - 1) + ["full"] * full
    rng.shuffle(kinds)
    more = (*SCRIPTED, "scripted.latency_s=0.3", "scripted.train_step_s=0.1", "algorithm.steps=100000")
    with ThreadPoolExecutor() as threads, shared_pool(tmp_path) as pool:
        running = {name: threads.submit(pool.run, name, gpu, *more) for name, gpu in TRAIN_GPUS.items()}
        for kind in ["long stop", *kinds]:
            _wait_for_steps(pool, running)
            _disturb(pool, kind, rng)
        _wait_for_steps(pool, running)
        for name in running:
            os.kill(pool.driver(name), signal.SIGINT)
        for ended in running.values():
            code, output = ended.result()
            assert code == 128 + signal.SIGINT, output
        pool.wait_until_empty()
    pool.expect_kept_rules()
    for name in running:
        steps = runs.steps_of(tmp_path / name)
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1)), "no step was made twice"
        assert steps[-1]["run/restarts"] == 0 and not runs.shared_memory(tmp_path / name)


def _disturb(pool: SharedPool, kind: str, rng: random.Random) -> None:
    pid = pool.client.status().pid
    if kind == "kill":
        kill(pid)
    elif kind == "full":
        _fill(pool, pid)
    else:
        suspend(pid)
        try:
            time.sleep(PoolBounds().lease_s + 10 if kind == "long stop" else rng.uniform(1.0, 8.0))
        finally:
            os.kill(pid, signal.SIGCONT)


def _fill(pool: SharedPool, pid: int) -> None:
    """Let the pool's process write only a part of its next record, and nothing more, for a while."""
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    room = (pool.folder / "pool.journal").stat().st_size + 9
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, unlimited[1]))
    try:
        time.sleep(FULL_S)
        assert any("cannot be written" in trouble for trouble in pool.client.status().troubles)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)


def _wait_for_steps(pool: SharedPool, running: Running) -> None:
    """Return when each run has made two more steps; raise when one has ended, is distrusted or stands still."""
    first = {name: _last_step(pool.folder / name) for name in running}
    deadline = time.monotonic() + BOUND_S
    while any(_last_step(pool.folder / name) < step + 2 for name, step in first.items()):
        for name, one in running.items():
            assert not one.done(), (name, one.result())
        status = pool.client.status()
        assert not pool.suspects, status
        assert time.monotonic() < deadline, status
        time.sleep(0.5)


def _last_step(run_dir: Path) -> int:
    return max((line["step"] for line in runs.steps_of(run_dir)), default=0)
