"""Weights as views of the buffers that they travel in, kept from update to update as buffers and plans are.

Making 300 views anew costs milliseconds, and an update between GPUs takes ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...codecs.buckets import BucketEntry, BucketPlan
from ...codecs.gpu_scatter import Scatter, scatter_kernel
from ...codecs.schema import DTYPES
from .transports.receiver import bucket_offsets

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


@dataclass(frozen=True, slots=True)
class Landing:
    """How a bucket on a GPU is taken."""

    scatter: Scatter
    placed: frozenset[str]
    """The weights that it brings, all or a piece, to where they belong."""


class BucketLandings:
    """Those of one plan and one model's places at a time."""

    def __init__(self) -> None:
        self._plan: BucketPlan | None = None
        self._places: Mapping[str, torch.Tensor] = {}
        self._made: dict[int, Landing] = {}

    def of(self, plan: BucketPlan, bucket: int, places: Mapping[str, torch.Tensor], device: torch.device) -> Landing:
        """places: by HF name, where weights belong; kept are those of the mapping that was given last, which must not
        change. A place is left out when it is not contiguous, on `device`, and in the weight's dtype and shape."""
        if self._plan is not plan or self._places is not places:
            self._plan, self._places, self._made = plan, places, {}
        if bucket not in self._made:
            pieces, names = [], []
            for entry in plan.in_bucket(bucket):
                place = places.get(entry.name)
                if place is not None and _is_for(place, entry, device):
                    flat = place.detach().view(-1).view(torch.uint8)
                    pieces.append((entry.offset, flat[entry.begin : entry.begin + entry.nbytes]))
                    names.append(entry.name)
            self._made[bucket] = Landing(
                Scatter(plan.sizes[bucket], pieces, device, scatter_kernel(device)), frozenset(names)
            )
        return self._made[bucket]

    def clear(self) -> None:
        """Let go of the places."""
        self._plan, self._places, self._made = None, {}, {}


def _is_for(place: torch.Tensor, entry: BucketEntry, device: torch.device) -> bool:
    spec = place.dtype, tuple(place.shape), place.device
    return place.is_contiguous() and spec == (DTYPES[entry.dtype], entry.shape, device)
