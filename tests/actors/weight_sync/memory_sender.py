"""A WeightSender in this process that checks and decodes buckets, and keeps them by version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from headrace.actors.weight_sync.transports.protocol import (
    BucketFrame,
    ReceiverGroup,
    WeightTransferError,
    WeightUpdate,
)
from headrace.codecs.weights.buckets import BucketPlan, apply_sparse, checksum, expect_all, read_bucket
from headrace.codecs.weights.gpu_scatter import device_digest


class MemorySender:
    """Two buffers in turn, as a transport has; fails where the test says."""

    def __init__(self, *, lasting: bool = False, fails_at: str = "", device: str = "cpu") -> None:
        self.device = device
        self.lasting = lasting
        self.fails_at = fails_at
        """`buffer 3`, `send 3` or `finish`; cleared when it has."""
        self.calls: list[str] = []
        self.aborts: list[str] = []
        self.frames: list[BucketFrame] = []
        """Of the last update."""
        self.landed: dict[int, list[torch.Tensor]] = {}
        """Finished versions' buckets."""
        self.plans: dict[int, BucketPlan] = {}
        self.closed = False
        self.gate: threading.Event | None = None
        """Buffers wait for it."""
        self.waiting = threading.Event()
        self._update: WeightUpdate | None = None
        self._buckets: list[torch.Tensor] = []
        self._ring: list[torch.Tensor | None] = [None, None]

    def begin(
        self, version: int, plan: BucketPlan, receivers: Sequence[ReceiverGroup], base: int | None = None
    ) -> WeightUpdate:
        self.abort("begun again")
        self.calls.append(f"begin {version} base {base}")
        self.plans[version] = plan
        self.frames, self._buckets = [], []
        self._update = WeightUpdate(version, base, "memory", "here", plan.num_bytes, tuple(receivers), 1.0)
        return self._update

    def buffer(self, bucket: int, nbytes: int) -> torch.Tensor:
        self._step(f"buffer {bucket}", bucket)
        if self.gate is not None:
            self.waiting.set()
            assert self.gate.wait(30)
        memory = self._ring[bucket % 2]
        if memory is None or len(memory) < nbytes:
            memory = self._ring[bucket % 2] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        memory.fill_(0xEE)
        return memory[:nbytes]

    def send(self, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None = None) -> None:
        update = self._step(f"send {frame.bucket}", frame.bucket)
        memory = self._ring[frame.bucket % 2]
        empty = torch.empty(0, dtype=torch.uint8)
        payload = memory[: frame.nbytes].clone() if memory is not None and frame.nbytes else empty
        right = checksum(payload) == frame.checksum if digest is None else torch.equal(digest(), device_digest(payload))
        assert len(payload) == frame.nbytes and right
        if frame.encoding != "whole":
            assert update.base is not None
            whole = self.landed[update.base][frame.bucket].clone()
            if frame.encoding == "sparse":
                changed = whole.cpu()
                apply_sparse(payload.cpu().numpy(), changed.numpy())
                whole.copy_(changed)
            payload = whole
        self.frames.append(frame)
        self._buckets.append(payload)

    def finish(self) -> None:
        update = self._step("finish", len(self._buckets))
        expect_all(self.plans[update.version], range(len(self._buckets)))
        self.landed[update.version] = self._buckets
        self._update = None

    def abort(self, reason: str) -> None:
        if self._update is not None:
            self.aborts.append(reason)
            self._update = None

    def close(self) -> None:
        self.closed = True

    def named(self, version: int) -> dict[str, torch.Tensor]:
        """What arrived."""
        into: dict[str, torch.Tensor] = {}
        for bucket, payload in enumerate(self.landed[version]):
            read_bucket(self.plans[version], bucket, payload, into)
        return into

    def _step(self, call: str, bucket: int) -> WeightUpdate:
        self.calls.append(call)
        if self._update is None:
            raise WeightTransferError(f"version ?, {call}: no update is open: {self.aborts[-1:]}")
        if call == self.fails_at:
            self.fails_at = ""
            raise WeightTransferError(f"version {self._update.version}, {call}: engine 1 is gone")
        assert bucket == len(self._buckets), "buckets come in order"
        return self._update
