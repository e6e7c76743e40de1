"""Creates folders that belong to one process, and finds out whether the owner of a folder or lock is still alive.

The owner of a folder holds the lock (flock) of a file in it. The operating system drops the lock when the process ends,
however it ends. A folder whose lock is free is therefore stale, and any process may remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "headrace-"
"""Prefix of the name of every folder that a run makes in shared memory: `headrace-{run_id}` or
`headrace-{run_id}-{what}`."""
_OWNER = "owner"
_TRIES = 10
_PAUSE_S = 0.02


def create_owned_folder(folder: Path, run_id: str, fill: Callable[[Path], None] = lambda folder: None) -> int:
    """Create `folder` and lock it for this process. A stale folder of that name is replaced.

    The folder gets its name only when it is locked and `fill` has written its contents. Returns the file descriptor
    that holds the lock; closing it releases the folder. Raises ValueError when a running process owns the folder, and
    OSError when nothing can be written there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    draft.mkdir(mode=0o700)
    owner = os.open(draft / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        os.write(owner, f"{os.getpid()}\n".encode())
        fill(draft)
        for attempt in range(_TRIES):
            try:
                os.rename(draft, folder)
                return owner
            except OSError:  # The folder exists already.
                if not _remove_stale(folder) and attempt:
                    time.sleep(_PAUSE_S)  # Another process can hold the lock for a moment while it checks the owner.
        raise ValueError(f"run_id {run_id!r}: a running run owns the folder {folder}; choose another run_id")
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(owner)
        raise


def owner_lives(folder: Path) -> bool:
    """Return whether the process that created `folder` is alive and has not released it. Also returns True when this
    cannot be determined, as for another user's folder."""
    try:
        if not _is_own(folder):  # Another user's folder cannot be examined.
            return True
        descriptor = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def remove_stale_folders(root: Path = SHARED_MEMORY) -> list[str]:
    """Remove the folders of dead runs in `root`, and return their names.

    Folders of other users, and anything without an owner file, are left alone.
    """
    removed = []
    for folder in root.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            if _is_own(folder) and _remove_unlocked(folder):
                removed.append(folder.name)
    return removed


def _is_own(folder: Path) -> bool:
    """Return whether `folder` is a directory of this user with a regular owner file. Raises FileNotFoundError or
    NotADirectoryError when there is no folder or no owner file."""
    at, owner = os.lstat(folder), os.lstat(folder / _OWNER)
    own = at.st_uid == owner.st_uid == os.getuid()
    return own and stat.S_ISDIR(at.st_mode) and stat.S_ISREG(owner.st_mode)


def try_lock(path: Path) -> int | None:
    """Lock an existing file for this process (exclusive flock), without waiting.

    Returns the file descriptor that holds the lock, or None when another process holds it. Raises FileNotFoundError
    when there is no such file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # NFS locks only files that are open for writing.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None when it has ended. A zombie counts as ended
    once its last thread has ended, because until then it can write.

    The pid together with the start time identifies a process uniquely, whereas pids alone are reused.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()
    ended = fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)
    return None if ended else int(fields[19])


@functools.cache
def pid_space() -> str:
    """Return the space in which this process's pid is valid: the boot of the host, and the namespace of pids.

    Hosts and containers can have equal names, but never equal spaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _remove_stale(folder: Path) -> bool:
    """Remove `folder` unless its owner is alive; a folder without an owner file is removed, too. Returns whether it is
    gone."""
    try:
        return _remove_unlocked(folder)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
        return True


def _remove_unlocked(folder: Path) -> bool:
    """Remove `folder` if no process holds its lock. Returns whether it was removed. Raises FileNotFoundError when it
    has no owner file."""
    descriptor = try_lock(folder / _OWNER)
    if descriptor is None:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
    return True
