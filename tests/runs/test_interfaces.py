"""Runs over hosts with several interfaces, a range of ports for their services, or addresses of IPv6 alone."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bench.hosts.namespaces import Host
from headrace.tests.hosts import TRUSTED, finish, hosts, ray_cluster, start
from headrace.tests.runs import cli_runs
from headrace.tests.waiting import wait_until

pytestmark = pytest.mark.processes
SHORT = ("validation.every=0", "warmup.corpus=none", "dataplane.store.capacity_mib=64", TRUSTED)
SCRIPTED = ("rollout.engine=scripted", "trainer.backend=scripted")
PORTS = range(20000, 20100)
RAY_PORTS = range(10002, 20000)
"""Ports from which Ray chooses those of its workers."""
LISTENING = """
import json, psutil
known = {p.pid: " ".join(p.cmdline()) for p in psutil.process_iter()}
found = [one for one in psutil.net_connections("tcp") if one.status == "LISTEN"]
print(json.dumps([(one.laddr.ip, one.laddr.port, known.get(one.pid, "")) for one in found]))
"""
"""Program that prints address, port and command of each listening socket of a host."""
NETWORKS = ("10.88.0.0/24", "fd00:88::/64")
OWN_NETWORK = """
import sys
from headrace.dataplane.listen_address import address_of
for name in sys.argv[1:]:
    try:
        print(address_of(name))
    except ValueError as error:
        print(error)
"""


def add_link(first: Host, second: Host) -> None:
    """Give two hosts another interface, `eth1`, with a link between them that does not go through the switch."""
    link = ("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", str(second.pid))
    _run("nsenter", f"--target={first.pid}", "--net", "--", *link)
    for number, host in enumerate((first, second), start=1):
        for network in map(ipaddress.ip_network, NETWORKS):
            address = f"{network[number]}/{network.prefixlen}"
            _run(*host.command("ip", "addr", "add", address, "dev", "eth1", *(["nodad"] * (network.version == 6))))
        _run(*host.command("ip", "link", "set", "eth1", "up"))


def take_ipv4(host: Host) -> None:
    """Leave a host only its addresses of IPv6, and loopback."""
    _run(*host.command("ip", "-4", "addr", "flush", "dev", "eth0"))


def listening(host: Host) -> list[tuple[str, int, str]]:
    """Address, port and command of each listening TCP socket of a run's actors on a host."""
    code, output = finish(host, [sys.executable, "-c", LISTENING], timeout_s=60)
    assert code == 0, output
    rays = ("ray::IDLE", "ray::RuntimeEnvAgent", "ray::DashboardAgent")
    ours = [tuple(entry) for entry in json.loads(output) if entry[2].startswith("ray::")]
    return [(ip, port, command.strip()) for ip, port, command in ours if not command.startswith(rays)]


@contextmanager
def in_training(driver: Host, run_dir: Path, address: str, *overrides: str) -> Iterator[None]:
    """A run on hosts that has done two steps, and goes on until the end of the context."""
    endless = (f"resources.ray_address={address}", "algorithm.steps=100000")
    command = cli_runs.command(run_dir, *SHORT, *overrides, *endless)
    with start(driver, command, run_dir.parent) as process:
        try:
            wait_until(lambda: process.poll() is not None or len(steps(run_dir)) > 1, "no step", 200)
            assert process.poll() is None, process.communicate()[0]
            yield
        finally:
            driver.kill()


def steps(run_dir: Path) -> list[int]:
    """The steps that a run has done; [] before its first."""
    if not (run_dir / "metrics.jsonl").exists():
        return []
    return [line["step"] for line in cli_runs.metrics(run_dir) if "reward/mean" in line]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30, capture_output=True)


@pytest.mark.timeout(120)
def test_a_host_knows_its_address_in_a_network() -> None:
    with hosts(2) as (first, second):
        add_link(first, second)
        names = ("eth0", "eth1", "10.77.0.0/16", *NETWORKS, "fd00:77::/64", "ib0")
        command = [sys.executable, "-c", OWN_NETWORK, *names]
        found = [finish(host, command, timeout_s=60)[1].splitlines() for host in (first, second)]
    for number, lines in enumerate(found, start=1):
        own4, own6 = f"10.77.0.{number}", f"fd00:77::{number}"
        assert lines[:-1] == [own4, f"10.88.0.{number}", own4, f"10.88.0.{number}", f"fd00:88::{number}", own6]
        assert lines[-1] == (
            "resources.interface: got 'ib0', expected the name or the network of an interface of host "
            f"host{number} (eth0 has {own4}, {own6}; eth1 has 10.88.0.{number}, fd00:88::{number})"
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("network", "store", "num_ports"), [(NETWORKS[0], "tcp", 6), (NETWORKS[1], "simple", 5)])
def test_all_services_listen_at_the_interface_in_the_range(
    tmp_path: Path, network: str, store: str, num_ports: int
) -> None:
    """Ray's own interface is another one. Only the ports of gloo are not in the range. They are at the interface, too,
    but gloo takes its first address, which is that of IPv4."""
    own = (f"resources.interface={network}", f"resources.ports={PORTS[0]}-{PORTS[-1]}", f"dataplane.store.kind={store}")
    ranks = ("trainer.dp=2", "rollout.num_engines=1", "rollout.num_actors=1", "sync.transport=collective")
    with hosts(2) as (first, second):
        add_link(first, second)
        address = ray_cluster((first, second), (2, 2))
        with in_training(first, tmp_path / "run", address, *own, *ranks):
            found = {host.name: listening(host) for host in (first, second)}
    known = ipaddress.ip_network(network)
    for number, name in enumerate(("host1", "host2"), start=1):
        ours = [(ip, port, command) for ip, port, command in found[name] if port not in RAY_PORTS]
        elsewhere = [entry for entry in ours if ipaddress.ip_address(entry[0]) != known[number]]
        assert all(ip == f"10.88.0.{number}" and port not in PORTS for ip, port, _ in elsewhere), found[name]
        gloo = [entry for entry in ours if entry[1] not in PORTS]
        assert all("Engine" in command or "Train" in command for _, _, command in gloo), gloo
    # Directory, units, the rendezvous of the ranks and that of the weights, and the sender of weights have a port each.
    assert sum(port in PORTS for entries in found.values() for _, port, _ in entries) == num_ports, found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_needs_no_port_beyond_the_range(tmp_path: Path) -> None:
    own = (f"resources.ports={PORTS[0]}-{PORTS[-1]}", "sync.transport=store")
    with hosts(2) as (first, second):
        address = ray_cluster((first, second), (0, 3))
        with in_training(first, tmp_path / "run", address, *SCRIPTED, *own):
            found = [entry for host in (first, second) for entry in listening(host)]
    assert {port in PORTS or port in RAY_PORTS for _, port, _ in found} == {True}, found
    assert sum(port in PORTS for _, port, _ in found) == 2, found  # of the directory and the storage unit


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_range_without_a_free_port_is_told(tmp_path: Path) -> None:
    with hosts(2) as (first, second):
        address = ray_cluster((first, second), (0, 3))
        ports = (f"resources.ray_address={address}", "resources.ports=20000-20000", "trainer.dp=2")
        code, output = finish(first, cli_runs.command(tmp_path / "run", *SHORT, *SCRIPTED, *ports), tmp_path)
    assert code == 2 and "host host2: resources.ports: got '20000-20000' with 1 free at 10.77.0.2, expected" in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_over_ipv6_alone(tmp_path: Path) -> None:
    """Ray, the data plane, gloo and weights use addresses of IPv6; the hosts have no others."""
    ranks = ("trainer.dp=2", "rollout.num_engines=1", "rollout.num_actors=1", "sync.transport=collective")
    with hosts(2) as members:
        for host in members:
            take_ipv4(host)
        address = ray_cluster(members, (2, 2), ipv6=True)
        run = (*SHORT, *ranks, f"resources.ray_address={address}", "algorithm.steps=2")
        code, output = finish(members[0], cli_runs.command(tmp_path / "run", *run), tmp_path, 400)
    assert code == 0, output
    assert steps(tmp_path / "run") == [1, 2]
