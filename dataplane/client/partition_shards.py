"""Routes a client's operations to the directory that serves their partition, in a data plane of several directories."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from ..blobs.row_references import with_its_rows
from ..meta import KVBatchMeta
from ..status import DataPlaneStatus
from .operations import Operations
from .steps import Steps


def shard_of(partition: str, count: int) -> int:
    """Return the number of the directory, of `count`, that serves a partition. It depends only on the name, so
    that clients can compute it. Blobs are where the rows are that refer to them."""
    return zlib.crc32(with_its_rows(partition).encode(errors="replace")) % count


class ShardedOperations:
    """Has the methods of `Operations`. Each is carried out by the directory that serves its partition."""

    def __init__(self, shards: Sequence[Operations]) -> None:
        self.shards = tuple(shards)
        """Operations of each directory, by its number."""
        first = shards[0]
        self.handle, self.store, self.stats, self.timeout = first.handle, first.store, first.stats, first.timeout

    def of(self, partition: str) -> Operations:
        """Return the operations of the directory that serves a partition. An argument that is no name gets those of the
        first one, which refuse it."""
        return self.shards[shard_of(partition, len(self.shards)) if isinstance(partition, str) else 0]

    def __getattr__(self, name: str) -> Callable[..., Steps[Any]]:
        """Return the operation of this name, whose first argument is a partition or a receipt."""
        if name.startswith("_"):
            raise AttributeError(name)

        def operation(where: Any, *arguments: Any) -> Steps[Any]:
            partition = where.partition if isinstance(where, KVBatchMeta) else where
            return getattr(self.of(partition), name)(where, *arguments)

        return operation

    def status(self, partition: str | None, timeout_s: float | None) -> Steps[DataPlaneStatus]:
        """Return the sum of what the directories report, or what that of one partition does."""
        if partition is not None:
            return (yield from self.of(partition).status(partition, timeout_s))
        total = yield from self.shards[0].status(None, timeout_s)
        for shard in self.shards[1:]:
            total = total.plus((yield from shard.status(None, timeout_s)))
        return total

    def forget_unit(self, units: Any, timeout_s: float | None) -> Steps[dict[str, tuple[str, ...]]]:
        """Forget units of the store, and the rows that they held, in all directories."""
        found: dict[str, tuple[str, ...]] = {}
        for shard in self.shards:
            found |= yield from shard.forget_unit(units, timeout_s)
        return found

    def close(self) -> Steps[None]:
        """Close the operations of all directories."""
        for shard in self.shards:
            yield from shard.close()
