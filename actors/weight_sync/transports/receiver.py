"""Base classes of all receivers: they check order, size and checksum of every bucket, and any thread can stop them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ....codecs.integers import ALIGN, round_up
from ....codecs.weights.buckets import BucketPlan, checksum
from ....codecs.weights.gpu_scatter import device_digest
from .deadline import Deadline, worker_name
from .protocol import BucketFrame, WeightTransferError, WeightUpdate


class Stream(ABC):
    """Base class of the streams of all receivers: implements WeightStream, except for how the bytes travel.

    Subclasses implement `_arrivals` and `_close`.
    """

    lasting = False
    device = torch.device("cpu")
    """Device of the payloads."""
    memory: torch.Tensor | None = None
    """One uint8 tensor that holds the payloads of all buckets sent in full, until `close`; bucket b starts at
    `bucket_offsets(plan)[b]`. None if the payloads are not in one tensor."""

    take: Callable[[BucketFrame, torch.Tensor], torch.Tensor] | None = None
    """Function that copies a payload on a GPU to its destinations, and computes and returns its digest on the way. It
    is called with each bucket's header and payload, instead of `device_digest`. None to call `device_digest`."""

    def __init__(self, update: WeightUpdate, plan: BucketPlan, deadline: Deadline) -> None:
        self.update = update
        self.plan = plan
        self.deadline = deadline
        self.closed = False

    def __iter__(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        """Yield buckets in order and verify them: implements `WeightStream.__iter__`."""
        expected = 0
        found: dict[int, torch.Tensor] = {}
        self.deadline.moved()  # between joining and reading, an engine may have waited for its requests
        for frame, payload in self._arrivals():
            self.deadline.moved()
            try:
                self._check(frame, payload, expected)
            except WeightTransferError as error:
                self.give_up(error)
                raise
            if payload.is_cuda and frame.nbytes:
                found[frame.bucket] = device_digest(payload) if self.take is None else self.take(frame, payload)
            expected += 1
            yield frame, payload
            self.deadline.moved()  # what was done with the bucket was no wait
        if expected != len(self.plan.sizes):
            raise self.deadline.error(f"bucket {expected} of {len(self.plan.sizes)} never came")
        if found and (damage := self._damage(found)):
            try:
                raise self.deadline.error(damage)
            except WeightTransferError as error:
                self.give_up(error)
                raise
        self._confirm()

    def receive_into(self, memory: torch.Tensor) -> None:
        """Offer memory to receive buckets into, laid out like `Stream.memory`. Called only before iterating. Subclasses
        may ignore the offer, as this base class does."""

    def read_ahead(self) -> None:
        """Start receiving before the iteration starts, as far as the buffers have room. Subclasses may ignore the call,
        as this base class does."""

    def close(self) -> None:
        """Release buffers and mappings. Idempotent. Another thread may call it, which ends the iteration."""
        if not self.closed:
            self.closed = True
            self.deadline.stop()
            self._close()

    # ------------------------------------------------------------ for subclasses

    @abstractmethod
    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        """Yield the header and payload of each bucket as it arrives, without verifying them. Ends after the last
        bucket, once the update is complete."""

    def _digests(self) -> torch.Tensor:
        """Return the sender's digests of payloads on a GPU, int64 `[buckets]`, once all buckets have come. Only
        subclasses that yield payloads on a GPU implement it."""
        raise AssertionError(f"{type(self).__name__} yields no payloads on a GPU")

    def _confirm(self) -> None:
        """Confirm to the sender that all buckets have arrived and are undamaged. Does nothing unless a subclass
        implements it."""

    def give_up(self, error: WeightTransferError) -> None:
        """Report to the sender that this receiver cannot use the update; other receivers must still get it. Does
        nothing unless a subclass implements it."""

    @abstractmethod
    def _close(self) -> None: ...

    def check_open(self) -> None:
        """Raise WeightTransferError when another thread has closed the stream."""
        if self.closed:
            raise self.deadline.error("the reception was ended")

    # ------------------------------------------------------------ inside

    def _check(self, frame: BucketFrame, payload: torch.Tensor, expected: int) -> None:
        name = f"bucket {frame.bucket} of {len(self.plan.sizes)}"
        if frame.bucket != expected:
            raise self.deadline.error(f"bucket {expected} of {len(self.plan.sizes)} never came, {name} did")
        if frame.encoding == "whole" and frame.nbytes != self.plan.sizes[frame.bucket]:
            raise self.deadline.error(f"{name} has {frame.nbytes} bytes, planned are {self.plan.sizes[frame.bucket]}")
        if frame.encoding != "whole" and self.update.base is None:
            raise self.deadline.error(f"{name} is a delta, but the update has no base")
        if len(payload) != frame.nbytes:
            raise self.deadline.error(f"{name} has {len(payload)} bytes, announced were {frame.nbytes}")
        if frame.nbytes and not payload.is_cuda:
            found = checksum(payload)
            if found != frame.checksum:
                raise self.deadline.error(
                    f"{name} is damaged: the checksum of its {frame.nbytes} bytes is {found:016x}, "
                    f"{frame.checksum:016x} was sent"
                )

    def _damage(self, found: dict[int, torch.Tensor]) -> str:
        """Compare the digests of payloads on a GPU (`found`, by bucket) with the sender's. Returns a description of the
        damage, or "" when there is none."""
        sent = self._digests()
        # Usually all of them are compared; picking some would cost the GPU another round trip.
        same = torch.stack([*found.values()]) == (sent if len(found) == len(sent) else sent[list(found)])
        damaged = [bucket for bucket, right in zip(found, same.tolist(), strict=True) if not right]
        if not damaged:
            return ""
        more = f", and so are {len(damaged) - 1} more" if damaged[1:] else ""
        return f"bucket {damaged[0]} of {len(self.plan.sizes)} is damaged{more}: digests are not those that were sent"


def bucket_offsets(plan: BucketPlan) -> list[int]:
    """Return the byte offset of each bucket, and the end of the last one, in memory that holds all buckets in order.

    A tensor that continues in the next bucket is contiguous in this memory, because the bucket that it continues from
    is full and a multiple of ALIGN long.
    """
    aligned = [round_up(size, ALIGN) for size in plan.sizes]
    return np.cumsum([0, *aligned]).tolist()


class Receiver(ABC):
    """Base class of all receivers: implements WeightReceiver, except for how an update is joined. Subclasses implement
    `_open`, and `close` if they need it."""

    def __init__(self, engine: str, worker: int) -> None:
        self.engine = engine
        self.worker = worker
        self._deadline: Deadline | None = None

    def open(self, update: WeightUpdate) -> Stream:
        """Join `update` and return its stream: implements `WeightReceiver.open`."""
        deadline = self._deadline = Deadline(worker_name(self.engine, self.worker), update.version, update.timeout_s)
        before = 0
        for group in update.receivers:
            if group.engine == self.engine and self.worker < group.num_workers:
                return self._open(update, before + self.worker, deadline)
            before += group.num_workers
        named = ", ".join(f"{group.engine} ({group.num_workers})" for group in update.receivers)
        raise deadline.error(f"takes no part in the update, which is for {named or 'no receiver'}")

    def interrupt(self) -> None:
        """Make an `open` that waits in another thread fail at once."""
        if self._deadline is not None:
            self._deadline.stop()

    @abstractmethod
    def _open(self, update: WeightUpdate, rank: int, deadline: Deadline) -> Stream:
        """Join the update and return its stream. rank: number of this worker among all receivers of the update, from
        0."""

    def close(self) -> None:
        """Release memory and connections that were kept between updates. Idempotent."""
