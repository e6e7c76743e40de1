"""Finds the address at which a train rank listens on its own host, and the network interface that has it.

A run on one host stays on loopback. On several hosts a rank listens at the address that Ray uses for the rank's host;
the driver's host may be another one.
"""

from __future__ import annotations

import os

import psutil

LOOPBACK = "127.0.0.1"


def own_address(*, one_host: bool) -> str:
    """Return the IP address at which the run's processes reach this process. It is loopback if all of them are on one
    host, else Ray's address of this host. The calling process must then be one of Ray's."""
    if one_host:
        return LOOPBACK
    import ray

    return ray.util.get_node_ip_address().strip("[]")


def bind_process_groups(address: str) -> None:
    """Bind the gloo and NCCL groups that this process makes from now on to the network interface of `address`. The
    address is an IP address of this host.

    Left alone, gloo takes whatever address the host's name stands for (loopback on many machines, which other hosts do
    not reach), and NCCL the first interface. The user's own GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME come first. A
    no-op if no interface has the address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return
