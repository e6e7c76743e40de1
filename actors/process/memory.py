"""Measures the memory of processes and of the host, and pins host memory for copies to a GPU.

The memory that processes hold is measured on GPUs (by NVML, else by the processes' own count) and on the host. Free
memory is the free memory of the machine within its container's limit (cgroup v2).
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

SMI_TIMEOUT_S = 10.0
"""Time limit in seconds of `nvidia-smi`."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory that one actor's processes held when they were measured."""

    device_bytes: int
    """Number of bytes on GPUs, including CUDA contexts if NVML measured them; 0 without GPUs."""
    host_bytes: int
    """Number of bytes resident in host memory, summed over the processes."""
    whole_device: bool = False
    """True if `device_bytes` is what all processes together hold on the GPU, because NVML could not attribute it to
    processes."""

    @property
    def held_bytes(self) -> int:
        """Number of bytes on GPUs; if the processes hold no GPU memory, number of bytes in host memory."""
        return self.device_bytes or self.host_bytes


def measure(pids: Collection[int], own_bytes: Callable[[], int] = lambda: 0) -> ProcessMemory:
    """Return the memory that the processes `pids` of this host hold together. A process that has ended holds no memory.

    own_bytes: function that returns the bytes that the processes' own framework has allocated on GPUs. It is called
    only if NVML is missing or does not list any of the processes, for example in a container with separate process ids.
    """
    on_devices = nvml_bytes(pids)
    return ProcessMemory(own_bytes() if on_devices is None else on_devices, sum(map(_resident, pids)))


def nvml_bytes(pids: Collection[int]) -> int | None:
    """Return the number of bytes that the processes hold on all GPUs of this host, according to NVML. Returns None
    without NVML (`pip install nvidia-ml-py`) or GPUs, or if NVML lists none of the processes."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        found = [
            process.usedGpuMemory or 0
            for index in range(nvml.nvmlDeviceGetCount())
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index))
            if process.pid in pids
        ]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return sum(found) if any(found) else None


@dataclass(frozen=True, slots=True)
class AssumedMachine:
    """Hosts for which a dry run plans instead of this machine. All of them are alike."""

    num_hosts: int
    gpus: int
    """Number of GPUs of each host."""
    gpu_bytes: int
    """Memory in bytes of each GPU."""


_assumed: ContextVar[AssumedMachine | None] = ContextVar("assumed machine", default=None)


@contextmanager
def assume_machine(machine: AssumedMachine | None) -> Iterator[None]:
    """Context manager in which plans and estimates are made for `machine`; None means this machine."""
    token = _assumed.set(machine)
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed_machine() -> AssumedMachine | None:
    """Return the machine for which plans are made; None if it is this machine."""
    return _assumed.get()


def gpu_sizes() -> tuple[int, ...]:
    """Return the total memory in bytes of each GPU of this host; () without GPUs. The sizes come from NVML or
    `nvidia-smi`, or from an assumed machine."""
    assumed = assumed_machine()
    if assumed is not None:
        return (assumed.gpu_bytes,) * assumed.gpus
    nvml = _nvml()
    if nvml is None:
        return _smi_sizes()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(nvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _smi_sizes() -> tuple[int, ...]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ()
    query = [smi, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S).stdout.split()
    except subprocess.TimeoutExpired:
        return ()
    return tuple(int(mib) << 20 for mib in told if mib.isdigit())


def _nvml() -> Any:
    """Return the module `pynvml`, initialized, or None if it is not installed or finds no driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def memory_limit(root: Path = CGROUP) -> int | None:
    """Return the container's memory limit in bytes, or None when there is none."""
    return _bytes(root / "memory.max")


def total_memory() -> int:
    """Return the number of bytes of memory of this machine, or the container's limit if that is lower."""
    total, limit = psutil.virtual_memory().total, memory_limit()
    return total if limit is None else min(total, limit)


def available_memory(root: Path = CGROUP) -> int:
    """Return the number of bytes that can be allocated without swapping and without exceeding the container's limit.

    File pages in the container's cache that have not been used lately count as free, because the kernel reclaims them
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


def pin(memory: torch.Tensor) -> None:
    """Pin the memory of a tensor, so that copies between it and a GPU run at the link's full speed. The tensor must
    stay at the same address until `unpin`. Raises OSError if CUDA refuses.

    torch rounds its own pinned memory up to a power of two, which would waste up to half of it.
    """
    code = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise OSError(f"{memory.nbytes} bytes of host memory could not be pinned (CUDA error {code})")


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`, before the memory is freed."""
    _cuda_runtime().cudaHostUnregister(memory.data_ptr())


def _cuda_runtime() -> Any:
    import torch  # The import stands here because the driver measures memory without torch.

    return torch.cuda.cudart()
