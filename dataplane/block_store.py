"""Defines the protocols of a store for the bytes of rows, mainly `StoreHost` and `BlockStore`.

A block is a group of rows stored together. `StoreHost` runs once per run, in the process of the directory (the data
plane's metadata service): it starts and ends the store's processes, and allocates and frees blocks. `BlockStore` runs
in every process that reads or writes: it moves the bytes of blocks, and does not use rows.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from .security.run_key import opened_key

if TYPE_CHECKING:
    from ..codecs.blocks import BlockPieces
    from .meta import BlockRef


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Description of a run's store, with which processes attach to it. It is plain data."""

    kind: str
    """Kind of the store: `local`, `shm`, `tcp`, `ray`, `simple` or `mooncake`."""
    run_id: str
    address: dict[str, object]
    """Names, ports or folders that locate the store. Only the store's own code reads them. Must be encodable as
    msgpack."""
    plane_id: int = field(default_factory=lambda: 1 + secrets.randbelow((1 << 63) - 1))
    """Random id of this data plane, from 1 to 2^63 - 1. Every receipt (the keys and locations of rows, without their
    content) carries this id. Block ids begin at 1 in every data plane, so only this id distinguishes receipts of
    different data planes, even those of earlier runs with the same `run_id`."""
    key: bytes = field(default_factory=opened_key, repr=False)
    """Secret of this data plane. At every connection both ends prove that they know the key (see `handshake.py`)."""


HOLDER_BYTES = 2
"""Number of bytes at the beginning of a block's location that hold the number of the block's holder. The holder is one
of several processes of a store, each of which can die without the others."""


SERVED_DEAD = b"dead"
"""Beginning of a request to a store host (`Serving.serve`) which says that a holder is dead; its name follows."""
ANY_HOLDER = -1
"""Number that stands for any of a store's holders."""


def holder_of(location: bytes) -> int:
    """Return the number of the process that holds the block at a location.

    The store must have several such processes (see HOLDER_BYTES).
    """
    return int.from_bytes(location[:HOLDER_BYTES])


@dataclass(frozen=True, slots=True)
class Want:
    """Request to read one block: which block, and the numbers of the parts (byte arrays of the block) to read."""

    block: BlockRef
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ByteRanges:
    """Request to copy R ranges of bytes of blocks into one piece of memory, end to end."""

    into: np.ndarray
    """Memory to fill with the ranges, uint8 `[sum(nbytes)]`."""
    block: np.ndarray
    """Position of each range's block in the list of blocks of the call, int64 `[R]`."""
    start: np.ndarray
    """First byte of each range within its block, int64 `[R]`."""
    nbytes: np.ndarray
    """Number of bytes of each range, int64 `[R]`."""


class StoreHost(Protocol):
    """Part of a store that allocates and frees blocks (groups of rows stored together), once per run. It runs in the
    process of the directory (the data plane's metadata service).

    A host that implements `FreesMany` is called from one thread, except for `count`. All other hosts must be
    thread-safe, and their calls must not wait for another process.
    """

    spec: StoreSpec

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Allocate `nbytes` bytes and return their location, or None when the store has no room at the moment.

        A store that learns locations only when blocks are written returns b"". For such a store, `allocate` is called
        once before a put writes, with the id of the first block and the size of all blocks together, and again for each
        block when the put is committed, with the size of that block.
        """
        ...

    def free(self, block_id: int, location: bytes) -> None:
        """Delete a block, whether it was written or not. Idempotent. From then on, reading from its location raises
        RowsCleared."""
        ...

    def usage_bytes(self) -> int:
        """Return the number of bytes that the store holds now, by its own count."""
        ...

    def unfreed_bytes(self) -> int:
        """Return the number of bytes of freed blocks that the store still holds. It holds them because one of its
        processes has not answered yet or a writer still uses them. The store frees them later by itself, so a put that
        waits for room must check again."""
        ...

    def shortage(self) -> str:
        """Return the reason why `allocate` has no room; "" for a store that always has room. The error of a put that
        waited for room until its time limit contains it."""
        ...

    def processes(self) -> dict[str, int]:
        """Return the store's own processes on this machine, as name -> pid; empty when it has none."""
        ...

    def close(self) -> None:
        """End all processes that this host started, by their pids, and remove its files. Idempotent."""
        ...


@runtime_checkable
class Cuts(Protocol):
    """Protocol of a store host that knows where blocks will be stored before they are written. A put gets one range of
    bytes, which is cut into blocks once their sizes are known."""

    def has_ready(self, nbytes: int) -> bool:
        """Return whether `allocate` of `nbytes` would succeed at once."""
        ...

    def make_ready(self, nbytes: int) -> None:
        """Prepare memory so that `has_ready(nbytes)` becomes true, if there is room. This may take a while."""
        ...

    def cut(self, block_id: int, sizes: Sequence[int]) -> list[bytes]:
        """Cut the range allocated for `block_id` into blocks `block_id`, `block_id` + 1, ..., and free the rest.

        The blocks lie end to end. sizes: number of bytes of each block, multiples of `codecs.memory.ALIGN`. Returns the
        blocks' locations. Raises CapacityExceeded when the store cannot hold so many blocks.
        """
        ...


@runtime_checkable
class FreesMany(Protocol):
    """Protocol of a store host that frees many blocks in one call, since freeing takes a round trip."""

    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Free the given blocks, each a pair (block id, location), as `free` does."""
        ...

    def count(self, block_id: int, nbytes: int) -> bool:
        """Allocate as `allocate` does, but without waiting for another process, and from any thread. Returns False if
        the store must ask its processes first; nothing is allocated then."""
        ...


@runtime_checkable
class FreesSoon(Protocol):
    """Protocol of a store host that frees blocks from the event loop of its caller, without a thread."""

    def free_soon(self, blocks: Sequence[tuple[int, bytes]], done: Callable[[bool], None]) -> bool:
        """Begin to free the given blocks, as `FreesMany.free_many` does. Returns False if only `free_many` can.

        done: function that is called on the running event loop, with whether they were freed. If not, `free_many` must
        be called for them."""
        ...


@runtime_checkable
class HasHolders(Protocol):
    """Protocol of a store host whose blocks are in several other processes (holders). The location of each block begins
    with the number of its holder, in HOLDER_BYTES bytes."""

    @property
    def dead(self) -> Mapping[int, str]:
        """Names of the holders that are proven dead, by number. Their blocks are lost."""
        ...

    def look(self) -> None:
        """Ask every holder for a sign of life, in bounded time, and add those that are proven dead to `dead`. A holder
        that only does not answer may be stopped or busy, and is not added."""
        ...

    def declare_dead(self, named: str) -> None:
        """Add the holders with this name, or on the Ray node with this id, to `dead`, although nothing proves it. Their
        host may be cut off for good, so that their connections neither answer nor break."""
        ...


@runtime_checkable
class HasRooms(Protocol):
    """Protocol of a store host whose holders are on several hosts. Each host is a room with a capacity of its own."""

    @property
    def rooms(self) -> Mapping[int, str]:
        """Names of the hosts with a living holder, by number; never empty."""
        ...

    def room_of(self, holder: int) -> int:
        """Return the number of a holder's host."""
        ...

    def holder_in(self, room: int) -> int:
        """Return the number of a holder on a host."""
        ...


@runtime_checkable
class StartsUnits(Protocol):
    """Protocol of a store host whose storage units may be on nodes of a Ray cluster. The host that starts and ends them
    is in the directory's Ray actor. The one that the directory uses is in another process, which has no Ray."""

    def lacks_unit(self, node: str) -> bool:
        """Return whether this node, given by Ray's id, has no living unit. False if the units are not on Ray's
        nodes."""
        ...

    def start_units(self, nodes: Sequence[str]) -> list[bytes]:
        """Start a unit on each of these nodes, given by Ray's ids; () stands for all living nodes. Returns for each the
        request (`Serving.serve`) that adds it to another host of the same store. A no-op for a store whose units are
        elsewhere. Thread-safe; takes seconds. Raises ValueError if a node has no room for a unit, and StoreLost if one
        does not start in time."""
        ...


@runtime_checkable
class Recovers(Protocol):
    """Protocol of a store host whose bytes outlive the directory's process. Another process, forked from the one that
    opened the host, goes on with it."""

    def adopt(self, blocks: Sequence[tuple[int, bytes, int]], next_block: int) -> None:
        """Go on in a process that was forked from the opener, for which `close` does nothing. It is called before all
        other calls. blocks: id, location and number of bytes of each block that rows refer to. All other blocks are
        freed, because their reservations died with the earlier process. next_block: id above those of all blocks."""
        ...


@runtime_checkable
class NamesHolders(Protocol):
    """Protocol of a `BlockStore` whose blocks are in several processes (holders), each of which can die alone."""

    @property
    def holders(self) -> Sequence[str]:
        """Name of each holder, as errors give it in `peer`."""
        ...


@runtime_checkable
class ChoosesHolders(Protocol):
    """Protocol of a `BlockStore` whose processes (holders) are on several hosts, and which can choose among them."""

    def near(self, timeout_s: float) -> int:
        """Return the number of a living holder on this process's host; ANY_HOLDER if there is none."""
        ...

    def host_of(self, holder: int) -> str:
        """Return the host of a holder, as `pid_space` returns it there; "" if it is unknown."""
        ...

    def avoid(self, dead: Collection[int]) -> bool:
        """Write nothing to these holders any more. Returns whether that is new for one of them."""
        ...

    def put_to(
        self, holder: int, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float
    ) -> tuple[bytes, ...]:
        """Write blocks as `PutsMany.put_many` does, to the host of a holder if possible. ANY_HOLDER leaves the choice
        to the store."""
        ...


@runtime_checkable
class PutsMany(Protocol):
    """Protocol of a store that writes all blocks of a put in one call, since writing takes a round trip."""

    def put_many(self, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float) -> tuple[bytes, ...]:
        """Write several blocks as `BlockStore.put` does, and return their locations.

        blocks: the parts of each block, each in pieces. The first block has the id `first_block_id`, and the ids of
        the others follow. When this raises, some of the blocks may have been written.
        """
        ...


class PutsAll(ABC):
    """Base class of stores that write all blocks of a put in one call, and a single block in the same way."""

    def put(
        self, block_id: int, location: bytes, parts: Iterable[np.ndarray], offsets: Sequence[int], timeout_s: float
    ) -> bytes:
        """Write one block as `put_many` does; see `BlockStore.put`."""
        return self.put_many(block_id, [tuple((part,) for part in parts)], timeout_s)[0]

    @abstractmethod
    def put_many(self, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float) -> tuple[bytes, ...]:
        """Write several blocks; see `PutsMany`."""


@runtime_checkable
class Serving(Protocol):
    """Protocol of a store host that holds the bytes in its own process. It answers requests of BlockStores in other
    processes, which send them over their connections to the directory (metadata service)."""

    def serve(self, request: bytes) -> bytes:
        """Carry out one request of a BlockStore of this kind and return the reply. A DataPlaneError raised here is
        raised again by that BlockStore."""
        ...


@runtime_checkable
class ReadsRanges(Protocol):
    """Protocol of a store that can read any ranges of bytes of blocks. A reader of some rows then moves only the bytes
    of these rows."""

    def lends(self, blocks: Sequence[BlockRef]) -> bool:
        """Return whether `get` returns views of these blocks without moving their bytes."""
        ...

    def read_ranges(self, blocks: Sequence[BlockRef], ranges: Sequence[ByteRanges], timeout_s: float) -> None:
        """Read ranges of bytes of `blocks` into the memory that each `ByteRanges` names. When this returns, the bytes
        are those of the blocks, and `settle` need not be called.

        Raises RowsCleared when one of `blocks` was freed, and StoreLost as `BlockStore.get` does.
        """
        ...


class BlockStore(Protocol):
    """Part of a store that runs in every process that reads or writes rows, and moves the bytes of blocks. Thread-safe.
    Every call returns or raises within `timeout_s`. A process that is only slow is reported by DataPlaneTimeout, with
    the bytes that were moved where the store knows them."""

    def put(
        self, block_id: int, location: bytes, parts: Iterable[np.ndarray], offsets: Sequence[int], timeout_s: float
    ) -> bytes:
        """Write a block and return its final location. The store holds all bytes when this returns.

        location: what `StoreHost.allocate` returned. parts: uint8 1-D each, the parts in their order. If the location
        is not empty, they can be pieces of parts in any order; each must be copied before the next is taken. offsets:
        first byte of each when the parts are laid end to end. Raises RowsCleared when the space was freed meanwhile,
        and StoreLost naming the process that did not answer.
        """
        ...

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Return for each `Want` a dict from part number to a uint8 view of the whole part.

        The views are read-only, and are valid until `settle`. Raises RowsCleared when a block was freed, and StoreLost
        when the process that holds it does not answer.
        """
        ...

    def settle(self, wants: Sequence[Want]) -> None:
        """Confirm that the views of a `get` were valid while they were copied. Must be called before the copies are
        used.

        Raises RowsCleared when a block was freed since the `get`, because its memory can have been reused for another
        block.
        """
        ...

    def close(self) -> None:
        """Detach this process from the store, which keeps running. Idempotent."""
        ...
