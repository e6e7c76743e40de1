"""Runs over two hosts, which are namespaces of this one. The driver is on the near host, Ray's actors wherever a case
puts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs
from headrace.tests.two_hosts import Host, two_hosts

pytestmark = pytest.mark.processes
PORT = 6390
ENVIRONMENT = {**cli_runs.environment(), "RAY_AUTH_MODE": "disabled"}  # no stranger reaches these hosts
TRUSTED = "dataplane.trusted_network=true"  # their Ray asks for no token
SHORT = ("validation.every=0", "warmup.corpus=none", "dataplane.store.capacity_mib=64", TRUSTED)
SCRIPTED = ("rollout.engine=scripted", "trainer.backend=scripted")


@contextmanager
def cluster(near_cpus: int, far_cpus: int) -> Iterator[tuple[Host, Host]]:
    """Two hosts with one Ray cluster, whose head is the near host."""
    with two_hosts() as (near, far):
        starting = [
            _ray_start(near, near_cpus, "--head", "--include-dashboard=false", f"--port={PORT}"),
            _ray_start(far, far_cpus, f"--address={near.address}:{PORT}"),  # it waits for the head
        ]
        for process in starting:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
        yield near, far


def _ray_start(host: Host, num_cpus: int, *options: str) -> subprocess.Popen[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    sizes = (f"--num-cpus={num_cpus}", "--object-store-memory=80000000", f"--node-ip-address={host.address}")
    return _start(host, [ray, "start", "--disable-usage-stats", *sizes, *options])


def _start(host: Host, command: Sequence[str], folder: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        host.command(*command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=ENVIRONMENT,
    )


def train(near: Host, run_dir: Path, *overrides: str, timeout_s: float = 240) -> tuple[int, str]:
    """Train on the near host. Returns the exit code and the output."""
    command = cli_runs.command(run_dir, *SHORT, *overrides, f"resources.ray_address={near.address}:{PORT}")
    process = _start(near, command, run_dir.parent)
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def hosts_of(run_dir: Path) -> dict[str, str]:
    """The host of each process of a run, by its name."""
    told = json.loads((run_dir / "actors.json").read_text())
    return {actor["name"]: actor["host"] for actor in told["actors"]}


@pytest.mark.timeout(300)
def test_a_drivers_host_may_take_no_actor(tmp_path: Path) -> None:
    with cluster(near_cpus=0, far_cpus=3) as (near, _):
        code, output = train(near, tmp_path / "run", *SCRIPTED, "algorithm.steps=2")
    assert code == 0, output
    hosts = hosts_of(tmp_path / "run")
    assert {hosts["train worker 0"], hosts["rollout 0"]} == {"far"}
    assert [line["step"] for line in cli_runs.metrics(tmp_path / "run") if "reward/mean" in line] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_that_asks_for_no_token_is_refused_on_a_network_that_is_not_trusted(tmp_path: Path) -> None:
    with cluster(near_cpus=3, far_cpus=1) as (near, _):
        code, output = train(near, tmp_path / "run", *SCRIPTED, "algorithm.steps=2", TRUSTED.replace("true", "false"))
    assert code == 2 and "dataplane.trusted_network: got false with resources.ray_address='10.77.0.1:6390'" in output
    assert not (tmp_path / "run" / "actors.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_form_their_group_wherever_they_stand(tmp_path: Path) -> None:
    """The run uses gloo between the hosts and on the far one, and a journal and checkpoints of both hosts. Weights go
    by `collective` to engines with processes of their own."""
    ranks = ("trainer.dp=2", "rollout.num_engines=1", "run.journal=true", "algorithm.steps=2")
    with cluster(near_cpus=1, far_cpus=2) as (near, _):
        code, output = train(near, tmp_path / "over both", *ranks, timeout_s=400)
        assert code == 0, output
    with cluster(near_cpus=0, far_cpus=4) as (near, _):
        code, output = train(near, tmp_path / "far", *ranks, "rollout.num_actors=1", timeout_s=400)
        assert code == 0, output
    both = hosts_of(tmp_path / "over both")
    assert {both[name] for name in ("train worker 0", "train worker 1", "rollout 0")} == {"near", "far"}
    far = hosts_of(tmp_path / "far")
    names = ("train worker 0", "train worker 1", "rollout 0", "engine 0")
    assert {far[name] for name in names} == {"far"}
    for name in ("over both", "far"):
        steps = [line for line in cli_runs.metrics(tmp_path / name) if "train/loss" in line]
        assert [line["policy/version"] for line in steps] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_folder_that_only_one_host_has_is_told_by_its_path(tmp_path: Path) -> None:
    """`sync.transport=disk` needs a folder that all hosts see."""
    weights = tmp_path / "weights"
    weights.mkdir()
    disk = ("sync.transport=disk", f"sync.dir={weights}", "sync.timeout_s=5", "algorithm.steps=2")
    with cluster(near_cpus=1, far_cpus=1) as (near, far):
        subprocess.run(far.command("mount", "-t", "tmpfs", "tmpfs", str(weights)), check=True, timeout=30)
        code, output = train(near, tmp_path / "run", *SCRIPTED, *disk)
    assert code == 1 and str(weights) in output
