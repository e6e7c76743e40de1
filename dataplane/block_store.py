"""Where bytes live: the protocol every store keeps, in its two halves.

`StoreHost` stands beside the directory (one per run): it starts and ends what the store owns, allocates and frees.
`BlockStore` is in every process that reads or writes: it moves bytes, and knows nothing of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from .meta import BlockRef


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """All a client process needs to attach to a run's store. Plain data."""

    kind: str
    """`local`, `shm`, `ray`, `simple`, `mooncake`."""
    run_id: str
    address: dict[str, object]
    """The store's own: names, ports, folders. msgpack-able."""


@dataclass(frozen=True, slots=True)
class Want:
    """Parts of one block that a reader needs whole."""

    block: BlockRef
    parts: tuple[int, ...]


class StoreHost(Protocol):
    """The half beside the directory.

    Called from one thread if it is `FreesMany`. Otherwise thread-safe, and no call waits for another process.
    """

    spec: StoreSpec

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """A location for `nbytes`, or None when the store has no room just now.

        b"" when the location is known only after the write. Then, it is called for the first block of a put with the
        bytes of all of them before they are written, and after that for each with its own.
        """
        ...

    def free(self, block_id: int, location: bytes) -> None:
        """Delete a block, written or not. Idempotent. Readers that hold its location get RowsCleared from then on."""
        ...

    def usage_bytes(self) -> int:
        """Bytes the store holds just now, by its own count."""
        ...

    def processes(self) -> dict[str, int]:
        """Return name -> pid of the store's own processes on this machine; empty when it has none."""
        ...

    def close(self) -> None:
        """End everything that this host started, by pid, and remove every file. Idempotent."""
        ...


@runtime_checkable
class Cuts(Protocol):
    """A host with addresses of its own: a put gets one range, which is cut once its blocks' sizes are known."""

    def has_ready(self, nbytes: int) -> bool:
        """Whether `allocate` of so many bytes would succeed at once."""
        ...

    def make_ready(self, nbytes: int) -> None:
        """See to it that `has_ready`, if there is room. May take its time."""
        ...

    def cut(self, block_id: int, sizes: Sequence[int]) -> list[bytes]:
        """The range of `block_id` becomes the blocks `block_id`, `block_id` + 1, ... end to end; the rest is free.

        sizes: multiples of `codecs.memory.ALIGN`. Returns the blocks' locations. Raises CapacityExceeded.
        """
        ...


@runtime_checkable
class FreesMany(Protocol):
    """A host to which freeing is a round trip, so that many blocks go in one."""

    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """`free` for each (block id, location)."""
        ...


@runtime_checkable
class PutsMany(Protocol):
    """A store to which writing is a round trip, so that all blocks of one put go in one."""

    def put_many(
        self, first_block_id: int, blocks: Sequence[Sequence[np.ndarray]], timeout_s: float
    ) -> tuple[bytes, ...]:
        """`BlockStore.put` of blocks with consecutive ids and equal numbers of parts. Returns their final locations.

        When it raises, some of the blocks may have been written.
        """
        ...


@runtime_checkable
class Serving(Protocol):
    """A host that holds the bytes itself and answers the stores of other processes through the directory's link."""

    def serve(self, request: bytes) -> bytes:
        """Answer one request of the kind's own BlockStore. Raises DataPlaneErrors as that store would."""
        ...


class BlockStore(Protocol):
    """The half in every process. Thread-safe. Every call returns or raises within `timeout_s`."""

    def put(
        self, block_id: int, location: bytes, parts: Sequence[np.ndarray], offsets: Sequence[int], timeout_s: float
    ) -> bytes:
        """Write the block's parts (uint8 1-D each; `offsets` when laid end to end). Returns the final location.

        The bytes have landed when it returns. Raises StoreLost naming the peer.
        """
        ...

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Per want: part number -> uint8 view of the whole part. Read-only; valid until `settle`.

        Raises RowsCleared when a block has been freed, StoreLost when its process does not answer.
        """
        ...

    def settle(self, wants: Sequence[Want]) -> None:
        """Called after the views of a `get` were copied and before the copies are handed out.

        Raises RowsCleared when a block was freed (and its memory perhaps reused) since.
        """
        ...

    def close(self) -> None:
        """Detach this process. Idempotent; the run's store goes on."""
        ...
