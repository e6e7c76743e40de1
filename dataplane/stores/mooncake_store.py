"""Implements the store `mooncake`: a block is one object of a Mooncake store, over TCP or RDMA.

It uses Mooncake's own client instead of TransferQueue's MooncakeStore, because that is faster: 16 blocks with 11
MB in all take 5 to 7 ms to put and 5 ms to get, whereas TransferQueue, with one object for each row and field, took 182
and 116 ms for 12 MB (TCP loopback, 2 cores, separate runs). TransferQueue's store also retries for 2 s on missing
objects, returns uninitialised memory for repeated keys, and kills the masters of other runs.

A separate process lends Mooncake the memory (`mooncake_processes.py`). Producers and consumers lend none, so no rows
are lost when they die. Every run has its own Mooncake master (metadata server). Reads are safe, even if a block is
freed during a read: keys are never used twice, and `settle` checks after the read whether the block still exists.

Mooncake's data and handshake ports (15000-17000, per process) listen on all interfaces without a password, so
every network of the host must be private. The master listens on the run's interface only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...codecs.blocks import BlockLayout, BlockPieces, part_bytes
from ...codecs.integers import ALIGN, round_up
from ..block_store import PutsAll, StoreHost, StoreSpec, Want
from ..config import StoreConfig
from ..errors import DataPlaneTimeout, RowsCleared, StoreLost
from .counting_host import FREE_TIMEOUT_S, RETRY_TIMEOUT_S
from .deadline import received_part
from .mooncake_client import NOT_FOUND, UNFINISHED, MasterAddress, MooncakeClient
from .mooncake_processes import MooncakeMaster, MooncakeSegment
from .registry import StoreEntry

_logger = logging.getLogger(__name__)

SLACK_BYTES = 64 << 20
"""Number of bytes of memory lent to Mooncake in addition to 5/4 of the capacity. They allow for holes between blocks,
and for puts whose writer died."""
SETTLE_TIMEOUT_S = 10.0
LATE_BLOCKS = 256
"""Number of freed blocks that are remembered because they had not been written when they were freed. Every later
removal includes them, in case a late writer has written them since."""


class MooncakeHost:
    """Starts the run's Mooncake master, lends it memory (the segment) and counts the bytes in use. Called from one
    thread of the directory's process."""

    def __init__(
        self, run_id: str, capacity_bytes: int, *, host: str = "127.0.0.1", protocol: str = "tcp", device: str = ""
    ) -> None:
        """host: address of the interface that the run's processes share.

        Raises ValueError if mooncake or an RDMA device is missing, and StoreLost if the Mooncake master does not start.
        """
        if device and protocol != "rdma":
            raise ValueError(f"dataplane.store.device: got {device!r} with protocol {protocol!r}, expected rdma")
        self._run_id = run_id
        self._bytes: dict[int, int] = {}
        self._used_bytes = 0
        """Number of bytes of all blocks that are reserved or written, which is the sum of `_bytes`."""
        self._unfinished: dict[int, int] = {}
        """Freed blocks that still take up space: block id -> number of bytes. If a block was freed during its put,
        Mooncake keeps the space until the put ends, or for 10 minutes if it never ends. Other blocks are here because
        the Mooncake master did not answer."""
        self._silent = False
        """True if the Mooncake master did not answer the last request to remove blocks."""
        self._late: deque[int] = deque(maxlen=LATE_BLOCKS)
        self._lost = False
        self._limit_bytes = capacity_bytes + capacity_bytes // 4 + SLACK_BYTES
        self._master = MooncakeMaster(run_id, host)
        master = self._master.address
        try:
            self._client = MooncakeClient(master, protocol, device)
            # When the process that lends the memory ends, the rows are lost. The master is closed then, so that all
            # clients notice at once.
            self._segment = MooncakeSegment(master, protocol, device, self._limit_bytes, self._master.close)
        except BaseException:
            self._master.close()
            raise
        self.spec = StoreSpec(
            kind="mooncake",
            run_id=run_id,
            address={
                "name": master.name,
                "pid": master.pid,
                "host": master.host,
                "port": master.port,
                "ports": master.ports,
                "protocol": protocol,
                "device": device,
            },
        )

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Count the bytes of a block. Returns b"" for the location, because Mooncake finds a block by its id. Returns
        None when the bytes in use would exceed the capacity, a quarter of it and SLACK_BYTES together."""
        if self._unfinished:
            self._remove([])
        if self.usage_bytes() + nbytes > self._limit_bytes:
            return None
        self._used_bytes += nbytes - self._bytes.get(block_id, 0)
        self._bytes[block_id] = nbytes
        return b""

    def count(self, block_id: int, nbytes: int) -> bool:
        """Return False, because only one thread may count; see `FreesMany`."""
        return False

    def free(self, block_id: int, location: bytes) -> None:
        """Free one block; see `free_many`."""
        self.free_many([(block_id, location)])

    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Remove these blocks from the store in one round trip to the Mooncake master, about 0.1 ms. Idempotent."""
        self._remove([block_id for block_id, _ in blocks if block_id in self._bytes])

    def usage_bytes(self) -> int:
        """Return the bytes of blocks that are reserved or written, and of freed blocks that still take space."""
        return self._used_bytes + sum(self._unfinished.values())

    def unfreed_bytes(self) -> int:
        """Ask the Mooncake master again to remove freed blocks, and return the bytes that they still take."""
        if self._unfinished:
            self._remove([])
        return sum(self._unfinished.values())

    def shortage(self) -> str:
        """Return an error text on freed blocks that the Mooncake master has not removed. It is "" if there are none. It
        gives the number of their bytes."""
        held = sum(self._unfinished.values())
        return f"{held} bytes of cleared blocks are not removed by {self._master.address.peer} yet" if held else ""

    def processes(self) -> dict[str, int]:
        """Return the pids of the Mooncake master and of the process that lends it memory, by name."""
        return {"mooncake master": self._master.address.pid, "mooncake segment": self._segment.pid}

    def close(self) -> None:
        """End the Mooncake master and the process that lends it memory. Idempotent."""
        self._client.close()
        self._segment.close()
        self._master.close()

    def _remove(self, block_ids: Sequence[int]) -> None:
        asked = [*block_ids, *self._unfinished, *self._late]
        removed = {block_id: self._bytes.pop(block_id) for block_id in block_ids}
        self._used_bytes -= sum(removed.values())
        sizes = self._unfinished | removed
        if self._lost or not asked:
            return
        try:
            timeout_s = RETRY_TIMEOUT_S if self._silent else FREE_TIMEOUT_S
            codes = self._client.remove([_key(self._run_id, block_id) for block_id in asked], timeout_s)
        except (StoreLost, DataPlaneTimeout) as error:
            if self._client.ended.is_set():  # The connection broke, so the blocks are lost with the master.
                self._lost = True
                self._unfinished.clear()
                _logger.warning("%s", error)
                return
            self._unfinished.update(removed)
            if not self._silent:
                self._silent = True
                _logger.warning("%d blocks are not removed yet, the next call tries again: %s", len(sizes), error)
            return
        if self._silent:
            self._silent = False
            _logger.warning("%s answers again: %d blocks are removed", self._client.master.peer, len(asked))
        late = set(self._late)
        for block_id, code in zip(asked, codes, strict=True):
            if code == UNFINISHED and block_id not in late:
                self._unfinished[block_id] = sizes[block_id]
                continue
            self._unfinished.pop(block_id, None)
            if code == NOT_FOUND and block_id not in late:
                self._late.append(block_id)  # The block was never written, or is still being written.


class MooncakeStore(PutsAll):
    """Reads and writes blocks through a Mooncake client in this process. Thread-safe; needs no Ray."""

    def __init__(self, spec: StoreSpec) -> None:
        """Connect to the Mooncake master. Raises ValueError if mooncake is not installed, and StoreLost if the
        master is no longer running."""
        address: Any = spec.address
        master = MasterAddress(address["name"], address["pid"], address["host"], address["port"], address["ports"])
        self._run_id = spec.run_id
        self._client = MooncakeClient(master, address["protocol"], address["device"])

    def put_many(self, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float) -> tuple[bytes, ...]:
        """Copy the blocks into one registered buffer and write them to Mooncake, which holds them when this returns.

        The library never reads the caller's own memory, because a call that has run out of time would keep reading it.
        Raises CapacityExceeded if the memory lent to Mooncake has no free range that is large enough, StoreLost if the
        write fails or Mooncake is silent, and DataPlaneTimeout if a short time limit ends first.
        """
        started = time.monotonic()
        layouts = [BlockLayout((), 0, 0, part_bytes(parts)) for parts in blocks]
        bases = np.cumsum([0, *(_aligned(layout.nbytes) for layout in layouts)]).tolist()
        memory = self._client.staging.take(bases[-1])
        for base, layout, parts in zip(bases[:-1], layouts, blocks, strict=True):
            for offset, pieces in zip(layout.offsets, parts, strict=True):
                at = base + offset
                for piece in pieces:
                    memory[at : at + piece.nbytes] = piece
                    at += piece.nbytes
        keys = [_key(self._run_id, first_block_id + number) for number in range(len(blocks))]
        first = memory.ctypes.data
        addresses = [first + base for base in bases[:-1]]
        remaining = max(0.0, started + timeout_s - time.monotonic())
        self._client.put(keys, addresses, [layout.nbytes for layout in layouts], memory, remaining)
        return (b"",) * len(blocks)

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Read the wanted parts, and return views of one registered buffer, which is reused when the last view is gone.

        Only the wanted parts are transferred, and each block is requested once, however often it is wanted.
        """
        if not wants:
            return []
        union: dict[int, set[int]] = {}
        layouts = {want.block.block_id: want.block.layout for want in wants}
        for want in wants:
            union.setdefault(want.block.block_id, set()).update(want.parts)
        starts: dict[int, dict[int, int]] = {}
        spans: list[list[tuple[int, int, int]]] = []
        end = 0
        for block_id, parts in union.items():
            block_spans, starts[block_id], end = _spans(layouts[block_id], sorted(parts), end)
            spans.append(block_spans)
        memory = self._client.staging.take(end)
        self._client.get([_key(self._run_id, block_id) for block_id in union], spans, memory, timeout_s)
        found = []
        for want in wants:
            sizes, at = want.block.layout.part_bytes, starts[want.block.block_id]
            views = {part: memory[at[part] : at[part] + sizes[part]] for part in want.parts}
            peer = self._client.master.peer
            found.append({part: received_part(view, want, part, peer) for part, view in views.items()})
        return found

    def settle(self, wants: Sequence[Want]) -> None:
        """Raise RowsCleared if a block has been freed since the `get`. Its space may already hold another block."""
        block_ids = list(dict.fromkeys(want.block.block_id for want in wants))
        there = self._client.exist([_key(self._run_id, block_id) for block_id in block_ids], SETTLE_TIMEOUT_S)
        if not all(there):
            block_id = block_ids[there.index(False)]
            raise RowsCleared(f"block {block_id} was freed", op="get", peer=self._client.master.peer)

    def close(self) -> None:
        """Disconnect this process from the Mooncake master. The run's store continues to exist."""
        self._client.close()


def _key(run_id: str, block_id: int) -> str:
    return f"{run_id}/{block_id}"


def _aligned(nbytes: int) -> int:
    return round_up(nbytes, ALIGN)


def _spans(
    layout: BlockLayout, parts: Sequence[int], end: int
) -> tuple[list[tuple[int, int, int]], dict[int, int], int]:
    """Plan how to read `parts` of a block into a buffer that is filled up to offset `end`.

    Returns the byte ranges to read (offset in the block, nbytes, offset in the buffer), where neighbouring parts share
    a range; the offset of each part in the buffer; and the offset at which the buffer is filled then. Parts stay
    aligned. If all wanted parts are empty, the block's header is read too, to learn whether the block still exists.
    """
    offsets, sizes = layout.offsets, layout.part_bytes
    wanted = parts if any(sizes[part] for part in parts) else sorted({0, *parts})
    spans: list[tuple[int, int, int]] = []
    starts: dict[int, int] = {}
    for part in wanted:
        if not sizes[part]:
            starts[part] = 0
            continue
        if spans and _aligned(spans[-1][0] + spans[-1][1]) == offsets[part]:
            source, _, to = spans[-1]
            spans[-1] = (source, offsets[part] + sizes[part] - source, to)
        else:
            spans.append((offsets[part], sizes[part], end))
        source, nbytes, to = spans[-1]
        starts[part] = to + offsets[part] - source
        end = _aligned(to + nbytes)
    return spans, starts, end


def _open_host(config: StoreConfig, run_id: str, host: str) -> StoreHost:
    """Start the store of a run. It listens on loopback if all clients are on this host, otherwise on the address
    `host`."""
    capacity_bytes = config.capacity_mib << 20
    return MooncakeHost(
        run_id, capacity_bytes, host=host or "127.0.0.1", protocol=config.protocol, device=config.device
    )


STORE = StoreEntry(_open_host, lambda spec, link: MooncakeStore(spec))
