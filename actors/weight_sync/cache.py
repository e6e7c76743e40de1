"""Keeps the last two weight versions in the trainer's host memory, to serve late-joining engines and to compute deltas.

Two slots of memory are used in turn for the whole run. A version is written into the slot that does not hold the newest
version, and becomes readable once it is complete. Until then, or if writing it fails, the previous version stays the
newest.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ...codecs.integers import ALIGN, round_up
from ...codecs.weights.buckets import BucketPlan
from ..process.memory import available_memory, pin, unpin

_log = logging.getLogger(__name__)
NUM_VERSIONS = 2
MEMORY_SHARE = 0.8
"""Largest share of the available host memory that the two slots together may take, checked when they are reserved."""


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """The buckets of one weight version, in one memory slot of the cache."""

    version: int
    plan: BucketPlan
    starts: tuple[int, ...]
    """Offset of each bucket in `memory`, in bytes."""
    memory: torch.Tensor
    """The whole cache slot that holds the buckets, with its unused end: a 1-D uint8 tensor in host memory."""

    def bucket(self, bucket: int) -> torch.Tensor:
        """Return a view of one bucket, uint8 `[plan.sizes[bucket]]`."""
        start = self.starts[bucket]
        return self.memory[start : start + self.plan.sizes[bucket]]


class BucketCache:
    """Holds the buckets of two versions. Only one thread at a time may be inside a `writing` or `reading` block; other
    threads wait for it."""

    def __init__(self, timeout_s: float) -> None:
        """Create an empty cache. timeout_s: seconds that a call waits for another thread's block before it raises
        TimeoutError."""
        self._timeout_s = timeout_s
        self.num_ranks = 0
        """Number of train ranks of this host that each keep about as much: what they send. 0 if the buckets are those
        of the whole model, which only rank 0 keeps."""
        self._lock = threading.RLock()  # A delta reads the base while the same thread writes the next version.
        self._task = ""
        """Operation that holds the lock at the moment; named in error messages."""
        self._memories: list[torch.Tensor] = []
        self._pinned: list[torch.Tensor] = []
        """Memories that are pinned."""
        self._whole: list[CachedVersion] = []
        """Versions that can be read, the newest last."""

    @property
    def newest(self) -> CachedVersion | None:
        """Last version that was written completely; None before the first. Its bytes may only be read inside a
        `reading` block."""
        whole = self._whole
        return whole[-1] if whole else None

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the versions that can be read, the newest last."""
        return tuple(cached.version for cached in self._whole)

    def reserve(self, plan: BucketPlan) -> None:
        """Allocate memory for two versions of `plan`, unless the slots are large enough already. Versions in smaller
        slots are discarded.

        Raises ValueError, naming the bytes wanted and available, when two versions would take more than 80 % of the
        available memory.
        """
        nbytes = sum(map(_aligned, plan.sizes))
        with self._held("reserve memory"):
            if self._memories and len(self._memories[0]) >= nbytes:
                return
            self._free()
            wanted, available = NUM_VERSIONS * nbytes * (self.num_ranks or 1), available_memory()
            if wanted > MEMORY_SHARE * available:
                of, off = "the model", "sync.delta and sync.cache"
                if self.num_ranks:
                    of, off = f"what {self.num_ranks} train workers of this host send", "sync.delta"
                raise ValueError(
                    f"weights: {NUM_VERSIONS} versions of {of} in host memory need {wanted} bytes, more than "
                    f"{MEMORY_SHARE:.0%} of the {available} available; turn off {off}"
                )
            self._memories = [torch.from_numpy(np.empty(nbytes, dtype=np.uint8)) for _ in range(NUM_VERSIONS)]
            if torch.cuda.is_initialized() and nbytes:
                self._pin()

    @contextmanager
    def writing(self, version: int, plan: BucketPlan) -> Iterator[CachedVersion]:
        """Context manager that yields an empty slot for `version`; the block fills its buckets. Memory is reserved
        first; raises what `reserve` raises.

        When the block ends, `version` becomes the newest version, and only one earlier version is kept. If the block
        raises an exception, what it wrote is discarded instead.
        """
        with self._held(f"write version {version}"):
            self.reserve(plan)
            newest = self._whole[-1:]
            self._whole = newest  # The other slot is about to be overwritten.
            memory = next(free for free in self._memories if not newest or free is not newest[0].memory)
            starts = itertools.accumulate((_aligned(size) for size in plan.sizes), initial=0)
            draft = CachedVersion(version, plan, tuple(starts)[:-1], memory)
            yield draft
            self._whole = [*newest, draft]

    @contextmanager
    def reading(self, version: int) -> Iterator[CachedVersion]:
        """Context manager that yields a cached version, whose buckets do not change inside the block. Raises ValueError
        when the version is not in the cache."""
        with self._held(f"read version {version}"):
            for cached in reversed(self._whole):
                if cached.version == version:
                    yield cached
                    return
            there = ", ".join(map(str, self.versions)) or "none"
            raise ValueError(f"weights: version {version} is not in the bucket cache, which holds: {there}")

    def close(self) -> None:
        """Free the memory. Idempotent."""
        with self._held("close"):
            self._free()

    def _pin(self) -> None:
        """Pin the memory for copies from and to a GPU. Copies of unpinned memory are several times slower."""
        try:
            for memory in self._memories:
                pin(memory)
                self._pinned.append(memory)
        except OSError as error:
            _log.warning("weights: the cache of versions is not pinned: %s", error)

    def _free(self) -> None:
        for memory in self._pinned:
            unpin(memory)
        self._memories, self._pinned, self._whole = [], [], []

    @contextmanager
    def _held(self, task: str) -> Iterator[None]:
        start = time.monotonic()
        if not self._lock.acquire(timeout=self._timeout_s):
            raise TimeoutError(
                f"weights: bucket cache: waited {time.monotonic() - start:.1f} s to {task}: "
                f"another thread uses it to {self._task}"
            )
        outer, self._task = self._task, task
        try:
            yield
        finally:
            self._task = outer
            self._lock.release()


def _aligned(nbytes: int) -> int:
    return round_up(nbytes, ALIGN)
