"""Keeps tensor views into bucket buffers from one weight update to the next, because creating them is slow.

Creating 300 views takes milliseconds, while a full weight update between GPUs takes only ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...codecs.memory import flat_bytes
from ...codecs.schema import DTYPES
from ...codecs.weights.buckets import BucketEntry, BucketPlan
from ...codecs.weights.gpu_scatter import Scatter, scatter_kernel
from .transports.ends import bucket_offsets

Views = dict[str, torch.Tensor]
"""Views of weights, each in its own dtype and shape, by Hugging Face name."""


class BucketViews:
    """Makes views of weights inside bucket buffers and caches them, for one bucket plan at a time."""

    def __init__(self) -> None:
        self._plan: BucketPlan | None = None
        self._last: dict[str, int] = {}
        """Last bucket that holds bytes of each weight, by weight name."""
        self._parts: dict[int, tuple[BucketEntry, ...]] = {}
        self._made: dict[tuple[int, int, int], Views] = {}

    def inside(self, plan: BucketPlan, bucket: int, buffer: torch.Tensor) -> Views:
        """Return views of the weights that lie entirely in this bucket, by name. buffer: payload of the bucket,
        uint8."""
        self._turn_to(plan)
        made = self._kept(bucket, buffer)
        if not made:
            for entry in plan.in_bucket(bucket):
                if not self._is_part(entry):
                    flat = buffer[entry.offset : entry.offset + entry.nbytes]
                    made[entry.name] = flat.view(DTYPES[entry.dtype]).view(entry.shape)
        return made

    def parts(self, plan: BucketPlan, bucket: int) -> tuple[BucketEntry, ...]:
        """Return the bucket's entries that are pieces of weights spread over several buckets."""
        self._turn_to(plan)
        if bucket not in self._parts:
            self._parts[bucket] = tuple(filter(self._is_part, plan.in_bucket(bucket)))
        return self._parts[bucket]

    def all(self, plan: BucketPlan, memory: torch.Tensor) -> Views:
        """Return views of all weights in `memory`, uint8, in which bucket b starts at `bucket_offsets(plan)[b]`."""
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
        """Return the number of the last bucket that holds bytes of the weight."""
        self._turn_to(plan)
        return self._last[name]

    def clear(self) -> None:
        """Drop all cached views, so that the buffers can be freed."""
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
        """Return the views that are cached for this bucket in this buffer, or an empty dict to fill. Views of buffers
        on a CPU are not cached."""
        if not buffer.is_cuda:  # Views of host memory are cheap, and a cached view would keep a mapping alive.
            return {}
        key = (bucket, buffer.data_ptr(), len(buffer))
        if key not in self._made and self._plan is not None and len(self._made) > 4 * len(self._plan.sizes):
            self._made = {}  # Otherwise, old views would keep the buffers of an ended sender alive.
        return self._made.setdefault(key, {})


@dataclass(frozen=True, slots=True)
class Landing:
    """Copies the weights in one bucket on a GPU to their destinations, such as the engine's live parameters."""

    scatter: Scatter
    placed: frozenset[str]
    """Names of the weights that this bucket writes, as a whole or in part, to their destinations."""


class BucketLandings:
    """Makes and caches the `Landing` of each bucket, for one bucket plan and one mapping of destinations at a time."""

    def __init__(self) -> None:
        self._plan: BucketPlan | None = None
        self._places: Mapping[str, torch.Tensor] = {}
        self._made: dict[int, Landing] = {}

    def of(self, plan: BucketPlan, bucket: int, places: Mapping[str, torch.Tensor], device: torch.device) -> Landing:
        """Return the bucket's `Landing`, which copies its weights to their destinations.

        places: destination memory of the weights, by Hugging Face name. Landings are cached for the mapping that was
        given last, which must not change. A destination is ignored unless it is contiguous, on `device`, and in the
        weight's dtype and shape.
        """
        if self._plan is not plan or self._places is not places:
            self._plan, self._places, self._made = plan, places, {}
        if bucket not in self._made:
            pieces, names = [], []
            for entry in plan.in_bucket(bucket):
                place = places.get(entry.name)
                if place is not None and _is_for(place, entry, device):
                    flat = flat_bytes(place)
                    pieces.append((entry.offset, flat[entry.begin : entry.begin + entry.nbytes]))
                    names.append(entry.name)
            self._made[bucket] = Landing(
                Scatter(plan.sizes[bucket], pieces, device, scatter_kernel(device)), frozenset(names)
            )
        return self._made[bucket]

    def clear(self) -> None:
        """Drop all cached landings, so that the destination memory can be freed."""
        self._plan, self._places, self._made = None, {}, {}


def _is_for(place: torch.Tensor, entry: BucketEntry, device: torch.device) -> bool:
    spec = place.dtype, tuple(place.shape), place.device
    return place.is_contiguous() and spec == (DTYPES[entry.dtype], entry.shape, device)
