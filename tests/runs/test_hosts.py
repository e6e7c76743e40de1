"""Runs over several hosts, which are namespaces of this one. The driver is on the first host, Ray's actors wherever a
case puts them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bench.hosts.namespaces import Host
from headrace.tests.hosts import PORT, TRUSTED, finish, hosts, ray_cluster, start
from headrace.tests.runs import cli_runs

pytestmark = pytest.mark.processes
SHORT = ("validation.every=0", "warmup.corpus=none", "dataplane.store.capacity_mib=64", TRUSTED)
SCRIPTED = ("rollout.engine=scripted", "trainer.backend=scripted")


@contextmanager
def cluster(*cpus: int, name: str = "") -> Iterator[tuple[Host, ...]]:
    """Hosts with one Ray cluster, one for each number of CPUs. Its head is the first host, where drivers run. name:
    name of all hosts."""
    with hosts(len(cpus), name=name) as members:
        ray_cluster(members, cpus)
        yield members


def train(near: Host, run_dir: Path, *overrides: str, timeout_s: float = 240) -> tuple[int, str]:
    """Train on the first host. Returns the exit code and the output."""
    command = cli_runs.command(run_dir, *SHORT, *overrides, f"resources.ray_address={near.address}:{PORT}")
    return finish(near, command, run_dir.parent, timeout_s)


def hosts_of(run_dir: Path) -> dict[str, str]:
    """The host of each process of a run, by its name."""
    told = json.loads((run_dir / "actors.json").read_text())
    return {actor["name"]: actor["host"] for actor in told["actors"]}


@pytest.mark.timeout(300)
def test_a_drivers_host_may_take_no_actor(tmp_path: Path) -> None:
    """It has the directory and no storage unit, for which it has no room."""
    with cluster(0, 3) as (near, far):
        subprocess.run(far.command("mount", "-o", "remount,size=1g", "/dev/shm"), check=True, timeout=30)
        room = "dataplane.store.capacity_mib=600"
        code, output = train(near, tmp_path / "run", *SCRIPTED, "algorithm.steps=2", room)
    assert code == 0, output
    hosts = hosts_of(tmp_path / "run")
    assert {hosts["train worker 0"], hosts["rollout 0"]} == {"host2"} and hosts["directory"] == "host1"
    assert [line["step"] for line in cli_runs.metrics(tmp_path / "run") if "reward/mean" in line] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_that_asks_for_no_token_is_refused_on_a_network_that_is_not_trusted(tmp_path: Path) -> None:
    """On one that is trusted, the run is over both hosts, although they have one name."""
    with cluster(1, 1, name="node") as (near, _):
        code, output = train(near, tmp_path / "run", *SCRIPTED, "algorithm.steps=2", TRUSTED.replace("true", "false"))
        assert code == 2 and "dataplane.trusted_network: got false with resources.ray_address='10.77.0.1:" in output
        assert not (tmp_path / "run" / "actors.json").exists()
        code, output = train(near, tmp_path / "trusted", *SCRIPTED, "algorithm.steps=2")
    assert code == 0, output
    told = json.loads((tmp_path / "trusted" / "actors.json").read_text())["actors"]
    places = {actor["name"]: actor["space"] for actor in told}
    assert set(hosts_of(tmp_path / "trusted").values()) == {"node"}
    assert places["train worker 0"] != places["rollout 0"], "they are on two hosts"
    assert [line["step"] for line in cli_runs.steps_of(tmp_path / "trusted")] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_form_their_group_wherever_they_stand(tmp_path: Path) -> None:
    """The run uses gloo between the hosts and on the far one, and a journal and checkpoints of both hosts. Weights go
    by `collective` to engines with processes of their own."""
    ranks = ("trainer.dp=2", "rollout.num_engines=1", "run.journal=true", "algorithm.steps=2")
    with cluster(1, 2) as (near, _):
        code, output = train(near, tmp_path / "over both", *ranks, timeout_s=400)
        assert code == 0, output
    with cluster(0, 4) as (near, _):
        code, output = train(near, tmp_path / "far", *ranks, "rollout.num_actors=1", timeout_s=400)
        assert code == 0, output
    both = hosts_of(tmp_path / "over both")
    assert {both[name] for name in ("train worker 0", "train worker 1", "rollout 0")} == {"host1", "host2"}
    far = hosts_of(tmp_path / "far")
    names = ("train worker 0", "train worker 1", "rollout 0", "engine 0")
    assert {far[name] for name in names} == {"host2"}
    for name in ("over both", "far"):
        steps = [line for line in cli_runs.metrics(tmp_path / name) if "train/loss" in line]
        assert [line["policy/version"] for line in steps] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ray", "simple", "mooncake"])
def test_every_store_carries_rows_from_host_to_host(tmp_path: Path, kind: str) -> None:
    """The only engine is on the driver's host, and the only train worker on the other."""
    with cluster(1, 1) as (near, _):
        code, output = train(near, tmp_path / "run", *SCRIPTED, *cli_runs.store(kind), "algorithm.steps=2")
    assert code == 0, output
    where = hosts_of(tmp_path / "run")
    assert {where["train worker 0"], where["rollout 0"]} == {"host1", "host2"}
    assert [line["train/sequences"] for line in cli_runs.steps_of(tmp_path / "run")] == [64, 64]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "cpus"),
    [("async", (0, 3)), ("async", (1, 2)), ("async_streaming", (0, 3)), ("async_streaming", (1, 2))],
)
def test_async_modes_train_wherever_engines_and_directory_stand(
    tmp_path: Path, mode: str, cpus: tuple[int, int]
) -> None:
    """The directory is on the driver's host, and two engines are on the other one, or one is beside it."""
    run = ("rollout.num_engines=2", f"algorithm.mode={mode}", "algorithm.max_staleness=1", "algorithm.steps=4")
    with cluster(*cpus) as (near, _):
        code, output = train(near, tmp_path / "run", *run, timeout_s=400)
    assert code == 0, output
    where = hosts_of(tmp_path / "run")
    engines_and_rank = [where[name] for name in ("rollout 0", "rollout 1", "train worker 0")]
    assert [engines_and_rank.count("host1"), engines_and_rank.count("host2")] == [*cpus]
    steps = cli_runs.steps_of(tmp_path / "run")
    assert [line["policy/version"] for line in steps] == [1, 2, 3, 4]
    assert max(line["staleness/max"] for line in steps) <= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_over_four_hosts_has_an_actor_on_each(tmp_path: Path) -> None:
    run = ("trainer.dp=2", "rollout.num_engines=2", "run.journal=true", "algorithm.steps=2")
    with cluster(1, 1, 1, 1) as (near, *_):
        code, output = train(near, tmp_path / "run", *run, timeout_s=400)
    assert code == 0, output
    where = hosts_of(tmp_path / "run")
    names = ("train worker 0", "train worker 1", "rollout 0", "rollout 1")
    assert sorted(where[name] for name in names) == ["host1", "host2", "host3", "host4"]
    assert [line["policy/version"] for line in cli_runs.steps_of(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_after_a_host_was_cut_off_for_a_minute(tmp_path: Path) -> None:
    """The minute is longer than Ray waits for the host, which has nothing but a rollout actor with its engine."""
    run_dir = tmp_path / "run"
    run = ("rollout.num_engines=2", "algorithm.mode=async", "algorithm.steps=1000000", "scripted.train_step_s=0.2")
    with cluster(1, 1, 1) as (near, _, lost):
        command = cli_runs.command(run_dir, *SHORT, *SCRIPTED, *run, f"resources.ray_address={near.address}:{PORT}")
        with start(near, command, tmp_path) as process:
            cli_runs.wait_for_step(run_dir, 3, process)
            assert [name for name, host in hosts_of(run_dir).items() if host == lost.name] == ["rollout 1"]
            lost.cut()
            time.sleep(60)
            lost.heal()
            last = len(cli_runs.steps_of(run_dir)) + 30
            cli_runs.wait_for_step(run_dir, last, process, timeout_s=400)
            near.kill()
    assert [line["step"] for line in cli_runs.steps_of(run_dir)][:last] == [*range(1, last + 1)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_folder_that_only_one_host_has_is_told_by_its_path(tmp_path: Path) -> None:
    """`sync.transport=disk` needs a folder that all hosts see."""
    weights = tmp_path / "weights"
    weights.mkdir()
    disk = ("sync.transport=disk", f"sync.dir={weights}", "sync.timeout_s=5", "algorithm.steps=2")
    with cluster(1, 1) as (near, far):
        subprocess.run(far.command("mount", "-t", "tmpfs", "tmpfs", str(weights)), check=True, timeout=30)
        code, output = train(near, tmp_path / "run", *SCRIPTED, *disk)
    assert code == 2 and f"sync.dir: host host2 has another folder in place of {weights}" in output
