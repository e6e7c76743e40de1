"""Runs that share the real GPUs of a pool, or logical ones: each process stands on the GPUs of its map, and a pool that
ends or a tenant that dies leaves nothing reserved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

from headrace.tests import process_pool
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.pool_runs import SCRIPTED, pool_of_gpus
from headrace.tests.runs.test_time_sharing import expect_whole

QUICK = (*SCRIPTED, "algorithm.steps=4", "scripted.latency_s=0.1", "scripted.train_step_s=0.1")


@pytest.fixture
def two_logical_gpus() -> Iterator[None]:
    process_pool.end_ray()
    process_pool.start_ray(num_gpus=2)
    try:
        yield
    finally:
        process_pool.end_ray()


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def shown(run_dir: Path) -> dict[str, str]:
    """Name of each of a run's actors -> CUDA_VISIBLE_DEVICES of its process."""
    found = {}
    for name, process in runs.actors(run_dir).items():
        environment = process.environ()
        if name.split()[0] in ("engine", "train", "rollout"):
            found[name] = environment.get("CUDA_VISIBLE_DEVICES", "all")
    return found


def free_gpus() -> float:
    return ray.available_resources().get("GPU", 0)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("two_logical_gpus")
def test_two_tenants_stand_on_the_gpus_of_a_pool_which_ends_with_it(tmp_path: Path) -> None:
    with pool_of_gpus(tmp_path) as pool, ThreadPoolExecutor() as threads:
        assert [(gpu.number, gpu.device) for gpu in pool.client.status().reserved] == [(0, "0"), (1, "1")]
        assert free_gpus() == 0
        both = [threads.submit(pool.run, name, gpu, *QUICK) for gpu, name in enumerate("ab")]
        for done in both:
            code, output = done.result()
            assert code == 0, output
        pool.wait_until_empty()
    pool.expect_kept_rules()
    for name in "ab":
        expect_whole(tmp_path / name, 4)
    wait_until(lambda: free_gpus() == 2, "the pool has ended")
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
