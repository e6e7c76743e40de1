"""The sampler of the GPUs, on a module in NVML's place that says what it is asked."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from headrace.bench.gpu.nvml import GpuSamples, sampler_of, visible_gpus


class FakeNvml:
    """Stands in for the module `pynvml`. GPU 1 is always busy, others never; it fails after `fails_after` samples."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails_after: int = 1_000_000) -> None:
        self.sampled = threading.Event()
        """Set once every GPU has been asked three times."""
        self._left, self._asked = fails_after, 0

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, device: object) -> bytes:
        return f"Fake {device}".encode()

    def nvmlDeviceGetUtilizationRates(self, device: object) -> SimpleNamespace:
        self._left -= 1
        if self._left < 0:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=100 if device == 1 else 0)

    def nvmlDeviceGetMemoryInfo(self, device: object) -> SimpleNamespace:
        self._asked += 1
        if self._asked >= 6:
            self.sampled.set()
        return SimpleNamespace(used=(3 if device == 1 else 1) << 30)


def test_samples_are_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml, since = FakeNvml(), time.time()
    with sampler_of(nvml, 2, interval_s=0.001) as sampler:
        assert nvml.sampled.wait(10)
    samples = sampler.samples
    assert samples.names == ["Fake 0", "Fake 1"] and len(samples.at) >= 3 and not samples.failure
    assert samples.idle_shares(since, time.time()) == [1.0, 0.0]
    assert samples.peaks_gib() == [1.0, 3.0]
    assert samples.idle_shares(0.0, 1.0) == [], "there is no sample of that time"


def test_only_samples_of_the_time_count() -> None:
    samples = GpuSamples(["a"], at=[1.0, 2.0, 3.0, 4.0], busy=[[0.0], [1.0], [0.5], [0.0]], memory_gib=[[1.0]] * 4)
    assert samples.idle_shares(2.0, 3.0) == [0.25]


def test_an_error_ends_the_sampling_and_is_told() -> None:
    sampler = sampler_of(FakeNvml(fails_after=5), 1, interval_s=0.001)
    with sampler:
        sampler._thread.join(10)
    assert sampler.samples.failure == "NVML stopped answering: GPU is lost"
    assert len(sampler.samples.at) == len(sampler.samples.busy) == len(sampler.samples.memory_gib) == 5


@pytest.mark.parametrize(("visible", "expected"), [(None, ["0", "1"]), ("3, GPU-ab,1", ["3", "GPU-ab"]), ("1", ["1"])])
def test_gpus_are_those_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(2) == expected
    assert sampler_of(FakeNvml(), 2).samples.names == [f"Fake {word}" for word in expected]
