"""Memory that a process may take: the machine's, or the rest of the container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from headrace.actors.process.memory import available_memory, memory_limit

MIB = 1 << 20


def cgroup(root: Path, limit: str, used: int = 0, inactive: int = 0) -> Path:
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{used}\n")
    (root / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")
    return root


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "left"),
    [(20 * MIB, 5 * MIB, 0, 15 * MIB), (20 * MIB, 5 * MIB, 2 * MIB, 17 * MIB), (MIB, 2 * MIB, 0, 0)],
)
def test_the_containers_limit_counts(tmp_path: Path, limit: int, used: int, inactive: int, left: int) -> None:
    root = cgroup(tmp_path, str(limit), used, inactive)
    assert memory_limit(root) == limit and available_memory(root) == left


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    for root in (cgroup(tmp_path, "max"), tmp_path / "none"):
        assert memory_limit(root) is None
        assert 0 < available_memory(root) <= psutil.virtual_memory().total
