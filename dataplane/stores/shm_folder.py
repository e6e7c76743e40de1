"""Creates and maps the files of a shared-memory store, and tracks the free ranges of its pool.

`/dev/shm/headrace-{run_id}/` holds
  `owner`   locked by the host's process for as long as it lives (see `dataplane/owned_folder.py`)
  `slots`   a table with a 32-byte entry for each live block: its generation (block id + 1), and the pid and start time
            of the process that is writing it; a sparse file with entries for as many blocks as fit into the pool, of
            which the host reserves the beginning
  `pool`    the bytes: a sparse file of the largest size that the pool may reach, of which the host reserves the
            beginning

The generation is stored apart from the bytes. A header in front of the bytes would be overwritten by the payload of a
later block, which might happen to look like a generation.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import platform
from bisect import bisect_left
from pathlib import Path

import numpy as np

from ...codecs.integers import ALIGN, ceil_div, round_up
from ..owned_folder import PREFIX, SHARED_MEMORY, create_owned_folder

SLOT_BYTES = 32
SLOTS_CHUNK = 2048
"""Number of entries of the table of blocks (slots) for which memory is reserved at a time (64 KiB). The rest of the
file is a hole without memory."""

GENERATION, WRITER_PID, WRITER_START, EXTENT = 0, 1, 2, 3
"""Columns of the table of blocks. An entry of the table is a slot. Slot 0 belongs to the host, and its generation is
OPEN or CLOSED."""
OPEN, CLOSED = 1, 2
_UNITS_BITS = 32


def packed_extent(offset: int, nbytes: int) -> int:
    """Return the value of the column EXTENT for a range of the pool, whose bounds are multiples of ALIGN."""
    return (offset // ALIGN) << _UNITS_BITS | nbytes // ALIGN


def unpacked_extent(value: int) -> tuple[int, int]:
    """Return the offset and the number of bytes of a range."""
    return (value >> _UNITS_BITS) * ALIGN, (value & ((1 << _UNITS_BITS) - 1)) * ALIGN


PIECE_BYTES = 4 << 20
"""Number of bytes of the pool that are reserved, and mapped, at a time. Reserving them takes the host about 1 ms."""
_MADV_POPULATE_WRITE = 23
"""Value of the `madvise` option MADV_POPULATE_WRITE of Linux 5.14 and later, for which Python has no name."""


def create_folder(run_id: str, pool_bytes: int, root: Path = SHARED_MEMORY) -> tuple[Path, int]:
    """Create the run's folder with an empty table and an empty pool, which may grow to `pool_bytes`.

    Returns the folder, and the file descriptor that holds its lock. Raises ValueError when the folder belongs to a
    running process, or when `root` cannot be written.
    """
    folder = root / f"{PREFIX}{run_id}"
    try:
        return folder, create_owned_folder(folder, run_id, functools.partial(_make_files, pool_bytes))
    except OSError as error:
        raise ValueError(f"dataplane.store.kind='shm': {root} cannot be used: {error.strerror}") from None


def _make_files(pool_bytes: int, folder: Path) -> None:
    # A block takes at least ALIGN bytes of the pool, so the pool is full before the table is. Two more slots are
    # needed: slot 0, and the slot of a block that finds no room.
    num_slots = round_up(pool_bytes // ALIGN + 2, SLOTS_CHUNK)
    with open(folder / "slots", "wb") as file:
        file.truncate(num_slots * SLOT_BYTES)
        os.posix_fallocate(file.fileno(), 0, SLOTS_CHUNK * SLOT_BYTES)
    with open(folder / "pool", "wb") as file:
        file.truncate(pool_bytes)


def map_slots(folder: Path) -> np.ndarray:
    """Map the table of blocks as a uint64 array `[slots, 4]`, with as many slots as blocks fit into the pool. The
    mapping exists as long as the array. Raises FileNotFoundError if there is no table."""
    descriptor = os.open(folder / "slots", os.O_RDWR)
    try:
        mapping = mmap.mmap(descriptor, 0)  # Length 0 maps the whole file.
    finally:
        os.close(descriptor)
    return np.frombuffer(mapping, np.uint64).reshape(-1, SLOT_BYTES // 8)


class PoolMapping:
    """Maps the whole pool into this process. The part that the host has not reserved yet is never touched."""

    def __init__(self, folder: Path) -> None:
        """Map the pool of `folder`. Raises FileNotFoundError when there is none."""
        descriptor = os.open(folder / "pool", os.O_RDWR)
        try:
            self._mapping = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        self._mapped = bytearray(ceil_div(len(self._bytes), PIECE_BYTES))
        """For each piece of the pool, 1 when its pages are mapped into this process, else 0."""

    @property
    def view(self) -> memoryview:
        """View of the whole pool as bytes. Only the part that the host has reserved may be touched."""
        return self._bytes.data

    def range(self, offset: int, nbytes: int) -> np.ndarray:
        """Return a range of the pool as a uint8 array `[nbytes]`. The range must be reserved, and stays mapped as long
        as the array exists."""
        for piece in range(offset // PIECE_BYTES, ceil_div(offset + nbytes, PIECE_BYTES)):
            if not self._mapped[piece]:
                self._populate(piece)
        return self._bytes[offset : offset + nbytes]

    def _populate(self, piece: int) -> None:
        """Map all pages of a piece of the pool at once, which takes 0.5 ms per MiB. The first copies then cause no page
        fault for every 4 KiB."""
        start = piece * PIECE_BYTES
        with contextlib.suppress(OSError):  # An older kernel maps the pages as they are touched.
            self._mapping.madvise(_MADV_POPULATE_WRITE, start, min(PIECE_BYTES, len(self._bytes) - start))
        self._mapped[piece] = 1


def check_room(capacity_bytes: int, root: Path = SHARED_MEMORY) -> None:
    """Raise ValueError unless `root` exists and has room for `capacity_bytes` bytes now. Writes nothing."""
    if not root.is_dir():
        raise ValueError(
            f"dataplane.store.kind='shm' needs {root}, which this host does not have; use 'simple' or 'ray'"
        )
    free_bytes = free_memory(root)
    if free_bytes < capacity_bytes:
        raise ValueError(
            f"dataplane.store.capacity_mib: got {capacity_bytes >> 20}, but {root} of host {platform.node()} has "
            f"{free_bytes >> 20} MiB free; expected at most that: lower capacity_mib, give {root} more room (docker: "
            "--shm-size), or use store.kind 'ray' or 'simple'"
        )


def free_memory(root: Path = SHARED_MEMORY) -> int:
    """Return the number of bytes that can be written to the file system of `root` now."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def reserve_memory(path: Path, offset: int, nbytes: int) -> None:
    """Allocate the memory of a range of a file in advance. A lack of memory then raises OSError here, instead of
    killing a process that writes to the range with SIGBUS."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    finally:
        os.close(descriptor)


def written_bytes(path: Path) -> int:
    """Return the number of bytes at the beginning of a file that have been written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE)
    finally:
        os.close(descriptor)


class FreeRanges:
    """Allocates and frees byte ranges of `[0, size_bytes)`, which may grow. Pure bookkeeping, not thread-safe.

    Allocation is first fit over a sorted list. When the blocks come from batches of one shape (the usual case), the
    pool does not fragment. A bad mix of sizes can leave holes, so a pool is made somewhat larger than its capacity.
    """

    __slots__ = ("size_bytes", "free_bytes", "_offsets", "_sizes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._offsets = [0] if size_bytes else []
        self._sizes = [size_bytes] if size_bytes else []

    @property
    def unused(self) -> bool:
        """True when no range is allocated."""
        return self.free_bytes == self.size_bytes

    @property
    def tail_bytes(self) -> int:
        """Number of free bytes at the very end of the pool, to which `grow` adds."""
        if not self._offsets or self._offsets[-1] + self._sizes[-1] != self.size_bytes:
            return 0
        return self._sizes[-1]

    @property
    def largest_bytes(self) -> int:
        """Size in bytes of the largest free range."""
        return max(self._sizes, default=0)

    def grow(self, nbytes: int) -> None:
        """Extend the pool by `nbytes` free bytes at its end."""
        self.size_bytes += nbytes
        self.give(self.size_bytes - nbytes, nbytes)

    def holds(self, nbytes: int) -> bool:
        """Return whether `take(nbytes)` would succeed."""
        return nbytes <= self.free_bytes and self.largest_bytes >= nbytes

    def take(self, nbytes: int) -> int | None:
        """Allocate `nbytes` (> 0) and return their offset, or None when no free range is large enough."""
        if nbytes > self.free_bytes:
            return None
        for position, size in enumerate(self._sizes):
            if size >= nbytes:
                offset = self._offsets[position]
                if size == nbytes:
                    del self._offsets[position], self._sizes[position]
                else:
                    self._offsets[position] = offset + nbytes
                    self._sizes[position] = size - nbytes
                self.free_bytes -= nbytes
                return offset
        return None

    def occupy(self, free_from: int, start: int, stop: int) -> None:
        """Take the range from `start` to `stop`. Everything from `free_from` on is free."""
        del self._offsets[-1:], self._sizes[-1:]
        for begin, end in ((free_from, start), (stop, self.size_bytes)):
            if begin < end:
                self._offsets.append(begin)
                self._sizes.append(end - begin)
        self.free_bytes -= stop - start

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range that `take` allocated."""
        position = bisect_left(self._offsets, offset)
        before = position > 0 and self._offsets[position - 1] + self._sizes[position - 1] == offset
        after = position < len(self._offsets) and offset + nbytes == self._offsets[position]
        if before and after:
            self._sizes[position - 1] += nbytes + self._sizes[position]
            del self._offsets[position], self._sizes[position]
        elif before:
            self._sizes[position - 1] += nbytes
        elif after:
            self._offsets[position] = offset
            self._sizes[position] += nbytes
        else:
            self._offsets.insert(position, offset)
            self._sizes.insert(position, nbytes)
        self.free_bytes += nbytes
