"""Implements the store `shm`: a pool of memory in /dev/shm, for runs on one host.

The pool is one file that grows piece by piece, so a range can lie anywhere in it. Ranges of freed blocks are reused, so
that writers and readers find pages that are already mapped. A reader checks a block's generation number before and
after it copies (`settle`); if the number is unchanged, the bytes belonged to the block all the time. A writer marks its
slot in the table of blocks while it writes. If a block is freed while its writer is alive (because its reservation
ended), its range is not reused until the writer has stopped or died. Otherwise a late writer would write into another
block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...codecs.integers import ALIGN, round_up
from ..block_store import StoreSpec, Want
from ..errors import CapacityExceeded, RowsCleared, StoreLost
from ..owned_folder import SHARED_MEMORY, process_start, remove_stale_folders
from ..rpc.forks import renew_in_forks
from .registry import StoreEntry
from .shm_folder import (
    CLOSED,
    EXTENT,
    GENERATION,
    OPEN,
    PIECE_BYTES,
    SLOT_BYTES,
    SLOTS_CHUNK,
    WRITER_PID,
    WRITER_START,
    FreeRanges,
    PoolMapping,
    check_room,
    create_folder,
    free_memory,
    map_slots,
    packed_extent,
    reserve_memory,
    unpacked_extent,
    written_bytes,
)

if TYPE_CHECKING:
    from ..config import StoreConfig

_logger = logging.getLogger(__name__)

SPARE_PART = 8
"""Divisor of the capacity. The pool may exceed the capacity by the quotient, which makes up for holes between
ranges."""
SPARE_BYTES = 16 << 20
"""Number of bytes by which the pool may exceed the capacity, in addition to the quotient of SPARE_PART."""

_LOCATION = struct.Struct("<QQ")  # A location is a slot and an offset.


def pool_bytes(capacity_bytes: int) -> int:
    """Return the largest size of the pool in bytes: the capacity, an eighth of it and SPARE_BYTES, in whole pieces."""
    return round_up(capacity_bytes + capacity_bytes // SPARE_PART + SPARE_BYTES, PIECE_BYTES)


def location_at(slot: int, offset: int) -> bytes:
    """Return the location of a range of the pool that begins at `offset` and has this slot."""
    return _LOCATION.pack(slot, offset)


def _rounded(nbytes: int) -> int:
    return max(ALIGN, round_up(nbytes, ALIGN))


class SharedMemoryHost:
    """Allocates ranges of the pool to blocks, and owns the run's folder in /dev/shm. Thread-safe."""

    def __init__(self, run_id: str, capacity_bytes: int, root: Path = SHARED_MEMORY) -> None:
        """Raise ValueError when another run uses `run_id`, or /dev/shm is missing or smaller than the capacity."""
        if root.is_dir():
            remove_stale_folders(root)
        check_room(capacity_bytes, root)
        self._limit_bytes = pool_bytes(capacity_bytes)
        self._folder, self._owner = create_folder(run_id, self._limit_bytes, root)
        self._slots = map_slots(self._folder)
        self._slots[0, GENERATION] = OPEN
        self._owns = True
        """Whether `close` removes the folder."""
        self._ranges = FreeRanges(0)
        self._growing = threading.Lock()
        """Lock that is held while the pool grows, which may take milliseconds. `_lock` is not held during this time."""
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, int, int]] = {}  # The values are slot, offset and bytes of each block.
        self._quarantined: list[tuple[int, int, int]] = []
        self._free_slots: list[int] = []
        self._next_slot = 1
        self._backed_slots = SLOTS_CHUNK
        self._used_bytes = 0
        self._refused = ""
        """Reason why the system had no memory when the pool last tried to grow; "" when that did not happen."""
        self.spec = StoreSpec(kind="shm", run_id=run_id, address={"folder": str(self._folder)})

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Allocate a range of the pool, and a slot (an entry in the table of blocks), for a block. Returns their
        location, or None if the pool or /dev/shm itself has no room; `shortage` says which.

        A call takes a millisecond or more when the pool grows. Other calls are not blocked during this time.
        """
        size = _rounded(nbytes)
        with self._lock:
            location = self._place(block_id, size)
        if location is not None or not self._extend(size):
            return location
        with self._lock:
            return self._place(block_id, size)

    def has_ready(self, nbytes: int) -> bool:
        """Return whether the pool has a free range of `nbytes` bytes without growing."""
        with self._lock:
            self._release_quarantined()
            return self._ranges.holds(_rounded(nbytes))

    def make_ready(self, nbytes: int) -> None:
        """Let the pool grow if it has no free range of `nbytes` bytes."""
        self._extend(_rounded(nbytes))

    def cut(self, block_id: int, sizes: Sequence[int]) -> list[bytes]:
        """Divide the range of `block_id` into blocks of `sizes` bytes with consecutive ids, and free the rest. The
        first block keeps its slot (its entry in the table of blocks), because its writer has checked that slot. Raises
        CapacityExceeded if /dev/shm has no room for more slots, and RowsCleared if the range was freed."""
        with self._lock:
            if block_id not in self._held:
                raise RowsCleared(f"block {block_id} was freed before it was written", op="put")
            slot, offset, held_bytes = self._held[block_id]
            assert sum(sizes) <= held_bytes, (sizes, held_bytes)
            assert all(size and size % ALIGN == 0 for size in sizes), sizes
            slots = [slot]
            while len(slots) < len(sizes):
                more = self._take_slot()
                if more is None:
                    self._free_slots += slots[1:]
                    raise CapacityExceeded(f"no slots for {len(sizes)} blocks: {self._refused}", op="put")
                slots.append(more)
            locations = []
            for number, (size, own) in enumerate(zip(sizes, slots, strict=True)):
                if number:
                    self._slots[own] = (block_id + number + 1, 0, 0, packed_extent(offset, size))
                else:
                    self._slots[own, EXTENT] = packed_extent(offset, size)
                self._held[block_id + number] = (own, offset, size)
                locations.append(_LOCATION.pack(own, offset))
                offset += size
            rest = held_bytes - sum(sizes)
            if rest:
                self._ranges.give(offset, rest)
                self._used_bytes -= rest
            return locations

    def free(self, block_id: int, location: bytes) -> None:
        """Make a block unreadable. Its range is reused once no living process is writing to it. Idempotent."""
        with self._lock:
            held = self._held.pop(block_id, None)
            if held is None:
                return
            self._slots[held[0], GENERATION] = 0
            if self._writer_lives(held[0]):
                self._quarantined.append(held)
            else:
                self._release(held)

    def adopt(self, blocks: Sequence[tuple[int, bytes, int]], next_block: int) -> None:
        """Go on with the pool in another process; see `Recovers`. The ranges of all other blocks are free,
        or will be once their writers have stopped."""
        self._owns = False
        for block_id, location, nbytes in blocks:
            slot, offset = _LOCATION.unpack(location)
            self._held[block_id] = (slot, offset, _rounded(nbytes))
        known = {slot for slot, _, _ in self._held.values()}
        # To read an entry that was never written would take memory for it.
        written = self._slots[: written_bytes(self._folder / "slots") // SLOT_BYTES]
        for slot in np.flatnonzero(written[:, GENERATION]).tolist():
            if slot and slot not in known:
                self._slots[slot, GENERATION] = 0
                if self._writer_lives(slot):
                    self._quarantined.append((slot, *unpacked_extent(int(self._slots[slot, EXTENT]))))
        busy = sorted([*self._held.values(), *self._quarantined], key=lambda held: held[1])
        self._next_slot = max((slot for slot, _, _ in busy), default=0) + 1
        self._backed_slots = max(SLOTS_CHUNK, round_up(self._next_slot, SLOTS_CHUNK))
        self._free_slots = sorted(set(range(1, self._next_slot)) - {slot for slot, _, _ in busy}, reverse=True)
        self._ranges = FreeRanges(round_up(max((offset + size for _, offset, size in busy), default=0), PIECE_BYTES))
        self._used_bytes = sum(size for _, _, size in busy)
        end = 0
        for _, offset, size in busy:
            self._ranges.occupy(end, offset, offset + size)
            end = offset + size

    def block_ids(self) -> list[int]:
        """Return the ids of all blocks to which a range is allocated."""
        with self._lock:
            return list(self._held)

    def holds(self, block_id: int) -> bool:
        """Return whether a range is allocated to this block."""
        with self._lock:
            return block_id in self._held

    def places(self, block_ids: Sequence[int]) -> list[tuple[int, int, int] | None]:
        """Return the slot, offset in the pool and number of bytes of each block; None for a block that was freed."""
        with self._lock:
            return [self._held.get(block_id) for block_id in block_ids]

    def usage_bytes(self) -> int:
        """Return the number of bytes of all ranges in use, each rounded up to a multiple of 64. Freed ranges that a
        process is still writing to are included."""
        with self._lock:
            self._release_quarantined()
            return self._used_bytes

    def unfreed_bytes(self) -> int:
        """Return the number of bytes of freed ranges that a living process is still writing to."""
        with self._lock:
            self._release_quarantined()
            return sum(nbytes for _, _, nbytes in self._quarantined)

    def shortage(self) -> str:
        """Return a text for an error message that says why `allocate` finds no room. The reasons are unfinished
        writers, a full /dev/shm, or only free ranges that are too small."""
        unfreed_bytes = self.unfreed_bytes()
        with self._lock:
            if unfreed_bytes:
                return f"unfinished writers still use {unfreed_bytes} bytes of cleared blocks"
            if self._refused:
                return self._refused
            grown = self._limit_bytes - self._ranges.size_bytes
            largest = max(self._ranges.largest_bytes, self._ranges.tail_bytes + grown)
            return f"the largest free range has {largest} of {self._ranges.free_bytes + grown} free bytes"

    def processes(self) -> dict[str, int]:
        """Return an empty dict, because the store has no processes: its bytes are files in memory."""
        return {}

    def close(self) -> None:
        """Remove the run's folder in /dev/shm. From then on, readers and writers get StoreLost. Idempotent."""
        with self._lock:
            if self._owner < 0 or not self._owns:
                return
            self._slots[0, GENERATION] = CLOSED
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._owner)
            self._owner = -1

    def _place(self, block_id: int, size: int) -> bytes | None:
        """Allocate a range without letting the pool grow, and a slot (an entry in the table of blocks). Returns their
        location, or None if there is no free range or slot."""
        assert block_id not in self._held, block_id
        self._release_quarantined()
        slot = self._take_slot()
        if slot is None:
            return None
        offset = self._ranges.take(size)
        if offset is None:
            self._free_slots.append(slot)
            return None
        self._slots[slot] = (block_id + 1, 0, 0, packed_extent(offset, size))
        self._held[block_id] = (slot, offset, size)
        self._used_bytes += size
        return _LOCATION.pack(slot, offset)

    def _writer_lives(self, slot: int) -> bool:
        """Return whether a living process is writing to the range of the block in this slot of the table. If that
        process cannot be looked up, because file descriptors have run out, it counts as alive."""
        pid = int(self._slots[slot, WRITER_PID])
        try:
            return pid != 0 and process_start(pid) == int(self._slots[slot, WRITER_START])
        except OSError:
            return True

    def _release_quarantined(self) -> None:
        if self._quarantined:
            lives = [self._writer_lives(slot) for slot, _, _ in self._quarantined]
            over = [held for held, alive in zip(self._quarantined, lives, strict=True) if not alive]
            self._quarantined = [held for held, alive in zip(self._quarantined, lives, strict=True) if alive]
            for held in over:
                self._release(held)

    def _release(self, held: tuple[int, int, int]) -> None:
        slot, offset, size = held
        self._ranges.give(offset, size)
        self._free_slots.append(slot)
        self._used_bytes -= size

    def _take_slot(self) -> int | None:
        if self._free_slots:
            return self._free_slots.pop()
        if self._next_slot == self._backed_slots:
            if not self._back("slots", self._backed_slots * SLOT_BYTES, SLOTS_CHUNK * SLOT_BYTES):
                return None
            self._backed_slots += SLOTS_CHUNK
        self._next_slot += 1
        return self._next_slot - 1

    def _extend(self, size: int) -> bool:
        """Let the pool grow until it has a free range of `size` bytes. Returns False when there is no room for that."""
        with self._growing:
            with self._lock:
                if self._ranges.holds(size):
                    return True
                begin = self._ranges.size_bytes
                end = round_up(begin - self._ranges.tail_bytes + size, PIECE_BYTES)
            if end > self._limit_bytes:
                self._refused = ""
                return False
            if not self._back("pool", begin, end - begin):
                return False
            with self._lock:
                self._ranges.grow(end - begin)
                return self._owner >= 0

    def _back(self, name: str, offset: int, nbytes: int) -> bool:
        root = self._folder.parent
        try:
            reserve_memory(self._folder / name, offset, nbytes)
        except OSError as error:
            reason = f"{root} has {free_memory(root)} bytes free, {nbytes} are needed: {error.strerror}"
            if not self._refused:
                _logger.warning("the pool of rows cannot grow: %s", reason)
            self._refused = reason
            return False
        self._refused = ""
        return True


class SharedMemoryStore:
    """Reads and writes the pool from any process on the host. Thread-safe. No call waits for another process."""

    def __init__(self, spec: StoreSpec) -> None:
        """Raise StoreLost when the run's folder in /dev/shm is gone."""
        self._folder = Path(str(spec.address["folder"]))
        self._writer = (0, 0)
        """Process id and start time of this process."""
        self._marking = threading.Lock()
        self._marks: dict[tuple[int, int], int] = {}
        """Number of threads that write to a range now, by process id (it differs after a fork) and slot."""
        renew_in_forks(self, SharedMemoryStore._renew)
        try:
            self._slots = map_slots(self._folder)
            self._pool: PoolMapping | None = PoolMapping(self._folder)
        except FileNotFoundError:
            raise StoreLost(
                "the shared-memory pool is not on this host: its data plane was closed, or runs on another host",
                op="connect",
                peer=str(self._folder),
            ) from None

    def _renew(self) -> None:
        self._marking = threading.Lock()

    def put(
        self, block_id: int, location: bytes, parts: Iterable[np.ndarray], offsets: Sequence[int], timeout_s: float
    ) -> bytes:
        """Copy the block's parts into its range of the pool.

        Raises RowsCleared if the put's reservation has ended, and StoreLost after the host's `close`.
        """
        with self.writing(block_id, location) as room:
            for part, offset in zip(parts, offsets, strict=True):
                np.copyto(room(offset, part.nbytes), part)
        return location

    @contextlib.contextmanager
    def writing(self, block_id: int, location: bytes) -> Iterator[Callable[[int, int], np.ndarray]]:
        """Mark this process as the writer of a block for as long as the context lasts.

        Several threads may write to a block at the same time. The context's value is a function (offset in the block's
        range, number of bytes) -> the range's memory, uint8 1-D.

        Raises RowsCleared, on entry or at the end, if the put's reservation has ended, and StoreLost after the host's
        `close`.
        """
        started = time.monotonic()
        slot, base = _LOCATION.unpack(location)
        self._check("put", block_id, slot, started)
        pool = self._mapped("put", started)
        entry = self._slots[slot]
        pid = os.getpid()
        if self._writer[0] != pid:  # This is the first put, or the process was forked.
            start = process_start(pid)
            assert start is not None
            self._writer = (pid, start)
        with self._marking:
            self._marks[pid, slot] = self._marks.get((pid, slot), 0) + 1
            entry[WRITER_START] = self._writer[1]
            entry[WRITER_PID] = pid
        try:
            # If the block was freed before the mark was seen, the range may belong to another block by now.
            self._check("put", block_id, slot, started)
            yield lambda offset, nbytes: pool.range(base + offset, nbytes)
        finally:
            with self._marking:
                self._marks[pid, slot] -= 1
                if not self._marks[pid, slot]:
                    del self._marks[pid, slot]
                    entry[WRITER_PID] = 0
        self._check("put", block_id, slot, started)

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Return read-only views of the pool, without a copy. If `settle` raises RowsCleared later, the views may have
        shown another block's bytes."""
        started = time.monotonic()
        views = []
        for want in wants:
            slot, base = _LOCATION.unpack(want.block.location)
            self._check("get", want.block.block_id, slot, started)
            pool = self._mapped("get", started)
            layout = want.block.layout
            offsets, sizes = layout.offsets, layout.part_bytes
            found = {}
            for part in want.parts:
                view = pool.range(base + offsets[part], sizes[part])
                view.flags.writeable = False
                found[part] = view
            views.append(found)
        return views

    def settle(self, wants: Sequence[Want]) -> None:
        """Raise RowsCleared if a block has been freed since the `get`."""
        started = time.monotonic()
        for want in wants:
            self._check("get", want.block.block_id, _LOCATION.unpack(want.block.location)[0], started)

    def offset_of(self, location: bytes) -> int:
        """Return the offset in the pool of the block at this location."""
        return _LOCATION.unpack(location)[1]

    def pool_view(self) -> memoryview:
        """Return a view of the whole pool. Raises StoreLost after `close`."""
        return self._mapped("get", time.monotonic()).view

    def close(self) -> None:
        """Drop this process's mapping of the pool. The memory stays mapped until its last view is gone. The run's store
        continues to exist."""
        self._pool = None

    def _check(self, op: str, block_id: int, slot: int, started: float) -> None:
        if int(self._slots[0, GENERATION]) != OPEN:
            raise self._lost(op, started)
        if int(self._slots[slot, GENERATION]) != block_id + 1:
            raise RowsCleared(f"block {block_id} was freed", op=op, elapsed_s=time.monotonic() - started)

    def _mapped(self, op: str, started: float) -> PoolMapping:
        pool = self._pool
        if pool is None:
            raise self._lost(op, started)
        return pool

    def _lost(self, op: str, started: float) -> StoreLost:
        elapsed = time.monotonic() - started
        return StoreLost("the shared-memory pool is closed", op=op, peer=str(self._folder), elapsed_s=elapsed)


def _open_host(config: StoreConfig, run_id: str, host: str) -> SharedMemoryHost:
    return SharedMemoryHost(run_id, config.capacity_mib << 20)


STORE = StoreEntry(_open_host, lambda spec, link: SharedMemoryStore(spec), remove_stale_folders)
