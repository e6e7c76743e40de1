"""Finds the module that implements each kind of store; a store is imported only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from ..block_store import BlockStore, StoreHost, StoreSpec
from ..config import StoreConfig
from ..rpc.links import Link

_MODULES = {
    "local": "local",
    "shm": "shared_memory",
    "ray": "ray_objects",
    "simple": "simple",
    "mooncake": "mooncake_store",
}
"""Module in this folder for each kind of store. Each module defines its StoreEntry as `STORE`."""


def _nothing() -> None:
    """No-op: the processes and bytes of the store end with the process that opened it, so there are no leftovers."""


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Holds the functions through which the data plane uses one kind of store."""

    open_host: Callable[[StoreConfig, str, bool], StoreHost]
    """Function that starts the store of a run, given the configuration, the run's id, and whether all clients are on
    this host."""
    attach: Callable[[StoreSpec, Link], BlockStore]
    """Function that joins the store from this process, given its spec and this process's link to the directory."""
    remove_leftovers: Callable[[], object] = _nothing
    """Function that removes what killed runs with this kind of store left on this machine. It keeps whatever living
    runs use."""


def store_entry(kind: str) -> StoreEntry:
    """Import the store of this kind, and return its entry. Raises ValueError for an unknown kind."""
    if kind not in _MODULES:
        raise ValueError(f"dataplane.store.kind: got {kind!r}, expected auto or one of {', '.join(_MODULES)}")
    entry = importlib.import_module(f".{_MODULES[kind]}", __package__).STORE
    assert isinstance(entry, StoreEntry), kind
    return entry
