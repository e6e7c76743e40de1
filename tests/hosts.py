"""Hosts for tests, which are namespaces of this machine, and a Ray cluster over them.

    with hosts(2) as (first, second):
        address = ray_cluster((first, second), cpus=(0, 3))
        code, output = finish(first, cli_runs.command(folder / "run", TRUSTED, f"resources.ray_address={address}"))

All that runs on the hosts ends with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bench.hosts import namespaces
from headrace.bench.hosts.namespaces import Host
from headrace.tests.runs import cli_runs

PORT = 6390
TRUSTED = "dataplane.trusted_network=true"
"""Override for a run on such a cluster, which asks for no token."""
ENVIRONMENT = {**cli_runs.environment(), "RAY_AUTH_MODE": "disabled"}  # no stranger reaches these hosts


def needs_hosts() -> None:
    """Skip the test where namespaces cannot be made; in CI, where they can, fail it."""
    reason = namespaces.why_no_hosts()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"hosts: {reason}, and CI must not skip it")
    if reason:
        pytest.skip(f"hosts: {reason}")


@contextmanager
def hosts(count: int, *, shm_mib: int = 512, name: str = "") -> Iterator[tuple[Host, ...]]:
    """Hosts named `host1`, `host2`, ..., or all of them `name`, or a skipped test; see `namespaces.hosts`."""
    needs_hosts()
    with namespaces.hosts(count, shm_mib=shm_mib, name=name) as made:
        yield made


def start(
    host: Host, command: Sequence[str], folder: Path | str = "/", environment: Mapping[str, str] = ENVIRONMENT
) -> subprocess.Popen[str]:
    """Start a command on a host. Its standard error goes to its output."""
    return subprocess.Popen(
        host.command(*command, folder=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def finish(
    host: Host,
    command: Sequence[str],
    folder: Path | str = "/",
    timeout_s: float = 240,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> tuple[int, str]:
    """Run a command on a host. Returns its exit code and its output."""
    with start(host, command, folder, environment) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            host.kill()  # a killed `nsenter` would leave its child alone
            raise AssertionError(f"not finished after {timeout_s} s:\n{process.communicate()[0]}") from None
    return process.returncode, output


def ray_cluster(
    members: Sequence[Host], cpus: Sequence[int], *, environment: Mapping[str, str] = ENVIRONMENT, ipv6: bool = False
) -> str:
    """Start a Ray cluster over hosts, whose head is the first. Returns the value for `resources.ray_address`. It ends
    with the hosts."""
    address = f"[{members[0].address6}]:{PORT}" if ipv6 else f"{members[0].address}:{PORT}"
    heads = [("--head", "--include-dashboard=false", f"--port={PORT}")]
    roles = heads + [(f"--address={address}",)] * (len(members) - 1)  # these wait for the head
    starting = [
        _start_ray(host, num_cpus, options, environment, ipv6)
        for host, num_cpus, options in zip(members, cpus, roles, strict=True)
    ]
    for process in starting:
        _succeed(process)
    return address


def join_ray(
    host: Host,
    address: str,
    cpus: int,
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = ENVIRONMENT,
) -> None:
    """Make a host, such as one that was restarted, a member of the cluster of `ray_cluster`. options: of
    `ray start`."""
    _succeed(_start_ray(host, cpus, (f"--address={address}", *options), environment, "[" in address))


def _start_ray(
    host: Host, num_cpus: int, options: Sequence[str], environment: Mapping[str, str], ipv6: bool
) -> subprocess.Popen[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    own = host.address6 if ipv6 else host.address
    sizes = (f"--num-cpus={num_cpus}", "--object-store-memory=80000000", f"--node-ip-address={own}")
    return start(host, [ray, "start", "--disable-usage-stats", *sizes, *options], environment=environment)


def _succeed(process: subprocess.Popen[str]) -> None:
    with process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
