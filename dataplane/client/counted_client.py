"""Provides the base class of the clients, which joins operations with connections and counts what they do."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TypeVar, cast

from ..block_store import BlockStore
from ..directory import requests
from ..handle import DataPlaneHandle
from ..rpc.links import Link
from ..traffic import ClientStats
from .lease_renewal import LeaseRenewal
from .operations import Operations
from .partition_shards import ShardedOperations
from .steps import Ask, Moved, Steps

T = TypeVar("T")


class CountedClient:
    """Base class of the blocking client and the asyncio client. It counts calls, their bytes and their requests."""

    def __init__(
        self,
        handle: DataPlaneHandle,
        link: Link,
        store: BlockStore,
        name: str = "",
        others: Sequence[tuple[DataPlaneHandle, Link, BlockStore]] = (),
    ) -> None:
        """others: handle, link and store of each further directory of the data plane."""
        shards = [
            Operations(handle, store, LeaseRenewal(link, handle.config.lease_s), name)
            for handle, link, store in ((handle, link, store), *others)
        ]
        for shard in shards:
            shard.client, shard.stats = weakref.ref(self), shards[0].stats
        # A sharded one has the same methods, which it finds by name.
        self._operations = cast(Operations, ShardedOperations(shards)) if others else shards[0]
        self._link = link
        self._links = [shard.link for shard in shards]

    @property
    def plane_id(self) -> int:
        """Id of the data plane, which each of its receipts carries."""
        return self._operations.handle.store.plane_id

    @property
    def stats(self) -> ClientStats:
        """Counters of the calls of this client and of the bytes that they moved, since the client was created."""
        return self._operations.stats

    def _counted(self, steps: Steps[T]) -> Steps[T]:
        started, nbytes = time.monotonic(), 0
        try:
            result = yield from steps
            nbytes = result.nbytes if isinstance(result, Moved) else 0
            return result
        finally:
            op = str(getattr(steps, "__name__", ""))
            op = "put" if op == "write" else op
            self.stats.count_call(op, time.monotonic() - started, nbytes)

    def _body(self, step: Ask, reply: bytes, elapsed_s: float) -> bytes:
        self.stats.count_directory(len(step.payload) + len(reply))
        return requests.body_of(reply, step.op, elapsed_s)
