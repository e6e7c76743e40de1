"""Defines the protocol that every store implements, in its two halves.

`StoreHost` runs beside the directory, once per run: it starts and ends the store's processes, and allocates and frees.
`BlockStore` runs in every process that reads or writes: it moves bytes, and knows nothing of rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from .meta import BlockRef


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Describes a run's store to a process that wants to attach to it. Plain data."""

    kind: str
    """Kind of the store: `local`, `shm`, `ray`, `simple` or `mooncake`."""
    run_id: str
    address: dict[str, object]
    """Names, ports or folders that only the store itself reads. Must be encodable as msgpack."""
    plane_id: int = field(default_factory=lambda: 1 + secrets.randbelow((1 << 63) - 1))
    """Random number of this data plane, from 1 to 2^63 - 1, which its receipts carry. Block ids begin at 1 in every
    data plane, so that only this number tells a receipt of another one, also of an earlier one of the same `run_id`."""


@dataclass(frozen=True, slots=True)
class Want:
    """Names the parts of one block that a reader needs whole."""

    block: BlockRef
    parts: tuple[int, ...]


class StoreHost(Protocol):
    """Allocates and frees the store's blocks, beside the directory.

    A host that is `FreesMany` is called from one thread. Any other must be thread-safe, and its calls wait for no other
    process.
    """

    spec: StoreSpec

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Return a location for `nbytes`, or None when the store has no room at the moment.

        A store that learns the location only from the write returns b"". Its `allocate` is called once before a put
        writes, with the first block's id and the bytes of all blocks, and once for each block afterwards, with its own
        bytes.
        """
        ...

    def free(self, block_id: int, location: bytes) -> None:
        """Delete a block, written or not. Idempotent. Readers that hold its location get RowsCleared from now on."""
        ...

    def usage_bytes(self) -> int:
        """Return the number of bytes that the store holds now, by its own count."""
        ...

    def unfreed_bytes(self) -> int:
        """Return the number of bytes of freed blocks that the store still holds, as a process of it has not answered or
        a writer is still in them. They become free without another call, so a put that waits looks again."""
        ...

    def shortage(self) -> str:
        """Say why `allocate` has no room, for the error of a put that waited in vain; "" when it always has."""
        ...

    def processes(self) -> dict[str, int]:
        """Return name -> pid of the store's own processes on this machine; empty when it has none."""
        ...

    def close(self) -> None:
        """End everything that this host started, by pid, and remove its files. Idempotent."""
        ...


@runtime_checkable
class Cuts(Protocol):
    """Marks a host that knows locations before the write: a put gets one range, which is cut when its blocks' sizes are
    known."""

    def has_ready(self, nbytes: int) -> bool:
        """Return whether `allocate` of `nbytes` would succeed at once."""
        ...

    def make_ready(self, nbytes: int) -> None:
        """Prepare so that `has_ready` becomes true, if there is room. May take its time."""
        ...

    def cut(self, block_id: int, sizes: Sequence[int]) -> list[bytes]:
        """Cut the range of `block_id` into the blocks `block_id`, `block_id` + 1, ... end to end, and free the rest.

        sizes: multiples of `codecs.memory.ALIGN`. Returns the blocks' locations. Raises CapacityExceeded.
        """
        ...


@runtime_checkable
class FreesMany(Protocol):
    """Marks a host for which freeing is a round trip, so that many blocks are freed in one call."""

    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Free each (block id, location), as `free` does."""
        ...


@runtime_checkable
class PutsMany(Protocol):
    """Marks a store for which writing is a round trip, so that all blocks of one put are written in one call."""

    def put_many(
        self, first_block_id: int, blocks: Sequence[Sequence[np.ndarray]], timeout_s: float
    ) -> tuple[bytes, ...]:
        """Write blocks with consecutive ids and equal numbers of parts, as `BlockStore.put` does. Returns their
        locations.

        When it raises, some of the blocks may have been written.
        """
        ...


@runtime_checkable
class Serving(Protocol):
    """Marks a host that holds the bytes itself and answers stores in other processes over the directory's link."""

    def serve(self, request: bytes) -> bytes:
        """Answer one request of this kind's BlockStore. Raises the DataPlaneErrors that the store would raise."""
        ...


class BlockStore(Protocol):
    """Reads and writes blocks, in every process. Thread-safe. Every call returns or raises within `timeout_s`."""

    def put(
        self, block_id: int, location: bytes, parts: Sequence[np.ndarray], offsets: Sequence[int], timeout_s: float
    ) -> bytes:
        """Write the block's parts (uint8 1-D each, at `offsets` when laid end to end). Returns the final location.

        The bytes have landed when it returns. Raises StoreLost naming the peer.
        """
        ...

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Return, for each want, part number -> uint8 view of the whole part. The views are read-only and valid until
        `settle`.

        Raises RowsCleared when a block was freed, StoreLost when its process does not answer.
        """
        ...

    def settle(self, wants: Sequence[Want]) -> None:
        """Confirm that the views of a `get` were valid while they were copied. Called before the copies are handed out.

        Raises RowsCleared when a block was freed since, as its memory may have been used again.
        """
        ...

    def close(self) -> None:
        """Detach this process. Idempotent. The run's store goes on."""
        ...
