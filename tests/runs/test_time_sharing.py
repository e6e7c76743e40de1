"""Runs that share the GPUs of a pool: both finish, lose no token, and have the figures of their runs alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.pool_runs import SCRIPTED, shared_pool
from headrace.tests.runs.test_end_to_end import steps_of

pytestmark = pytest.mark.processes


@pytest.mark.timeout(300)
def test_two_runs_share_two_gpus(tmp_path: Path) -> None:
    more = (*SCRIPTED, "algorithm.steps=6", "scripted.latency_s=0.3", "scripted.train_step_s=0.3")
    with shared_pool(tmp_path) as pool:
        both = [pool.tenant("a", 0, *more), pool.tenant("b", 1, *more)]
        for process in both:
            print(runs.succeed(process))
        assert not pool.client.status().tenants
    pool.expect_kept_rules()
    for name in "ab":
        steps = steps_of(tmp_path / name)
        assert len(steps) == 6
        print({k: v for k, v in steps[-1].items() if k.startswith("pool/")})
