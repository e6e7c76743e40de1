"""Hosts made of namespaces reach each other until one is cut off or killed, and none reaches the hosts of others."""

from __future__ import annotations

import subprocess
import time

import psutil
import pytest

from headrace.bench.hosts.namespaces import Host
from headrace.tests.hosts import hosts

pytestmark = pytest.mark.processes
# A connection that is refused has reached its host, where no process listens.
CONNECT = """
import socket, sys
try: print("accepted", socket.create_connection((sys.argv[1], 9), timeout=0.3).recv(9))
except ConnectionRefusedError: print("refused")
except OSError: print("silence")
"""
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 9))
print("listens", flush=True)
server.accept()[0].send(b"hello")
"""


def told(host: Host, *command: str) -> str:
    """Return the output of a command on a host."""
    return subprocess.run(host.command(*command), capture_output=True, text=True, check=True, timeout=30).stdout


def connect(host: Host, address: str) -> str:
    return told(host, "python3", "-S", "-c", CONNECT, address)


def test_a_host_is_cut_off_healed_killed_and_started_again() -> None:
    with hosts(3) as (first, second, third):
        assert connect(first, second.address) == connect(second, third.address6) == "refused\n"
        second.cut()
        assert connect(first, second.address) == connect(second, third.address6) == "silence\n"
        assert connect(first, third.address) == "refused\n"
        second.heal()
        assert connect(first, second.address) == "refused\n"
        second.shape(1000)
        with subprocess.Popen(second.command("sh", "-c", "echo x > /dev/shm/left; cat"), stdin=subprocess.PIPE) as cat:
            while not told(second, "ls", "/dev/shm"):
                assert cat.poll() is None
                time.sleep(0.01)
            second.restart()
            assert cat.wait(10) == -9
        assert (told(second, "ls", "/dev/shm"), told(second, "hostname")) == ("", "host2\n")
        assert "dev eth0 root refcnt 3 rate 1Gbit" in told(second, "tc", "qdisc")
        assert connect(first, second.address) == connect(second, first.address6) == "refused\n"
        pids = [host.pid for host in (first, second, third)]
    assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []


def test_hosts_that_are_made_at_once_have_the_same_addresses_and_do_not_meet() -> None:
    with hosts(2) as (first, second), hosts(2) as (other, _):
        command = second.command("python3", "-S", "-c", LISTEN, second.address)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
            assert serving.stdout is not None and serving.stdout.readline() == "listens\n"
            assert connect(other, second.address) == "refused\n"
            assert connect(first, second.address) == "accepted b'hello'\n"
            assert serving.wait(30) == 0
