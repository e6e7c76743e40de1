"""Jobs of `headrace launch slurm` on a stand-in for Slurm: they start, stop, and go on on other hosts."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headrace.tests.hosts import hosts
from headrace.tests.runs import cli_runs
from headrace.tests.trainers.jobs.stub_slurm import JOB_ID, StubSlurm

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(500)]
STEPS = 40
GRACE_S = 30
"""Slurm's default for the seconds between SIGTERM and SIGKILL (KillWait)."""
GIVEN = (
    "rollout.engine=scripted", "trainer.backend=scripted", "trainer.dp=2", "validation.every=0", "warmup.corpus=none",
    "dataplane.store.capacity_mib=64", "run.checkpoint_every=5", "run.journal=true", f"algorithm.steps={STEPS}",
)  # fmt: skip


@contextmanager
def started(tmp_path: Path, num_hosts: int) -> Iterator[StubSlurm]:
    """A job on two hosts, which begins again on the others."""
    with hosts(num_hosts) as made:
        pairs = [made[:2], made[2:]]
        with StubSlurm(tmp_path, [pair for pair in pairs if pair]) as slurm:
            config = str(cli_runs.ROOT / "examples" / "quickstart.yaml")
            words = ("launch", "slurm", config, f"run.dir={tmp_path / 'run'}", *cli_runs.SMALL, *GIVEN)
            sizes = ("--nodes=2", "--cpus-per-node=2", "--submit")
            said = slurm.submit([sys.executable, "-m", "headrace.cli", *words, *sizes], tmp_path)
            assert f"Submitted batch job {JOB_ID}" in said
            yield slurm


def steps(tmp_path: Path) -> list[int]:
    """The steps of the run so far."""
    return [line["step"] for line in cli_runs.steps_of(tmp_path / "run")]


def has_ended_well(slurm: StubSlurm, tmp_path: Path, codes: list[int]) -> int:
    """Check the figures of a job that has started twice. Returns the step after which it went on."""
    assert (slurm.codes, slurm.starts, slurm.left) == (codes, 2, []), slurm.output()
    lines = cli_runs.metrics(tmp_path / "run")
    [at] = [line["step"] for line in lines if line.get("event") == "resumed"]
    border = next(index for index, line in enumerate(lines) if line.get("event") == "resumed")
    before = [line["step"] for line in lines[:border] if "reward/mean" in line and line["step"] <= at]
    after = [line["step"] for line in lines[border:] if "reward/mean" in line]
    assert after == list(range(at + 1, STEPS + 1)), slurm.output()
    assert before == list(range(1, at + 1)), slurm.output()
    assert not (tmp_path / "run" / f"slurm-{JOB_ID}" / "token").exists()
    return at


def test_a_job_stops_before_its_limit_and_goes_on_on_other_hosts(tmp_path: Path) -> None:
    """It stops with a checkpoint of its last step, so no figure is there twice."""
    with started(tmp_path, 4) as slurm:
        slurm.wait_for(lambda: len(steps(tmp_path)) >= 7)
        token = tmp_path / "run" / f"slurm-{JOB_ID}" / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
        told = json.loads((tmp_path / "run" / "actors.json").read_text())
        assert {actor["host"] for actor in told["actors"]} == {"host1", "host2"}
        slurm.near_limit()
        slurm.wait("COMPLETED")
        told = json.loads((tmp_path / "run" / "actors.json").read_text())
        assert {actor["host"] for actor in told["actors"]} == {"host3", "host4"}
        at = has_ended_well(slurm, tmp_path, [143, 0])
        figures = steps(tmp_path)
    assert 7 <= at < STEPS and len(figures) == len(set(figures))
    assert "the job goes back to the queue" in slurm.output()


def test_a_preempted_job_goes_on_on_other_hosts(tmp_path: Path) -> None:
    """Ray and the driver get SIGTERM at the same time, so the run goes on from an earlier checkpoint."""
    with started(tmp_path, 4) as slurm:
        slurm.wait_for(lambda: len(steps(tmp_path)) >= 7)
        slurm.preempt(GRACE_S)
        slurm.wait_for(lambda: slurm.starts == 2)
        [first] = slurm.codes
        slurm.wait("COMPLETED")
        at = has_ended_well(slurm, tmp_path, [first, 0])
    assert first != 0 and 5 <= at < STEPS


def test_a_cancelled_job_does_not_go_on(tmp_path: Path) -> None:
    with started(tmp_path, 2) as slurm:
        slurm.wait_for(lambda: len(steps(tmp_path)) >= 2)
        slurm.cancel(GRACE_S)
        slurm.wait("FAILED")
    assert slurm.starts == 1 and "back to the queue" not in slurm.output(), slurm.output()
    assert not (tmp_path / "run" / f"slurm-{JOB_ID}" / "token").exists()


def test_two_jobs_share_their_nodes(tmp_path: Path) -> None:
    """Each has a Ray of its own, and the end of one leaves the other alone."""
    with hosts(2) as made, ExitStack() as stack:
        jobs: list[StubSlurm] = []
        for number, count in ((1, 20), (2, 200)):
            folder = tmp_path / str(number)
            folder.mkdir()
            jobs.append(stack.enter_context(StubSlurm(folder, [made], JOB_ID + number)))
            config = str(cli_runs.ROOT / "examples" / "quickstart.yaml")
            words = ("launch", "slurm", config, f"run.dir={folder / 'run'}", *cli_runs.SMALL, *GIVEN)
            sizes = (f"algorithm.steps={count}", "--nodes=2", "--cpus-per-node=2", "--submit")
            jobs[-1].submit([sys.executable, "-m", "headrace.cli", *words, *sizes], folder)
        for job in jobs:
            job.wait("COMPLETED")
    for job, number, count in zip(jobs, (1, 2), (20, 200), strict=True):
        assert (job.codes, job.left) == ([0], []), job.output()
        assert steps(tmp_path / str(number)) == list(range(1, count + 1))


def test_a_node_without_ray_is_named(tmp_path: Path) -> None:
    """Its Ray cannot start, and the output of the job says where and why."""
    with hosts(2) as made, StubSlurm(tmp_path, [made]) as slurm:
        config = str(cli_runs.ROOT / "examples" / "quickstart.yaml")
        words = ("launch", "slurm", config, f"run.dir={tmp_path / 'run'}", *GIVEN, "--nodes=2", "--cpus-per-node=2")
        words += ("resources.start_timeout_s=15",)
        slurm.submit([sys.executable, "-m", "headrace.cli", *words], tmp_path)
        job = tmp_path / "job.sh"
        job.write_text(job.read_text().replace('ray start --address="$ADDRESS"', "ray start --address=nowhere"))
        slurm.submit(["sbatch", "job.sh"], tmp_path)
        slurm.wait("FAILED")
    assert "host2: Ray ended with code" in slurm.output() and "1 of 2 nodes joined Ray at 10.77.0.1:" in slurm.output()
