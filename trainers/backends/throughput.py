"""Measures FLOP/s, MFU, tokens per second and peak memory of train steps, over the duration of the steps alone."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from .flops import BF16_PEAKS, FlopModel

GIB = 2**30


class StepMeter:
    """Measures the duration of the open train step on one rank, and counts its tokens and FLOPs."""

    def __init__(
        self,
        flops: FlopModel | None,
        device: torch.device,
        world: int,
        group: dist.ProcessGroup | None,
        *,
        half: bool,
    ) -> None:
        """Prepare to measure the steps of a mesh of `world` ranks.

        `group` has the ranks over which tokens and FLOPs are summed, so that each row counts once; it is None for one
        rank alone. `half` is true when matrix products are in bfloat16. FLOP/s are reported only if `flops` is given.
        MFU is reported only if, in addition, `half` is true and the device's peak FLOP/s are known.
        """
        self._flops, self._device, self._world, self._group = flops, device, world, group
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = BF16_PEAKS.get(name) if half else None
        self.begin()

    def begin(self) -> None:
        """Start a step with all counts at 0."""
        self._seconds = self._tokens = self._work = 0.0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context that adds its duration, including waits for rows, to the seconds of the step. On a GPU it ends with a
        synchronization."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds += time.perf_counter() - start

    def add(self, lengths: np.ndarray, predicted: int) -> None:
        """Count the tokens and FLOPs of a microbatch of whole rows with `lengths` tokens (int64 `[N]`).

        `predicted` is the number of tokens whose logits were computed.
        """
        self._tokens += float(lengths.sum())
        if self._flops is not None:
            self._work += self._flops.step(lengths, predicted)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the whole mesh, the same on all ranks. Collective over all ranks.

        `train/tokens_per_s` is the number of tokens of all ranks, including prompts, divided by the seconds of the
        slowest rank. `train/tflops` is the model's TFLOP/s per rank, averaged over the ranks, and `train/mfu` is its
        share of the device's peak. `memory/peak_gib` is the largest peak memory of any rank: on a GPU the device memory
        during this step, on a CPU the host memory since the process started.
        """
        totals = torch.tensor([self._tokens, self._work], dtype=torch.float64, device=self._device)
        most = torch.tensor([self._seconds, self._peak_gib()], dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        if self._world > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        (tokens, work), (seconds, peak_gib) = totals.tolist(), most.tolist()
        seconds = max(seconds, 1e-9)
        metrics = {"train/tokens_per_s": tokens / seconds, "memory/peak_gib": peak_gib}
        if self._flops is not None:
            rate = work / seconds / self._world
            metrics["train/tflops"] = rate / 1e12
            if self._peak is not None:
                metrics["train/mfu"] = rate / self._peak
        return metrics

    def _peak_gib(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
