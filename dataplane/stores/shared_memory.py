"""Implements the store `shm`: pooled segments in /dev/shm, for runs on one host.

Ranges of freed blocks are used again, so that writers and readers find pages that are mapped already. A reader checks a
block's generation before it copies and after (`settle`); if it is the same, the bytes were the block's all along. A
writer marks its slot while it writes. A block that is freed while its writer is alive (because its reservation ended)
keeps its range until the writer has stopped or died; otherwise a late writer would write into another block.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...codecs.integers import round_up
from ...codecs.memory import ALIGN
from ...codecs.owned_folder import SHARED_MEMORY, process_start, remove_stale_folders
from ..block_store import StoreSpec, Want
from ..errors import CapacityExceeded, RowsCleared, StoreLost
from .free_ranges import FreeRanges
from .registry import StoreEntry
from .shm_folder import (
    CLOSED,
    GENERATION,
    MAX_SLOTS,
    OPEN,
    SLOT_BYTES,
    SLOTS_CHUNK,
    WRITER_PID,
    WRITER_START,
    create_folder,
    map_segment,
    map_slots,
    reserve_memory,
)

_logger = logging.getLogger(__name__)

SEGMENT_BYTES = 16 << 20
"""Number of bytes of a segment; a larger block gets one of its own size. Reserving one costs the directory about 5
ms."""

_LOCATION = struct.Struct("<IIQ")  # segment, slot, offset


def _rounded(nbytes: int) -> int:
    return max(ALIGN, round_up(nbytes, ALIGN))


class SharedMemoryHost:
    """Allocates ranges, and owns the folder. Thread-safe."""

    def __init__(self, run_id: str, capacity_bytes: int, root: Path = SHARED_MEMORY) -> None:
        """Raise ValueError when a living run uses `run_id`, or when there is no /dev/shm."""
        if not root.is_dir():
            raise ValueError(
                f"dataplane.store.kind='shm' needs {root}, which this host does not have; use 'simple' or 'ray'"
            )
        remove_stale_folders(root)
        self._folder, self._owner = create_folder(run_id, root)
        self._slots = map_slots(self._folder)
        self._slots[0, GENERATION] = OPEN
        self._limit_bytes = capacity_bytes + capacity_bytes // 4 + SEGMENT_BYTES
        self._segments: dict[int, FreeRanges] = {}
        self._planned: dict[int, int] = {}
        """Number of bytes of each segment that is being made."""
        self._next_segment = 0
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, int, int, int]] = {}  # block -> segment, slot, offset, bytes
        self._quarantined: list[tuple[int, int, int, int]] = []
        self._free_slots: list[int] = []
        self._next_slot = 1
        self._backed_slots = SLOTS_CHUNK
        self._used_bytes = 0
        self._full_logged = False
        self.spec = StoreSpec(kind="shm", run_id=run_id, address={"folder": str(self._folder)})

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Allocate a range and a slot. None when the pool (capacity and a quarter) or /dev/shm itself has no room.

        Takes 5 ms and more for a new segment; other calls go on meanwhile.
        """
        size = _rounded(nbytes)
        with self._lock:
            location = self._place(block_id, size)
        if location is not None or not self._extend(size):
            return location
        with self._lock:
            return self._place(block_id, size)

    def has_ready(self, nbytes: int) -> bool:
        """Return whether the existing segments have such a range."""
        with self._lock:
            self._release_quarantined()
            return any(ranges.holds(_rounded(nbytes)) for ranges in self._segments.values())

    def make_ready(self, nbytes: int) -> None:
        """Add a segment if there is no such range."""
        if not self.has_ready(nbytes):
            self._extend(_rounded(nbytes))

    def cut(self, block_id: int, sizes: Sequence[int]) -> list[bytes]:
        """Cut a range into blocks; see `Cuts`. The first block keeps the slot, and with it what the writer has
        checked."""
        with self._lock:
            segment, slot, offset, held_bytes = self._held[block_id]
            assert sum(sizes) <= held_bytes and not any(size % ALIGN for size in sizes), (sizes, held_bytes)
            slots = [slot]
            while len(slots) < len(sizes):
                more = self._take_slot()
                if more is None:
                    self._free_slots += slots[1:]
                    raise CapacityExceeded(f"no slots for {len(sizes)} blocks: {MAX_SLOTS} at most", op="put")
                slots.append(more)
            locations = []
            for number, (size, own) in enumerate(zip(sizes, slots, strict=True)):
                if number:
                    self._slots[own] = (block_id + number + 1, 0, 0, 0)
                self._held[block_id + number] = (segment, own, offset, size)
                locations.append(_LOCATION.pack(segment, own, offset))
                offset += size
            rest = held_bytes - sum(sizes)
            if rest:
                self._segments[segment].give(offset, rest)
                self._used_bytes -= rest
            return locations

    def free(self, block_id: int, location: bytes) -> None:
        """End the block's generation. Its range is used again once no living writer is in it. Idempotent."""
        with self._lock:
            held = self._held.pop(block_id, None)
            if held is None:
                return
            self._slots[held[1], GENERATION] = 0
            if self._writer_lives(held[1]):
                self._quarantined.append(held)
            else:
                self._release(held)

    def usage_bytes(self) -> int:
        """Number of bytes of the ranges in use, rounded up to 64 a block, with freed ones that a writer is still in."""
        with self._lock:
            self._release_quarantined()
            return self._used_bytes

    def unfreed_bytes(self) -> int:
        """Number of bytes of freed ranges that a living writer is still in."""
        with self._lock:
            self._release_quarantined()
            return sum(nbytes for _, _, _, nbytes in self._quarantined)

    def processes(self) -> dict[str, int]:
        """Return nothing, as the bytes are files in memory."""
        return {}

    def close(self) -> None:
        """Remove the folder. Readers and writers get StoreLost from now on. Idempotent."""
        with self._lock:
            if self._owner < 0:
                return
            self._slots[0, GENERATION] = CLOSED
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._owner)
            self._owner = -1

    def _place(self, block_id: int, size: int) -> bytes | None:
        """Take a range in the existing segments, and a slot."""
        assert block_id not in self._held, block_id
        self._release_quarantined()
        slot = self._take_slot()
        if slot is None:
            return None
        for segment, ranges in self._segments.items():
            offset = ranges.take(size)
            if offset is not None:
                self._slots[slot] = (block_id + 1, 0, 0, 0)
                self._held[block_id] = (segment, slot, offset, size)
                self._used_bytes += size
                return _LOCATION.pack(segment, slot, offset)
        self._free_slots.append(slot)
        return None

    def _writer_lives(self, slot: int) -> bool:
        pid = int(self._slots[slot, WRITER_PID])
        return pid != 0 and process_start(pid) == int(self._slots[slot, WRITER_START])

    def _release_quarantined(self) -> None:
        if self._quarantined:
            waiting, self._quarantined = self._quarantined, []
            for held in waiting:
                if self._writer_lives(held[1]):
                    self._quarantined.append(held)
                else:
                    self._release(held)

    def _release(self, held: tuple[int, int, int, int]) -> None:
        segment, slot, offset, size = held
        self._segments[segment].give(offset, size)
        self._free_slots.append(slot)
        self._used_bytes -= size

    def _take_slot(self) -> int | None:
        if self._free_slots:
            return self._free_slots.pop()
        if self._next_slot == self._backed_slots:
            if self._backed_slots == MAX_SLOTS or not self._back(
                "slots", self._backed_slots * SLOT_BYTES, SLOTS_CHUNK * SLOT_BYTES
            ):
                return None
            self._backed_slots += SLOTS_CHUNK
        self._next_slot += 1
        return self._next_slot - 1

    def _extend(self, size: int) -> bool:
        """Add a segment that has a range of `size` bytes. Returns False when there is no room for it."""
        with self._lock:
            number = self._plan_segment(max(SEGMENT_BYTES, size))
        if number is None:
            return False
        backed = self._back(f"seg-{number}", 0, self._planned[number])
        with self._lock:
            planned = self._planned.pop(number)
            if not backed or self._owner < 0:
                (self._folder / f"seg-{number}").unlink(missing_ok=True)
                return False
            self._segments[number] = FreeRanges(planned)
            return True

    def _plan_segment(self, size_bytes: int) -> int | None:
        """Return the number of a segment to be made, counted from now on. None when the pool has no room for it."""
        pooled = sum(ranges.size_bytes for ranges in self._segments.values()) + sum(self._planned.values())
        for number in [number for number, ranges in self._segments.items() if ranges.unused]:
            if pooled + size_bytes <= self._limit_bytes:
                break
            # Unused and too small for this block. Clients let go of it when they map their next segment.
            pooled -= self._segments.pop(number).size_bytes
            (self._folder / f"seg-{number}").unlink()
        if pooled + size_bytes > self._limit_bytes:
            return None
        number = self._next_segment
        self._next_segment += 1
        self._planned[number] = size_bytes
        return number

    def _back(self, name: str, offset: int, nbytes: int) -> bool:
        try:
            reserve_memory(self._folder / name, offset, nbytes)
            return True
        except OSError as error:
            if not self._full_logged:
                _logger.warning("no room in %s for %d more bytes: %s", self._folder.parent, nbytes, error.strerror)
                self._full_logged = True
            return False


class SharedMemoryStore:
    """Reads and writes the pool from any process of the host. Thread-safe; no call waits for another process."""

    def __init__(self, spec: StoreSpec) -> None:
        """Raise StoreLost when the run's folder is gone."""
        self._folder = Path(str(spec.address["folder"]))
        self._segments: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._writer = (0, 0)
        """Process id and start time of this process."""
        try:
            self._slots = map_slots(self._folder)
        except FileNotFoundError:
            raise self._lost("connect", time.monotonic()) from None

    def put(
        self, block_id: int, location: bytes, parts: Sequence[np.ndarray], offsets: Sequence[int], timeout_s: float
    ) -> bytes:
        """Copy the parts into the block's range.

        Raises RowsCleared when the reservation ended, StoreLost after the host's `close`.
        """
        started = time.monotonic()
        segment, slot, base = _LOCATION.unpack(location)
        self._check("put", block_id, slot, started)
        memory = self._segment("put", block_id, slot, segment, started)
        entry = self._slots[slot]
        pid = os.getpid()
        if self._writer[0] != pid:  # the first put, or a fork
            start = process_start(pid)
            assert start is not None
            self._writer = (pid, start)
        entry[WRITER_START] = self._writer[1]
        entry[WRITER_PID] = pid
        try:
            # Freed before the mark was seen: the range may belong to another block by now.
            self._check("put", block_id, slot, started)
            for part, offset in zip(parts, offsets, strict=True):
                np.copyto(memory[base + offset : base + offset + part.nbytes], part)
        finally:
            entry[WRITER_PID] = 0
        self._check("put", block_id, slot, started)
        return location

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Return views of the pool, read-only and not copied. If `settle` raises RowsCleared, they showed another
        block's bytes."""
        started = time.monotonic()
        views = []
        for want in wants:
            segment, slot, base = _LOCATION.unpack(want.block.location)
            self._check("get", want.block.block_id, slot, started)
            memory = self._segment("get", want.block.block_id, slot, segment, started)
            layout = want.block.layout
            offsets, sizes = layout.offsets, layout.part_bytes
            found = {}
            for part in want.parts:
                view = memory[base + offsets[part] : base + offsets[part] + sizes[part]]
                view.flags.writeable = False
                found[part] = view
            views.append(found)
        return views

    def settle(self, wants: Sequence[Want]) -> None:
        """Raise RowsCleared when a block was freed since the `get`."""
        started = time.monotonic()
        for want in wants:
            self._check("get", want.block.block_id, _LOCATION.unpack(want.block.location)[1], started)

    def close(self) -> None:
        """Drop the mappings; each ends with its last view."""
        with self._lock:
            self._segments.clear()

    def _check(self, op: str, block_id: int, slot: int, started: float) -> None:
        if int(self._slots[0, GENERATION]) != OPEN:
            raise self._lost(op, started)
        if int(self._slots[slot, GENERATION]) != block_id + 1:
            raise RowsCleared(f"block {block_id} was freed", op=op, elapsed_s=time.monotonic() - started)

    def _segment(self, op: str, block_id: int, slot: int, number: int, started: float) -> np.ndarray:
        memory = self._segments.get(number)
        if memory is not None:
            return memory
        with self._lock:
            if number not in self._segments:
                try:
                    mapped = map_segment(self._folder, number)
                except FileNotFoundError:
                    self._check(op, block_id, slot, started)  # freed meanwhile, and its segment with it
                    raise self._lost(op, started) from None
                gone = [old for old in self._segments if not (self._folder / f"seg-{old}").exists()]
                for old in gone:  # a mapping would keep the memory of a segment that the host has dropped
                    del self._segments[old]
                self._segments[number] = mapped
            return self._segments[number]

    def _lost(self, op: str, started: float) -> StoreLost:
        elapsed = time.monotonic() - started
        return StoreLost("the shared-memory pool is closed", op=op, peer=str(self._folder), elapsed_s=elapsed)


STORE = StoreEntry(
    lambda config, run_id, one_host: SharedMemoryHost(run_id, config.capacity_mib << 20),
    lambda spec, link: SharedMemoryStore(spec),
    remove_stale_folders,
)
