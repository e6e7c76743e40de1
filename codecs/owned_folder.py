"""A folder that is its maker's for as long as that process lives: a locked file in it says so."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

_OWNER = "owner"
_TRIES = 10
_PAUSE_S = 0.02


def create_owned_folder(folder: Path, run_id: str) -> int:
    """Make `folder` with its lock held from the moment it has its name; one that is no living process's is replaced.

    Returns the lock's descriptor: closing it gives the folder up. Raises ValueError when a living process has it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    draft.mkdir(mode=0o700)
    owner = os.open(draft / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    for attempt in range(_TRIES):
        try:
            os.rename(draft, folder)
            return owner
        except OSError:  # there is one already
            if not _remove_stale(folder) and attempt:
                time.sleep(_PAUSE_S)  # a reader that looks whether the owner lives has the lock for a moment
    shutil.rmtree(draft)
    os.close(owner)
    raise ValueError(f"run_id {run_id!r}: a living run has the folder {folder}; choose another") from None


def owner_lives(folder: Path) -> bool:
    """Whether the process that made `folder` is still there and has not given it up."""
    try:
        descriptor = os.open(folder / _OWNER, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _remove_stale(folder: Path) -> bool:
    """Remove `folder` unless its owner lives. Returns whether it is gone."""
    try:
        descriptor = os.open(folder / _OWNER, os.O_RDWR)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
