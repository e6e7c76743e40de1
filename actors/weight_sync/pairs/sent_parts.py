"""`SentParts` keeps what a rank has sent of the last two versions, so that only changes are sent (`sync.delta`).

A part that goes to several receivers in the same bucket is kept once. A version is kept once all receivers have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from ....codecs.weights.buckets import BucketEntry, BucketPlan, checksum
from ..cache import BucketCache, CachedVersion
from ..plan.packing import pack
from ..plan.transfer_plan import Bucket, Move, TransferPlan
from ..stream import shortest
from ..transports.protocol import BucketFrame, WeightUpdate


class SentParts:
    """The parts that one rank has sent, as buckets in host memory."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: longest time in seconds that a call waits for one in another thread."""
        self._cache = BucketCache(timeout_s)
        self._key = ""
        self._layout = BucketPlan((), ())
        """Distinct buckets that this rank sends in the plan with the hash `_key`."""
        self._places: dict[tuple[Move, ...], int] = {}
        """Number of each of these buckets, by what is in it."""

    def holds(self, version: int | None, plan: TransferPlan) -> bool:
        """Return whether `version` was the last one sent, and by the same plan."""
        newest = self._cache.newest
        # The layout is that of the last plan, also if sending by that plan failed.
        return newest is not None and (newest.version, plan.key) == (version, self._key) and newest.plan is self._layout

    @contextmanager
    def writing(self, update: WeightUpdate, plan: TransferPlan, rank: int, num_ranks: int) -> Iterator[PartFiller]:
        """Context manager that yields what fills the buckets of an update, and keeps them if no error is raised.

        rank: number of this sender in the plan. num_ranks: number of senders on this host. Changes from `update.base`
        are sent if this rank has sent that version by the same plan. Raises ValueError if the host has too little
        memory for two versions.
        """
        base = update.base if self.holds(update.base, plan) else None
        if plan.key != self._key:
            self._lay_out(plan, rank)
        self._cache.num_ranks = num_ranks
        with ExitStack() as stack:
            draft = stack.enter_context(self._cache.writing(update.version, self._layout))
            kept = None if base is None else stack.enter_context(self._cache.reading(base))
            yield PartFiller(draft, kept, self._places)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._cache.close()

    def _lay_out(self, plan: TransferPlan, rank: int) -> None:
        distinct = {bucket.moves: bucket.nbytes for bucket in plan.sending(rank)}
        entries: list[BucketEntry] = []
        for number, moves in enumerate(distinct):
            for move in moves:
                dtype = str(move.dtype).removeprefix("torch.")
                entries.append(BucketEntry(move.tensor, dtype, move.shape, 0, number, move.at, move.end - move.at))
        self._layout = BucketPlan(tuple(entries), tuple(distinct.values()))
        self._places = {moves: number for number, moves in enumerate(distinct)}
        self._key = plan.key


class PartFiller:
    """Fills the buckets of one update, as `PairSender.send` wants it."""

    def __init__(self, draft: CachedVersion, base: CachedVersion | None, places: Mapping[tuple[Move, ...], int]):
        """draft: memory for this version. base: the version before, None to send everything."""
        self._draft, self._base, self._places = draft, base, places
        self._packed: set[int] = set()

    def __call__(
        self, bucket: Bucket, tensors: Mapping[str, torch.Tensor], out: torch.Tensor, has_base: bool
    ) -> BucketFrame:
        """Write a bucket's payload into `out`, and return its header. has_base: whether the receiver has the base."""
        number = self._places[bucket.moves]
        new = self._draft.bucket(number)
        if number not in self._packed:
            pack(bucket, tensors, new)
            self._packed.add(number)
        encoding, payload = "whole", new
        if self._base is not None and has_base:
            encoding, payload = shortest(self._draft.plan.in_bucket(number), new, self._base.bucket(number))
        out[: len(payload)].copy_(payload)
        result = 0 if encoding == "whole" else checksum(new)
        return BucketFrame(bucket.number, encoding, len(payload), checksum(out[: len(payload)]), result)
