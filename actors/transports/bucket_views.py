"""Weights as views of the buffers that they travel in, kept from update to update as buffers and plans are.

Making 300 views anew costs milliseconds, and an update between GPUs takes ten.
"""

from __future__ import annotations

import math

import torch

from ...codecs.buckets import BucketEntry, BucketPlan
from ...codecs.schema import DTYPES
from .receiving import bucket_offsets

Views = dict[str, torch.Tensor]
"""HF name -> a weight in its dtype and shape."""


class BucketViews:
    """Those of one plan at a time, in a few buffers."""

    def __init__(self) -> None:
        self._plan: BucketPlan | None = None
        self._last: dict[str, int] = {}
        """The bucket that a weight ends in."""
        self._parts: dict[int, tuple[BucketEntry, ...]] = {}
        self._made: dict[tuple[int, int, int], Views] = {}

    def inside(self, plan: BucketPlan, bucket: int, buffer: torch.Tensor) -> Views:
        """The weights of which all lies in this bucket, in `buffer`, uint8: its payload."""
        self._turn_to(plan)
        made = self._kept(bucket, buffer)
        if not made:
            for entry in plan.in_bucket(bucket):
                if not self._is_part(entry):
                    flat = buffer[entry.offset : entry.offset + entry.nbytes]
                    made[entry.name] = flat.view(DTYPES[entry.dtype]).view(entry.shape)
        return made

    def parts(self, plan: BucketPlan, bucket: int) -> tuple[BucketEntry, ...]:
        """What the bucket has of weights that lie in several."""
        self._turn_to(plan)
        if bucket not in self._parts:
            self._parts[bucket] = tuple(filter(self._is_part, plan.in_bucket(bucket)))
        return self._parts[bucket]

    def all(self, plan: BucketPlan, memory: torch.Tensor) -> Views:
        """All weights in `memory`, uint8, in which bucket b lies at `bucket_offsets(plan)[b]`."""
        self._turn_to(plan)
        made = self._kept(-1, memory)
        if not made:
            offsets = bucket_offsets(plan)
            for entry in plan.entries:
                if entry.begin == 0 and entry.name not in made:
                    dtype = DTYPES[entry.dtype]
                    begin = offsets[entry.bucket] + entry.offset
                    flat = memory[begin : begin + math.prod(entry.shape) * dtype.itemsize]
                    made[entry.name] = flat.view(dtype).view(entry.shape)
        return made

    def last_bucket(self, plan: BucketPlan, name: str) -> int:
        """The bucket that the weight ends in."""
        self._turn_to(plan)
        return self._last[name]

    def clear(self) -> None:
        """Let go of the buffers."""
        self._made = {}

    def _is_part(self, entry: BucketEntry) -> bool:
        return entry.begin > 0 or self._last[entry.name] != entry.bucket

    def _turn_to(self, plan: BucketPlan) -> None:
        if self._plan is not plan:
            if self._plan != plan:
                self._made = {}
                self._last = {entry.name: entry.bucket for entry in plan.entries}
                self._parts = {}
            self._plan = plan

    def _kept(self, bucket: int, buffer: torch.Tensor) -> Views:
        """Those made before of this bucket in this buffer, to be filled when there are none."""
        if not buffer.is_cuda:  # cheap to make; and a mapping of the host's memory must not be held for them
            return {}
        key = (bucket, buffer.data_ptr(), len(buffer))
        if key not in self._made and self._plan is not None and len(self._made) > 4 * len(self._plan.sizes):
            self._made = {}  # of a sender that is gone, whose buffers they would keep
        return self._made.setdefault(key, {})
