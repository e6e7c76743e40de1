"""What all streams have in common: buckets in order, of the planned size, verified; an end from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from ....codecs.buckets import BucketPlan, checksum
from ....codecs.gpu_scatter import device_digest
from ....codecs.integers import round_up
from ....codecs.memory import ALIGN
from .deadline import Deadline, worker_name
from .protocol import BucketFrame, WeightTransferError, WeightUpdate


class Stream:
    """A WeightStream but for how bytes travel: subclasses have `_arrivals` and `_close`."""

    lasting = False
    device = torch.device("cpu")
    """Where payloads are."""
    memory: torch.Tensor | None = None
    """uint8: payloads of whole buckets lie there, bucket b at `bucket_offsets(plan)[b]`, until `close`."""

    take: Callable[[BucketFrame, torch.Tensor], torch.Tensor] | None = None
    """Called instead of `device_digest` with every payload on a GPU: it finds the digest on the way to where the bytes
    belong."""

    def __init__(self, update: WeightUpdate, plan: BucketPlan, deadline: Deadline) -> None:
        self.update = update
        self.plan = plan
        self.deadline = deadline
        self.closed = False

    def __iter__(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        """See the protocol."""
        expected = 0
        found: dict[int, torch.Tensor] = {}
        for frame, payload in self._arrivals():
            try:
                self._check(frame, payload, expected)
            except WeightTransferError as error:
                self.give_up(error)
                raise
            if payload.is_cuda and frame.nbytes:
                found[frame.bucket] = device_digest(payload) if self.take is None else self.take(frame, payload)
            expected += 1
            yield frame, payload
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
        """Offer the place where whole buckets are wanted, as for `memory`; call before iterating. May be ignored."""

    def read_ahead(self) -> None:
        """Begin to receive before anybody iterates, as far as there is room for it. May be ignored."""

    def close(self) -> None:
        """See the protocol."""
        if not self.closed:
            self.closed = True
            self.deadline.stop()
            self._close()

    # ------------------------------------------------------------ for subclasses

    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        """Frames and payloads as they come, not verified; ends after the last one when the update is whole."""
        raise NotImplementedError

    def _digests(self) -> torch.Tensor:
        """int64 `[buckets]`: the sender's digests of payloads on a GPU, there when all buckets have come."""
        raise NotImplementedError

    def _confirm(self) -> None:
        """All of it came, and is right: let the sender know."""

    def give_up(self, error: WeightTransferError) -> None:
        """What comes cannot be used here: let the sender know; other receivers must not suffer from it."""

    def _close(self) -> None:
        raise NotImplementedError

    def check_open(self) -> None:
        """Raises when the stream was closed by another thread."""
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
        """found: digests of payloads on a GPU, which is waited for. What is wrong with them; "" when nothing is."""
        sent = self._digests()
        # All of them as a rule: to pick some takes the GPU another round trip.
        same = torch.stack([*found.values()]) == (sent if len(found) == len(sent) else sent[list(found)])
        damaged = [bucket for bucket, right in zip(found, same.tolist(), strict=True) if not right]
        if not damaged:
            return ""
        more = f", and so are {len(damaged) - 1} more" if damaged[1:] else ""
        return f"bucket {damaged[0]} of {len(self.plan.sizes)} is damaged{more}: digests are not those that were sent"


def bucket_offsets(plan: BucketPlan) -> list[int]:
    """First byte of each bucket, and the end of the last, where whole buckets lie one after another.

    Tensors that go on in the next bucket are in one piece there: such a bucket is full, a multiple of ALIGN.
    """
    aligned = [round_up(size, ALIGN) for size in plan.sizes]
    return np.cumsum([0, *aligned]).tolist()


class Receiver:
    """A WeightReceiver but for how it joins: subclasses have `_open` and `close`."""

    def __init__(self, engine: str, worker: int) -> None:
        self.engine = engine
        self.worker = worker
        self._deadline: Deadline | None = None

    def open(self, update: WeightUpdate) -> Stream:
        """See the protocol."""
        deadline = self._deadline = Deadline(worker_name(self.engine, self.worker), update.version, update.timeout_s)
        before = 0
        for group in update.receivers:
            if group.engine == self.engine and self.worker < group.num_workers:
                return self._open(update, before + self.worker, deadline)
            before += group.num_workers
        named = ", ".join(f"{group.engine} ({group.num_workers})" for group in update.receivers)
        raise deadline.error(f"takes no part in the update, which is for {named or 'nobody'}")

    def interrupt(self) -> None:
        """End an `open` that waits, from another thread."""
        if self._deadline is not None:
            self._deadline.stop()

    def _open(self, update: WeightUpdate, rank: int, deadline: Deadline) -> Stream:
        """rank: of this worker among all receivers of the update; the first is 0."""
        raise NotImplementedError

    def close(self) -> None:
        """See the protocol."""
