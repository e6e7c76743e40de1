"""Finds the module that implements each kind of store; a store is imported only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..block_store import BlockStore, StoreHost, StoreSpec

if TYPE_CHECKING:
    from ..config import StoreConfig
    from ..rpc.links import Link

_MODULES = {
    "local": "local",
    "shm": "shared_memory",
    "tcp": "tcp.host",
    "ray": "ray_objects",
    "simple": "simple",
    "mooncake": "mooncake_store",
}
"""Module in this folder for each kind of store. Each module defines its StoreEntry as `STORE`."""

WRAPPERS: dict[str, Callable[[StoreEntry], StoreEntry]] = {}
"""Functions that replace the entry of a kind of store in this process. Tests add a function to make a store fail."""


def _nothing() -> None:
    """No-op: the processes and bytes of the store end with the process that opened it, so there are no leftovers."""


class StorageUnitProcess(Protocol):
    """A storage unit that this process has started. It ends with this process at the latest."""

    pid: int

    def close(self) -> None:
        """End the unit's process; its rows are lost. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Holds the functions through which the data plane uses one kind of store."""

    open_host: Callable[[StoreConfig, str, str], StoreHost]
    """Function that starts the store of a run. Its arguments are the configuration, the run's id, and the IP address of
    this host for clients of other hosts; "" when all clients are on this host."""
    attach: Callable[[StoreSpec, Link], BlockStore]
    """Function that joins the store from this process. Its arguments are the store's spec and the link to the
    directory."""
    remove_leftovers: Callable[[], object] = _nothing
    """Function that removes the leftovers of killed runs with this kind of store from this machine. The files and
    processes of running runs are kept."""
    open_unit: Callable[[StoreSpec, StoreConfig, Link, str, float], StorageUnitProcess] | None = None
    """Function that starts a storage unit on this host for a store that runs elsewhere. Its arguments are the store's
    spec and configuration, the link to the directory, the IP address at which the unit listens, and a time limit in
    seconds. None for kinds of store that no unit can join."""
    go_on: Callable[[StoreSpec, StoreConfig], StoreHost] | None = None
    """Function that makes another host, in another process, of a store whose units run on nodes of a Ray cluster. Its
    arguments are the store's spec and configuration. None for kinds of store without such units."""


def store_entry(kind: str) -> StoreEntry:
    """Import the store of this kind, and return its entry. Raises ValueError for an unknown kind."""
    if kind not in _MODULES:
        raise ValueError(f"dataplane.store.kind: got {kind!r}, expected auto or one of {', '.join(_MODULES)}")
    entry = importlib.import_module(f".{_MODULES[kind]}", __package__).STORE
    assert isinstance(entry, StoreEntry), kind
    return WRAPPERS[kind](entry) if kind in WRAPPERS else entry
