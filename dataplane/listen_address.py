"""Chooses the address and the ports at which a process of a run listens, because other hosts connect to them.

A run's choice is a `Listening`. It is a setting of the whole process, which `Listening.adopt` makes: each process of a
run on several hosts belongs to that run alone, and whatever listens in it must stay in the range of ports.
"""

from __future__ import annotations

import ipaddress
import platform
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psutil

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PortRange:
    """Range of TCP ports, both ends included."""

    first: int
    last: int

    @staticmethod
    def parse(text: str) -> PortRange:
        """Read a range such as `20000-20999`. Raises ValueError for anything else."""
        first, dash, last = text.partition("-")
        if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
            raise ValueError(f"got {text!r}, expected a range of ports such as 20000-20999")
        ports = PortRange(int(first), int(last))
        if not 1024 <= ports.first <= ports.last < 1 << 16:
            raise ValueError(f"got {text!r}, expected ports from 1024 to 65535, the smaller one first")
        return ports

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def shuffled(self) -> Iterator[int]:
        """Iterate over all ports of the range, from a random one on, so that two runs seldom try the same port."""
        start = secrets.randbelow(len(self))
        return (self.first + (start + number) % len(self) for number in range(len(self)))

    def num_free(self, host: str) -> int:
        """Return how many ports of the range are free at the address `host` of this host."""
        return sum(1 for port in self.shuffled() if _is_free(host, port))


@dataclass(frozen=True, slots=True)
class Listening:
    """Addresses and ports at which the processes of one run listen, on each of its hosts."""

    one_host: bool = True
    """Whether all processes of the run are on one host; they then listen on loopback."""
    interface: str | None = None
    """Name of a network interface, or a network as `10.1.0.0/16`, which gives the address of each host. None: the
    address that Ray has for the host."""
    ports: PortRange | None = None
    """Range of the ports; None: any free ones."""
    num_ports: int = 1
    """Largest number of ports that the run needs on one host."""

    def address(self) -> str:
        """Return the IP address at which processes of this host listen. Without `interface`, on several hosts, the
        calling process must belong to Ray. Raises ValueError if this host has no such interface."""
        if self.one_host:
            return LOOPBACK
        return address_of(self.interface) if self.interface is not None else ray_address()

    def adopt(self) -> None:
        """Make these the settings of this process: `listen` then takes ports from `ports`."""
        global _current
        _current = self

    def exhausted(self, host: str) -> ValueError:
        """Return the error for a range of which no port is free at the address `host`."""
        return ValueError(
            f"resources.ports: got '{self.ports}', of which no port is free at {host} on host {platform.node()}, "
            f"expected a range with more ports: this run needs up to {self.num_ports} on each host"
        )


_current = Listening()


def listening() -> Listening:
    """Return the settings of this process."""
    return _current


def ray_address() -> str:
    """Return the IP address that Ray has for this host, or would choose for it."""
    import ray  # Only runs on several hosts, and the store `simple`, need Ray here.

    return ray.util.get_node_ip_address().strip("[]")


def address_of(interface: str) -> str:
    """Return this host's IP address of an interface, given its name, or in a network such as `10.1.0.0/16`.

    Among several, it is the first one, and one of version 4 if the interface has any. Raises ValueError with this
    host's name and interfaces if there is none that other hosts can reach.
    """
    own = _own()
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        found = own.get(interface, [])
    else:
        found = [address for addresses in own.values() for address in addresses if address in network]
    if found:
        return str(found[0])
    known = "; ".join(f"{name} has {', '.join(map(str, addresses))}" for name, addresses in own.items())
    raise ValueError(
        f"resources.interface: got {interface!r}, expected the name or the network of an interface of host "
        f"{platform.node()} ({known or 'it has none beside loopback'})"
    )


def join_host(host: str, port: int) -> str:
    """Return `host:port`, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_address(name: str, value: Any) -> str:
    """Return an IP address of this host as text. value: the address, or a host name that resolves to it.

    name: the argument, for errors. Raises ValueError for addresses that mean all addresses (`0.0.0.0`, `::`), for names
    that resolve to loopback (as `localhost`), and for any other value that is not an address of this host. The error
    lists the addresses of this host.
    """
    try:
        if not isinstance(value, str):
            raise ValueError("is not text")
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            address = _resolved(value)
        if address.is_unspecified:
            raise ValueError("means all addresses, and other hosts would connect to themselves")
        with closing(tcp_socket(str(address))) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        raise _refused(name, value, f"is not an address of this host ({error.strerror or error})") from None
    except ValueError as error:
        raise _refused(name, value, str(error)) from None
    return str(address)


def own_addresses() -> list[str]:
    """Return the IP addresses of this host at which others may reach it, those of version 4 first."""
    found = [address for addresses in _own().values() for address in addresses]
    return [str(address) for address in sorted(found, key=_order)]


def tcp_socket(host: str) -> socket.socket:
    """Return a new TCP socket of the family of the IP address or name `host`."""
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def _own() -> dict[str, list[Address]]:
    """Return the addresses of each interface at which other hosts may reach this one, those of version 4 first. An
    address of IPv6 that is valid on one link only is left out, because it is no address without its interface."""
    found: dict[str, list[Address]] = {}
    for name, entries in psutil.net_if_addrs().items():
        texts = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        addresses = [ipaddress.ip_address(text) for text in texts if "%" not in text]
        if usable := sorted((address for address in addresses if not address.is_loopback), key=_order):
            found[name] = usable
    return found


def _order(address: Address) -> tuple[int, int]:
    return address.version, int(address)


def _is_free(host: str, port: int) -> bool:
    with closing(tcp_socket(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _resolved(value: str) -> Address:
    """Return the address for which a host's name stands. Raises OSError if it stands for none, and ValueError if it is
    one that only this host can use."""
    if not value.strip():
        raise ValueError("is empty")
    address = ipaddress.ip_address(socket.getaddrinfo(value, 0, type=socket.SOCK_STREAM)[0][4][0])
    if address.is_loopback:
        raise ValueError(f"stands for {address}, at which other hosts would reach themselves")
    return address


def _refused(name: str, value: Any, why: str) -> ValueError:
    addresses = ", ".join(own_addresses()) or "127.0.0.1 alone"
    return ValueError(f"{name}: got {value!r}, which {why}; expected an IP address of this host ({addresses})")
