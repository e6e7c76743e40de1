"""Refuses stores whose ports ask for no key, unless the configuration says that the network is trusted."""

from __future__ import annotations

import ipaddress

from ..config import DataPlaneConfig

_ALLOW = "set dataplane.trusted_network=true if everyone on that network may do so, or choose another store"


def check_trust(config: DataPlaneConfig, kind: str, *, one_host: bool) -> None:
    """Raise ValueError when a store of the given kind opens ports beyond loopback that ask for no key.
    `dataplane.trusted_network=true` allows it. Starts nothing.

    kind: kind of the store that is used, not `auto`. one_host: whether all processes of the run are on one host.
    """
    if config.trusted_network:
        return
    if kind == "simple":
        address = node_address()
        if one_host and ipaddress.ip_address(address).is_loopback:
            return  # the host has no other address; Ray replaces a loopback address that it is given
        raise ValueError(
            f"dataplane.trusted_network: got false with dataplane.store.kind='simple', expected true, because "
            f"TransferQueue's units listen on Ray's address of their host, such as {address}, also in a run on one "
            f"host, and run code that anyone sends there; {_ALLOW}"
        )
    if kind == "mooncake":
        raise ValueError(
            "dataplane.trusted_network: got false with dataplane.store.kind='mooncake', expected true, because each "
            "of Mooncake's clients listens on all addresses of its host, also in a run on one host, and lets anyone "
            f"read and overwrite its memory; {_ALLOW}"
        )


def node_address() -> str:
    """Return the IP address of this host in Ray, or the one that a Ray started here would choose."""
    import ray  # only the store `simple` needs it here

    return ray.util.get_node_ip_address().strip("[]")
