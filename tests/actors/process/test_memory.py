"""What processes hold: by NVML where it knows them, else by their own count, and always in the host."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.actors.process.memory import ProcessMemory, gpu_sizes, measure, nvml_bytes


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
