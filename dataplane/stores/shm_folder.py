"""The folder of a shared-memory run: what is in it, who owns it, and how a dead owner's is removed.

`/dev/shm/headrace-{run_id}/` holds
  `owner`   locked (flock) by the host's process for as long as it lives; a folder whose lock is free is stale
  `slots`   a table of 32-byte entries, one per live block: generation, pid and start time of its writer
  `seg-N`   the bytes
The generation stands beside the bytes, not among them: a header within a segment would be overwritten by the payload
of a later block, which might happen to look like a generation.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from pathlib import Path

import numpy as np

ROOT = Path("/dev/shm")
PREFIX = "headrace-"

SLOT_BYTES = 32
MAX_SLOTS = 1 << 20
SLOTS_CHUNK = 2048
"""Slots that get memory at a time: 64 KiB. The rest of the table is a hole in the file."""

GENERATION, WRITER_PID, WRITER_START = 0, 1, 2
"""Columns of the table. Slot 0 belongs to the host: its generation is OPEN or CLOSED."""
OPEN, CLOSED = 1, 2


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone, or a zombie: that writes no more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def remove_stale_folders(root: Path = ROOT) -> list[str]:
    """Remove the folders of hosts that are dead. Returns their names. Those of other users are left alone."""
    removed = []
    for folder in root.glob(PREFIX + "*"):
        try:
            descriptor = os.open(folder / "owner", os.O_RDWR)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
        finally:
            os.close(descriptor)
    return removed


def create_folder(run_id: str, root: Path = ROOT) -> tuple[Path, int]:
    """The run's folder with an empty table, and the descriptor that holds its lock from the moment it has its name.

    Raises ValueError when a living run has the folder.
    """
    folder = root / f"{PREFIX}{run_id}"
    draft = root / f".{PREFIX}{run_id}.{os.getpid()}"
    draft.mkdir(mode=0o700)
    owner = os.open(draft / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        os.write(owner, f"{os.getpid()}\n".encode())
        with open(draft / "slots", "wb") as file:
            file.truncate(MAX_SLOTS * SLOT_BYTES)
            os.posix_fallocate(file.fileno(), 0, SLOTS_CHUNK * SLOT_BYTES)
        os.rename(draft, folder)
    except OSError as error:
        shutil.rmtree(draft)
        os.close(owner)
        if folder.exists():
            raise ValueError(f"run_id {run_id!r}: a living run has {folder}; choose another") from None
        raise ValueError(f"dataplane.store.kind='shm': {root} cannot be used: {error.strerror}") from None
    return folder, owner


def map_slots(folder: Path) -> np.ndarray:
    """uint64 `[MAX_SLOTS, 4]` view of the table, which keeps its mapping alive. Raises FileNotFoundError."""
    descriptor = os.open(folder / "slots", os.O_RDWR)
    try:
        mapping = mmap.mmap(descriptor, MAX_SLOTS * SLOT_BYTES)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapping, np.uint64).reshape(MAX_SLOTS, SLOT_BYTES // 8)


def map_segment(folder: Path, number: int) -> np.ndarray:
    """uint8 view of a whole segment, which keeps its mapping alive. Raises FileNotFoundError."""
    descriptor = os.open(folder / f"seg-{number}", os.O_RDWR)
    try:
        # Populated at once: 0.5 ms a MiB here, against a page fault per 4 KiB in the first copies.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=flags), np.uint8)
    finally:
        os.close(descriptor)


def reserve_memory(path: Path, offset: int, nbytes: int) -> None:
    """Give part of a file its memory now, so that lack of it is an OSError here and not a SIGBUS in a writer."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    finally:
        os.close(descriptor)
