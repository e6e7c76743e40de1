"""Tests of the memory that processes hold, by NVML or their own count, and of what a process can still take."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headrace.actors.process.memory import ProcessMemory, available_memory, gpu_sizes, measure, memory_limit, nvml_bytes

MIB = 1 << 20


class Nvml:
    """NVML with two GPUs; `held` is (pid, bytes) on each."""

    NVMLError = RuntimeError

    def __init__(self, *held: list[tuple[int, int | None]], driver: bool = True) -> None:
        self.held, self.driver, self.open = held, driver, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.held)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=100 + handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.held[handle]]


def test_nvml_counts_the_processes_on_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml([(7, 30), (8, 5)], [(7, 10), (9, 1)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvml_bytes([7, 9]) == 41
    held = measure([7, os.getpid()], lambda: 3)
    assert (held.device_bytes, held.whole_device, held.held_bytes) == (40, False, 40)
    assert held.host_bytes > 1 << 20, "of this process; 7 is not there"
    assert gpu_sizes() == (100, 101)
    assert nvml.open == 0


@pytest.mark.parametrize(
    "nvml",
    [None, Nvml([(8, 5)]), Nvml([(7, None)]), Nvml(driver=False)],
    ids=["missing", "strangers", "mute", "no driver"],
)
def test_a_process_that_nvml_cannot_tell_counts_for_itself(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvml_bytes([7]) is None
    assert measure([7], lambda: 3) == ProcessMemory(3, 0)


def test_without_gpus_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    held = measure([os.getpid()])
    assert held.device_bytes == 0 and held.held_bytes == held.host_bytes > 0


@pytest.mark.processes
def test_without_nvml_its_tool_tells_the_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_sizes() == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 143771\necho 81559\n")
    tool.chmod(0o755)
    assert gpu_sizes() == (143771 << 20, 81559 << 20)


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
