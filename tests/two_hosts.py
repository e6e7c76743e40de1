"""Two hosts for tests, made of Linux namespaces: each has its own network, /dev/shm, /proc, host name and Ray folder.

    with two_hosts() as (near, far):
        subprocess.run(near.command("ping", "-c1", far.address), check=True)

The hosts share the file system but for /dev/shm and /tmp/ray. As on many machines, a host's own name stands for a
loopback address, so a server at the address of its name is not found by the other host. All processes of a host are in
one process namespace, so they end with it, whatever happens to the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil
import pytest

START_TIMEOUT_S = 30.0
_TOOLS = ("unshare", "nsenter", "ip", "mount")
_HOST = """
set -e
hostname "$0"
mount -t tmpfs -o size=512m tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs -o size=512m tmpfs /tmp/ray
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$0" > /tmp/ray/hosts
mount --bind /tmp/ray/hosts /etc/hosts
ip link set lo up
echo ready
exec cat
"""
"""Shell script of a host's first process, which ends (and with it the host) when its standard input is closed."""


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two hosts."""

    name: str
    address: str
    """Its IP address, which the other host reaches."""
    pid: int
    """Id of its first process, as seen from outside."""

    def command(self, *arguments: str) -> list[str]:
        """The command that runs `arguments` on this host. Killing it from outside leaves its child alone; that ends
        with the host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid", "--", *arguments]


def needs_two_hosts() -> None:
    """Skip the test where namespaces cannot be made; in CI, where they can, fail it."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    reason = f"needs {', '.join(missing)}" if missing else "" if os.getuid() == 0 else "needs root to make namespaces"
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"two hosts: {reason}, and CI must not skip it")
    if reason:
        pytest.skip(f"two hosts: {reason}")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Context manager that makes two hosts with a network between them. At its end all of their processes are gone."""
    needs_two_hosts()
    with ExitStack() as stack:
        near = stack.enter_context(_host("near", "10.77.0.1"))
        far = stack.enter_context(_host("far", "10.77.0.2"))
        link = ("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(far.pid))
        _run("nsenter", f"--target={near.pid}", "--net", "--", *link)
        for host in (near, far):
            _run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"))
            _run(*host.command("ip", "link", "set", "eth0", "up"))
            _run(*host.command("ip", "route", "add", "default", "dev", "eth0"))
        yield near, far


@contextmanager
def _host(name: str, address: str) -> Iterator[Host]:
    namespaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    command = ["unshare", *namespaces, "sh", "-c", _HOST, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as outer:
        try:
            assert outer.stdout is not None
            assert outer.stdout.readline() == "ready\n", f"host {name} did not start"
            [first] = psutil.Process(outer.pid).children()
            yield Host(name, address, first.pid)
        finally:
            outer.kill()  # its child, the host's first process, dies with it, and so do all others of the host


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=START_TIMEOUT_S)
