"""Opens data planes of every kind of store that the tests go through, and catches the reads of their clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headrace.dataplane.block_store import ReadsRanges
from headrace.dataplane.config import StoreConfig
from headrace.dataplane.factory import DataPlane, connect

SOCKETS, SHARDS = "-sockets", "-shards"
OTHER_STORES = ("local-shards", "tcp-sockets", "ray", "simple", "mooncake")
"""Kinds of store over which `make test` runs only the tests of the contract that `also_over` names them for; the others
run over `local`, `shm` and `tcp` there."""
LENDING = ("shm", "tcp")
"""Kinds whose reads are views of a pool, which a later block may overwrite."""


def store_config(kind: str, **settings: Any) -> StoreConfig:
    """Return the configuration of a store. `tcp-sockets` is `tcp`, as its clients on other hosts see it, and
    `local-shards` is `local` with two directories."""
    return StoreConfig.model_validate({"kind": kind.removesuffix(SOCKETS).removesuffix(SHARDS), **settings})


def num_directories(kind: str) -> int:
    """Return the number of directories with which the contract is tested over this kind."""
    return 2 if kind.endswith(SHARDS) else 1


def as_seen(kind: str, plane: DataPlane) -> DataPlane:
    """Return the plane, whose handle makes clients of `tcp-sockets` read and write over sockets alone."""
    if kind.endswith(SOCKETS):
        plane.handle = plane.handle.over_sockets()
    return plane


def store_of(client: Any, partition: str) -> Any:
    """Return the store of a client in which the rows of a partition are."""
    operations = client._operations
    return operations.of(partition).store if hasattr(operations, "shards") else operations.store


def put_one(text: str, key: str) -> None:
    """Put a row of three tokens into the partition `train`, in a process that has only the handle's text."""
    with connect(text) as client:
        client.put("train", [key], {"ids": [torch.arange(3)], "reward": torch.ones(1)})


def catch_reads(store: Any, kind: str, then: Callable[[list[dict[int, np.ndarray]]], Any]) -> None:
    """Call `then` after each read of a store, with what it read. It is given, for each block, part number -> bytes.
    What `then` returns, if anything, replaces it (not over sockets: there the memory itself may be changed)."""
    if kind.endswith(SOCKETS):
        assert isinstance(store, ReadsRanges)
        read_ranges = store.read_ranges

        def ranges(blocks: Any, wanted: Any, timeout_s: float) -> None:
            read_ranges(blocks, wanted, timeout_s)
            then([{1: item.into} for item in wanted])

        store.read_ranges = ranges  # type: ignore[method-assign]
        return
    get = store.get

    def views(*arguments: Any) -> Any:
        found = get(*arguments)
        return then(found) or found

    store.get = views
