"""Checks the address at which a process listens, because other hosts are given the same address to connect to."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import psutil


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
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        raise _refused(name, value, f"is not an address of this host ({error.strerror or error})") from None
    except ValueError as error:
        raise _refused(name, value, str(error)) from None
    return str(address)


def own_addresses() -> list[str]:
    """Return the IP addresses of this host at which others may reach it, those of version 4 first."""
    found = [
        (entry.family, entry.address)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    ]
    return [text for _, text in sorted(found) if not ipaddress.ip_address(text).is_loopback]


def _resolved(value: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
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
