"""A run over several hosts loses one of them, and goes on without a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.tests.hosts import TRUSTED, hosts, ray_cluster, start
from headrace.tests.runs import cli_runs

pytestmark = [pytest.mark.processes, pytest.mark.slow]
STEPS = 40


@pytest.mark.timeout(600)
@pytest.mark.parametrize("spare", [0, 1], ids=["no other host has room", "another host has room"])
def test_a_run_that_loses_a_host_with_an_engine_goes_on(tmp_path: Path, spare: int) -> None:
    run_dir = tmp_path / "run"
    with hosts(3 + spare) as members:
        address = ray_cluster(members, (1,) * len(members))
        overrides = (
            "rollout.engine=scripted", "trainer.backend=scripted", "algorithm.mode=async", f"algorithm.steps={STEPS}",
            "rollout.num_engines=2", "validation.every=0", "warmup.corpus=none", "dataplane.store.capacity_mib=64",
            "scripted.latency_s=0.2", f"resources.ray_address={address}", TRUSTED,
        )  # fmt: skip
        process = start(members[0], cli_runs.command(run_dir, *overrides), run_dir.parent)
        cli_runs.wait_for_step(run_dir, 3, process)
        places = {one["name"]: one["host"] for one in json.loads((run_dir / "actors.json").read_text())["actors"]}
        assert places["train worker 0"] == "host1", places
        gone = next(host for host in members if host.name == places["rollout 1"])
        gone.kill()
        output = cli_runs.succeed(process, timeout_s=400)
    steps = cli_runs.steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1)), "no step was repeated"
    assert all(step["train/sequences"] == 8 * 8 for step in steps)
    assert steps[-1]["rollout/actors_replaced"] == spare and steps[-1]["sync/engines"] == 1 + spare
    assert "going on from" not in output
    if not spare:
        assert f"rollout 1: host {gone.name} is gone, and no other host has room for it" in output
