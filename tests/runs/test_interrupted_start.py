"""Ctrl-C at any moment of a start ends all that was started. The run has a host of its own, made of namespaces, in
which nothing else can leave anything behind."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from headrace.bench.hosts.namespaces import Host
from headrace.tests.hosts import hosts
from headrace.tests.runs import cli_runs

pytestmark = [pytest.mark.processes, pytest.mark.slow]
STARTS_RAY = "Ray starts"
OPENS_FOLDER = "the run folder is opened"
STARTS_ACTORS = "actors start"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", [STARTS_RAY, OPENS_FOLDER, STARTS_ACTORS])
def test_an_interrupted_start_leaves_nothing(tmp_path: Path, moment: str) -> None:
    with hosts(1) as (host,):
        command = host.command(
            *cli_runs.command(tmp_path / "run", "warmup.corpus=none", "dataplane.store.capacity_mib=64"),
            folder=str(tmp_path),
        )
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=cli_runs.environment(),
        ) as process:
            driver = _wait_until(process, tmp_path / "run", moment)
            driver.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 130 and "Traceback" not in output, output
        left = subprocess.run(host.command("ls", "/dev/shm"), capture_output=True, text=True, check=True, timeout=30)
        assert left.stdout == ""
        assert _left(host) == []


def _wait_until(process: subprocess.Popen[str], run_dir: Path, moment: str) -> psutil.Process:
    """Wait for a moment of the start, and return the driver's process."""
    deadline = time.monotonic() + 240
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"not reached: {moment}:\n{process.communicate()[0]}")
        below = psutil.Process(process.pid).children(recursive=True)
        names = [_name(child) for child in below]
        reached = {
            STARTS_RAY: "gcs_server" in names,
            OPENS_FOLDER: (run_dir / "config.yaml").exists(),
            STARTS_ACTORS: any(name.startswith("ray::Early") for name in names),
        }
        if reached[moment]:
            return below[0]
        time.sleep(0.02)


def _name(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0].rpartition("/")[2]
    except psutil.Error:
        return ""


def _left(host: Host, timeout_s: float = 20.0) -> list[str]:
    """The processes of a host but its first and those that have ended, as soon as there are none, or after the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        listed = subprocess.run(
            host.command("ps", "-eo", "pid=,args="), capture_output=True, text=True, check=True, timeout=30
        )
        others = [line.strip() for line in listed.stdout.splitlines() if not line.strip().startswith("1 ")]
        others = [line for line in others if " ps -eo" not in line and "<defunct>" not in line]
        if not others or time.monotonic() > deadline:
            return others
        time.sleep(0.1)
