"""Creates and maps the files of a shared-memory store.

`/dev/shm/headrace-{run_id}/` holds
  `owner`   locked by the host's process for as long as it lives (see `codecs/owned_folder.py`)
  `slots`   a table with a 32-byte entry for each live block: its generation, and the pid and start time of its writer
  `seg-N`   the bytes
The generation is stored apart from the bytes: a header within a segment would be overwritten by the payload of a later
block, which might happen to look like a generation.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from ...codecs.owned_folder import PREFIX, SHARED_MEMORY, create_owned_folder

SLOT_BYTES = 32
MAX_SLOTS = 1 << 20
SLOTS_CHUNK = 2048
"""Number of slots that get memory at a time (64 KiB). The rest of the table is a hole in the file."""

GENERATION, WRITER_PID, WRITER_START = 0, 1, 2
"""Columns of the table. Slot 0 belongs to the host, and its generation is OPEN or CLOSED."""
OPEN, CLOSED = 1, 2


def create_folder(run_id: str, root: Path = SHARED_MEMORY) -> tuple[Path, int]:
    """Create the run's folder with an empty table. Returns it, and the descriptor that holds its lock.

    Raises ValueError when a living run has the folder, or when `root` cannot be written.
    """
    folder = root / f"{PREFIX}{run_id}"
    try:
        return folder, create_owned_folder(folder, run_id, _make_table)
    except OSError as error:
        raise ValueError(f"dataplane.store.kind='shm': {root} cannot be used: {error.strerror}") from None


def _make_table(folder: Path) -> None:
    with open(folder / "slots", "wb") as file:
        file.truncate(MAX_SLOTS * SLOT_BYTES)
        os.posix_fallocate(file.fileno(), 0, SLOTS_CHUNK * SLOT_BYTES)


def map_slots(folder: Path) -> np.ndarray:
    """Map the table as uint64 `[MAX_SLOTS, 4]`; the array keeps the mapping alive. Raises FileNotFoundError."""
    descriptor = os.open(folder / "slots", os.O_RDWR)
    try:
        mapping = mmap.mmap(descriptor, MAX_SLOTS * SLOT_BYTES)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapping, np.uint64).reshape(MAX_SLOTS, SLOT_BYTES // 8)


def map_segment(folder: Path, number: int) -> np.ndarray:
    """Map a whole segment as uint8; the array keeps the mapping alive. Raises FileNotFoundError."""
    descriptor = os.open(folder / f"seg-{number}", os.O_RDWR)
    try:
        # Populated at once: 0.5 ms a MiB here, against a page fault per 4 KiB in the first copies.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=flags), np.uint8)
    finally:
        os.close(descriptor)


def reserve_memory(path: Path, offset: int, nbytes: int) -> None:
    """Allocate the memory of a part of a file, so that a lack of it raises OSError here, not SIGBUS in a writer."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    finally:
        os.close(descriptor)
