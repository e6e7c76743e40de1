"""Addresses and ports at which the processes of a run listen: an interface, a range, and addresses of IPv6."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest

from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import connect, open_data_plane
from headrace.dataplane.listen_address import Listening, PortRange, address_of, join_host
from headrace.dataplane.security.authenticated_listener import listen
from headrace.testing.data_plane import fresh_run_id

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["fe80::1%eth0", "10.77.0.1"],
    "eth1": ["fd00:77::1", "10.78.0.1", "10.78.0.9"],
    "ib0": ["fd00:88::1"],
}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(text: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET6 if ":" in text else socket.AF_INET, address=text)

    found = {name: [entry(text) for text in texts] for name, texts in INTERFACES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.fixture
def own_ports() -> Iterator[PortRange]:
    """A range of four free ports, which this process has to use during the test."""
    with socket.create_server(("127.0.0.1", 0)) as any_free:
        first = min(any_free.getsockname()[1], 65000)
    ports = next(
        ports
        for start in range(first, 1024, -4)
        if (ports := PortRange(start, start + 3)).num_free("127.0.0.1") == len(ports)
    )
    Listening(ports=ports, num_ports=7).adopt()
    yield ports
    Listening().adopt()


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("eth0", "10.77.0.1"),
        ("eth1", "10.78.0.1"),
        ("ib0", "fd00:88::1"),
        ("10.78.0.0/16", "10.78.0.1"),
        ("10.78.0.9", "10.78.0.9"),
        ("fd00:77::/64", "fd00:77::1"),
    ],
)
def test_an_interface_is_found_by_name_and_by_network(interfaces: None, interface: str, address: str) -> None:
    assert address_of(interface) == address
    assert Listening(one_host=False, interface=interface).address() == address
    assert Listening(one_host=True, interface=interface).address() == "127.0.0.1"


@pytest.mark.parametrize("interface", ["eth7", "10.99.0.0/16", "lo", "127.0.0.0/8", "fe80::/10", "10.78.0.0/77", ""])
def test_an_interface_that_a_host_lacks_is_refused_with_those_that_it_has(interfaces: None, interface: str) -> None:
    told = f"resources.interface: got {interface!r}, expected the name or the network of an interface of host "
    known = "(eth0 has 10.77.0.1; eth1 has 10.78.0.1, 10.78.0.9, fd00:77::1; ib0 has fd00:88::1)"
    with pytest.raises(ValueError, match=re.escape(f"{told}{platform.node()} {known}")):
        address_of(interface)


@pytest.mark.parametrize("text", ["", "20000", "20000-", "a-b", "30000-20000", "80-90", "65000-65536", "-1-5"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"got {text!r}, expected "):
        PortRange.parse(text)


def test_a_range_is_what_its_text_says() -> None:
    ports = PortRange.parse("20000 - 20009")
    assert (str(ports), len(ports)) == ("20000-20009", 10)
    orders = [tuple(ports.shuffled()) for _ in range(50)]
    assert all(sorted(order) == list(range(20000, 20010)) for order in orders)
    assert len(set(orders)) > 1, "two runs seldom begin at the same port"


def test_ports_come_from_the_range_until_none_is_free(own_ports: PortRange) -> None:
    with ExitStack() as stack:
        taken = [stack.enter_context(listen("127.0.0.1")).getsockname()[1] for _ in range(4)]
        assert sorted(taken) == sorted(own_ports.shuffled()) and own_ports.num_free("127.0.0.1") == 0
        told = f"resources.ports: got '{own_ports}', of which no port is free at 127.0.0.1 on host {platform.node()}, "
        with pytest.raises(ValueError, match=f"{told}expected .* needs up to 7 on each host"):
            listen("127.0.0.1")
    assert own_ports.num_free("127.0.0.1") == 4


def test_a_port_whose_last_connections_linger_is_used_again(own_ports: PortRange) -> None:
    one = PortRange(own_ports.first, own_ports.first)
    Listening(ports=one).adopt()
    for _ in range(2):
        with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as client:
            listener.accept()[0].close()  # This end closes first, so that the connection lingers here.
            assert client.recv(1) == b""


def test_an_address_of_ipv6_is_put_in_brackets() -> None:
    assert join_host("10.0.0.1", 80) == "10.0.0.1:80"
    assert join_host("fd00:77::1", 80) == "[fd00:77::1]:80"


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_plane_is_reached_over_ipv6(kind: str) -> None:
    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": 16})
    config = DataPlaneConfig(store=store)
    with open_data_plane(config, run_id=fresh_run_id(), process=True, listen="::1") as plane:
        assert plane.handle.address is not None and plane.handle.address.host == "::1"
        with connect(plane.handle) as client:
            assert client.status() is not None
