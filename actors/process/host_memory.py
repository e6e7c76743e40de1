"""Tells how much memory this process can still use on its machine and within its container's limit (cgroup v2)."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def memory_limit(root: Path = CGROUP) -> int | None:
    """Return the container's memory limit in bytes, or None when there is none."""
    return _bytes(root / "memory.max")


def total_memory() -> int:
    """Return the number of bytes of memory of this machine, or the container's limit if that is lower."""
    total, limit = psutil.virtual_memory().total, memory_limit()
    return total if limit is None else min(total, limit)


def available_memory(root: Path = CGROUP) -> int:
    """Return the number of bytes that can be allocated without swapping and without exceeding the container's limit.

    File pages in the container's cache that have not been used lately count as free, because the kernel gives them up
    when memory is needed.
    """
    free = psutil.virtual_memory().available
    limit, used = memory_limit(root), _bytes(root / "memory.current")
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used + _file_pages(root)))


def _file_pages(root: Path) -> int:
    """Return the bytes of the container's cached file pages that were not used lately (`inactive_file`). Returns 0 when
    that cannot be read."""
    try:
        lines = (root / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
