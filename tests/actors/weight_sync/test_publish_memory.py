"""Tests how much memory publishing takes besides the current tensor."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.transports.protocol import BucketFrame, ReceiverGroup
from headrace.codecs.weights.buckets import checksum
from headrace.tests.actors.weight_sync.memory_sender import MemorySender

pytestmark = pytest.mark.processes


class DiscardingSender(MemorySender):
    """Has the two buffers in flight, and forgets what was in them."""

    def send(self, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None = None) -> None:
        self._step(f"send {frame.bucket}", frame.bucket)
        memory = self._ring[frame.bucket % 2]
        assert memory is not None and checksum(memory[: frame.nbytes]) == frame.checksum
        self.frames.append(frame)
        self._buckets.append(memory[:0])


NUM_TENSORS, TENSOR_BYTES, BUCKET_BYTES = 11, 24 << 20, 16 << 20


def _measure(queue: multiprocessing.Queue[int]) -> None:
    """Puts by how much publishing a model of 264 MiB raised this process's peak memory."""
    torch.set_num_threads(1)
    named = {f"w{index}": (torch.uint8, (TENSOR_BYTES,)) for index in range(NUM_TENSORS)}
    # One memory for all tensors: what malloc makes of frees and allocations by turns is not to be measured.
    lent = torch.zeros(TENSOR_BYTES, dtype=torch.uint8)
    sender = DiscardingSender()
    target = WeightPublisher(sender, SyncConfig(timeout_s=2.0), BUCKET_BYTES)
    update = target.open(1, named, [ReceiverGroup("engine 0", 1)])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is used now
    before = _status_bytes("VmRSS")
    target.publish(update, ((name, lent.fill_(index)) for index, name in enumerate(named)))
    assert len(sender.frames) == -(-NUM_TENSORS * TENSOR_BYTES // BUCKET_BYTES)
    queue.put(_status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) << 10


def test_extra_memory_is_two_buckets() -> None:
    """Beside the tensor in hand."""
    context = multiprocessing.get_context("spawn")  # a forked process shares memory with its parent
    queue: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=_measure, args=(queue,))
    process.start()
    extra = queue.get(timeout=120)
    process.join(60)
    assert 2 * BUCKET_BYTES <= extra <= 2 * BUCKET_BYTES + (4 << 20)
