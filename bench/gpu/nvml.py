"""Samples through NVML, in a thread of this process, how busy each GPU is and how much of its memory is in use."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from ...dataplane.imports import MissingExtra

INTERVAL_S = 0.25


@dataclass(slots=True)
class GpuSamples:
    """Samples of all GPUs that the benchmark may use."""

    names: list[str]
    """Name of each GPU."""
    at: list[float] = field(default_factory=list)
    """Unix time of each sample."""
    busy: list[list[float]] = field(default_factory=list)
    """Share of NVML's last sampling period in which each GPU ran a kernel, for each sample."""
    memory_gib: list[list[float]] = field(default_factory=list)
    """Memory in use on each GPU by all processes, in GiB, for each sample."""
    failure: str = ""
    """Sentence about the error that ended the sampling early; "" if there was none."""

    def between(self, since: float, until: float) -> list[int]:
        """Return the indices of the samples between two Unix times, both included."""
        return [number for number, at in enumerate(self.at) if since <= at <= until]

    def idle_shares(self, since: float, until: float) -> list[float]:
        """Return the share of the time between two Unix times in which each GPU was idle; empty without a sample."""
        picked = self.between(since, until)
        if not picked:
            return []
        return [1 - sum(self.busy[at][gpu] for at in picked) / len(picked) for gpu in range(len(self.names))]

    def peaks_gib(self) -> list[float]:
        """Return the largest memory in use on each GPU over all samples, in GiB; empty if there is no sample."""
        return [max(row[gpu] for row in self.memory_gib) for gpu in range(len(self.names))] if self.memory_gib else []


class GpuSampler:
    """Context manager that samples the GPUs four times per second for as long as its body runs."""

    def __init__(self, nvml: Any, devices: list[Any], names: list[str], interval_s: float = INTERVAL_S) -> None:
        """nvml: the module `pynvml`, which is initialised. devices: NVML's handle of each GPU."""
        self.samples = GpuSamples(names)
        self._nvml, self._devices, self._interval_s = nvml, devices, interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def __enter__(self) -> GpuSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            try:
                self._sample()
            except self._nvml.NVMLError as error:
                self.samples.failure = f"NVML stopped answering: {error}"
                return
            if self._over.wait(self._interval_s):
                return

    def _sample(self) -> None:
        busy = [self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100 for device in self._devices]
        memory = [self._nvml.nvmlDeviceGetMemoryInfo(device).used / 2**30 for device in self._devices]
        self.samples.busy.append(busy)
        self.samples.memory_gib.append(memory)
        self.samples.at.append(time.time())


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Context manager that yields the module `pynvml`, initialised. Raises MissingExtra when it is not installed, and
    RuntimeError when there is no NVIDIA driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise MissingExtra("nvidia-ml-py", "the idle share of GPUs", "gpu") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML cannot be used: {error}") from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


@contextmanager
def usable_nvml(notes: list[str]) -> Iterator[Any]:
    """Context manager that yields the module `pynvml`, or None where NVML cannot be used. It adds the reason to
    `notes`."""
    with ExitStack() as stack:
        nvml = None
        try:
            nvml = stack.enter_context(open_nvml())
        except (MissingExtra, RuntimeError) as error:
            notes.append(f"idle shares are left out: {error}")
        yield nvml


def visible_gpus(count: int) -> list[str]:
    """Return the numbers or UUIDs of the first `count` GPUs that this process may use. They come from
    CUDA_VISIBLE_DEVICES. Without that variable they are the numbers from 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = map(str, range(count)) if visible is None else (word.strip() for word in visible.split(","))
    return list(named)[:count]


def sampler_of(nvml: Any, count: int, interval_s: float = INTERVAL_S) -> GpuSampler:
    """Return a sampler of the first `count` GPUs that this process may use. nvml: the module `pynvml`, which is
    initialised."""
    return GpuSampler(nvml, _devices(nvml, count), gpu_names(nvml, count), interval_s)


def gpu_names(nvml: Any, count: int) -> list[str]:
    """Return the names of the first `count` GPUs that this process may use. nvml: the module `pynvml`, or None to ask
    CUDA. NVML is preferred because it takes no memory of the GPUs."""
    if nvml is None:
        return [torch.cuda.get_device_name(number) for number in range(count)]
    names = [nvml.nvmlDeviceGetName(device) for device in _devices(nvml, count)]
    return [name.decode() if isinstance(name, bytes) else name for name in names]


def _devices(nvml: Any, count: int) -> list[Any]:
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(word)) if word.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(word)
        for word in visible_gpus(count)
    ]
