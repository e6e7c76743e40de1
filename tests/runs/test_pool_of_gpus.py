"""Runs that share the real GPUs of a pool, or logical ones. Each process stands on the GPUs of its map, and a pool that
ends or a tenant that dies leaves nothing reserved."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ray.util.placement_group import placement_group_table

from headrace.tests import process_pool
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.pool_runs import SCRIPTED, pool_of_gpus
from headrace.tests.runs.test_time_sharing import expect_whole
from headrace.tests.trainers.cluster.test_gpu_bundles import free_gpus

QUICK = (*SCRIPTED, "algorithm.steps=4", "scripted.latency_s=0.1", "scripted.train_step_s=0.1")


@pytest.fixture
def two_logical_gpus() -> Iterator[None]:
    process_pool.end_ray()
    process_pool.start_ray(num_gpus=2, num_cpus=2)  # for the rollout actors of two runs: the others need none
    try:
        yield
    finally:
        process_pool.end_ray()


def wait_until(true: Callable[[], bool], what: str, *running: Future[tuple[int, str]]) -> None:
    """Wait for something that is so in the end, unless one of the runs ends before."""
    deadline = time.monotonic() + 240
    while not true():
        assert not [run.result()[1] for run in running if run.done()]
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_two_runs_with_vllm_share_two_gpus(tmp_path: Path) -> None:
    """The benchmark complains of missing rows, differing log-probs, replaced engines and GPUs held twice. Log-probs
    differ between engine and trainer."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    out = tmp_path / "out"
    command = ["headrace.tools.measure.pool", "--work", "pool-tiny", "--steps", "8", "--out", str(out)]
    output = runs.succeed(runs.start_command(command, tmp_path), timeout_s=800)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["gpu.pool-tiny.lost_tokens"] == 0 and summary["gpu.pool-tiny.expands"] >= 8, output


@pytest.mark.slow  # tests/trainers/pool/server/test_bundles.py places actors of tenants without runs
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("two_logical_gpus")
def test_tenants_stand_on_the_gpus_of_a_pool_as_their_maps_say(tmp_path: Path) -> None:
    """The pool holds all GPUs, and each run checks that its processes see those of its map alone. What a dead tenant
    has held is used again, and the end of the pool gives everything back."""
    with pool_of_gpus(tmp_path) as pool, ThreadPoolExecutor() as threads:
        assert [(gpu.number, gpu.device) for gpu in pool.client.status().reserved] == [(0, "0"), (1, "1")]
        assert free_gpus() == 0
        again = ["headrace.cli", "pool", "start", "--name", pool.name, "--address", process_pool.ray_address()]
        refused = runs.start_command([*again, "--dir", str(tmp_path / "other")], tmp_path)
        first = threads.submit(pool.run, "a", 0, *QUICK, "algorithm.steps=1000")
        second = threads.submit(pool.run, "b", 1, *QUICK, "run.max_restarts=0", "algorithm.steps=1000")
        wait_until(lambda: bool(runs.metrics(tmp_path / "b")), "b is admitted after the first step of a", first, second)
        assert "--name: got" in refused.communicate(timeout=60)[0] and refused.returncode == 2
        os.kill(pool.driver("b"), signal.SIGKILL)
        pool.wait_until_left("b")
        code, output = pool.run("c", 1, *QUICK)
        assert code == 0, output
        os.kill(pool.driver("a"), signal.SIGINT)
        pool.wait_until_empty()
        assert first.result()[0] == 130 and second.result()[0] != 0
    pool.expect_kept_rules()
    expect_whole(tmp_path / "c", 4)
    expect_whole(tmp_path / "a", runs.steps_of(tmp_path / "a")[-1]["step"])
    wait_until(lambda: free_gpus() == 2, "the pool has ended")
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
