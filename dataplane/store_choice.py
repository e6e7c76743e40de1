"""Chooses the store of a run, checks that this host can provide it, and starts its part in the directory's process.

Stores whose ports ask for no key are refused, unless the configuration says that the network is trusted.
"""

from __future__ import annotations

import importlib.util
import ipaddress
from collections.abc import Sequence

from .block_store import StartsUnits, StoreHost, StoreSpec
from .config import DataPlaneConfig
from .imports import MissingExtra
from .listen_address import ray_address
from .security.ray_certificates import USE_TLS, ray_uses_tls
from .security.run_key import check_key_file, key_from_file, opens_with
from .stores.registry import store_entry
from .stores.shm_folder import check_room

_ALLOW = "set dataplane.trusted_network=true if everyone on that network may do so, or choose another store"


def build_store_host(config: DataPlaneConfig, run_id: str, host: str = "", *, nodes: Sequence[str] = ()) -> StoreHost:
    """Start the host part of the configured store, which allocates and frees blocks, in the calling process. host: IP
    address of this host at which clients of other hosts reach the store; "" when all clients are on this host. nodes:
    Ray's ids of the nodes with storage units; () for all. Raises ValueError as `check_store` does, also for a node."""
    check_store(config, one_host=not host)
    entry = store_entry(store_kind(config, one_host=not host))
    key = None if config.key_file is None else key_from_file(config.key_file, run_id, tls=config.tls)
    with opens_with(key):
        store = entry.open_host(config.store, run_id, host)
    if isinstance(store, StartsUnits):
        try:
            store.start_units(nodes)
        except BaseException:
            store.close()
            raise
    return store


def host_of_running(config: DataPlaneConfig, spec: StoreSpec) -> StoreHost:
    """Return another host of a store whose units run already on nodes of a Ray cluster."""
    go_on = store_entry(spec.kind).go_on
    assert go_on is not None, spec.kind
    return go_on(spec, config.store)


def store_kind(config: DataPlaneConfig, *, one_host: bool) -> str:
    """Return the kind of store that a data plane with this configuration uses. `auto` becomes `shm` on one host, else
    `tcp`."""
    if config.store.kind != "auto":
        return config.store.kind
    return "shm" if one_host else "tcp"


def check_store(config: DataPlaneConfig, *, one_host: bool = True) -> None:
    """Raise ValueError when this host cannot provide the configured store now, or must not. A store that accepts any
    peer on the network is refused unless the user allows it (see `check_trust`). Starts nothing.

    A dry run calls it on the host where the data plane would be opened.
    """
    kind = store_kind(config, one_host=one_host)
    check_trust(config, kind, one_host=one_host)
    if config.tls:
        check_tls(kind)
    if config.key_file is not None:
        check_key_file(config.key_file)
    if kind == "shm" and not one_host:
        raise ValueError(
            "dataplane.store.kind: got 'shm' for a run on several hosts, whose processes share no memory; expected "
            "'tcp', 'ray', 'simple' or 'mooncake', or 'auto', which chooses"
        )
    if kind == "shm" or kind == "tcp" and one_host:  # On several hosts, each unit checks its own host.
        check_room(config.store.capacity_mib << 20)


def check_tls(kind: str) -> None:
    """Raise ValueError when the connections of a store of this kind cannot be encrypted here. Imports nothing."""
    if kind in ("simple", "mooncake"):
        raise ValueError(
            f"dataplane.tls: got true with dataplane.store.kind={kind!r}, whose own connections cannot be encrypted, "
            "expected 'tcp' or 'auto'"
        )
    if kind == "ray" and not ray_uses_tls():
        raise ValueError(
            "dataplane.tls: got true with dataplane.store.kind='ray', whose rows travel by Ray's own connections, "
            f"expected {USE_TLS}=1 on all hosts, which encrypts these, or the store 'tcp'"
        )
    if importlib.util.find_spec("cryptography") is None:
        raise MissingExtra("cryptography", "dataplane.tls", "tls")


def check_trust(config: DataPlaneConfig, kind: str, *, one_host: bool) -> None:
    """Raise ValueError when a store of the given kind opens ports beyond loopback that ask for no key.
    `dataplane.trusted_network=true` allows it. Starts nothing.

    kind: kind of the store that is used, not `auto`. one_host: whether all processes of the run are on one host.
    """
    if config.trusted_network:
        return
    if kind == "simple":
        address = ray_address()
        if one_host and ipaddress.ip_address(address).is_loopback:
            # Ray prefers other addresses to a loopback address, so this host has no other one.
            return
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
