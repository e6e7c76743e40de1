"""`Sender` and `Receiver` are the base classes of a transport's two ends, with the checks that all transports share.

A sender checks the order of calls and versions, and any thread can abort its update. A receiver checks order, size and
checksum of every bucket, and any thread can stop it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....codecs.integers import ALIGN, round_up
from ....codecs.weights.buckets import BucketPlan, checksum, expect_all
from ....codecs.weights.gpu_scatter import device_digest
from .protocol import BucketFrame, Deadline, ReceiverGroup, WeightTransferError, WeightUpdate, worker_name

_RING = 2
_SLICE_S = 0.05


@dataclass(slots=True)
class SenderUpdate:
    """An update that a sender has begun and not finished."""

    number: int
    """Sequence number of the update in this sender, from 1; a version that is sent again has another number."""
    version: int
    plan: BucketPlan
    receivers: tuple[ReceiverGroup, ...]
    base: int | None
    deadline: Deadline | None = None
    """Deadline for the waits of this update; None until its clock starts with the first bucket."""
    num_sent: int = 0
    """Number of buckets sent."""
    buffered: int | None = None
    """Bucket whose buffer was given to the caller and has not been sent yet; None when there is none."""
    ended: str = ""
    """Why the update was aborted; "" when it was not."""
    location: str = field(default="", kw_only=True)


class Sender(ABC):
    """Base class of all senders: implements WeightSender, except for how the bytes travel.

    Subclasses implement the methods with a leading underscore. `_abort` may be called from another thread while one of
    the others runs.
    """

    kind = ""
    lasting = False

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._newest: int | None = None
        self._number = 0
        self._update: SenderUpdate | None = None
        self._closed = False

    def begin(
        self, version: int, plan: BucketPlan, receivers: Sequence[ReceiverGroup], base: int | None = None
    ) -> WeightUpdate:
        """Announce `version`: implements `WeightSender.begin`."""
        if self._closed:
            raise RuntimeError("weights: the sender is closed")
        if self._newest is not None and version < self._newest:
            raise ValueError(f"weights: got version {version}, expected {self._newest}, the newest, or one above it")
        if base is not None and base >= version:
            raise ValueError(f"weights: got base {base} of version {version}, expected an earlier version")
        if len({group.engine for group in receivers}) < len(receivers):
            raise ValueError(f"weights: got receivers {[group.engine for group in receivers]}, expected each once")
        self.abort("another update was begun")
        self._number += 1
        update = SenderUpdate(self._number, version, plan, tuple(receivers), base)
        update.location = self._begin(update)
        self._newest = version
        self._update = update
        return WeightUpdate(
            version=version,
            base=base,
            kind=self.kind,
            location=update.location,
            num_bytes=sum(plan.sizes),
            receivers=update.receivers,
            timeout_s=self.timeout_s,
        )

    def buffer(self, bucket: int, nbytes: int) -> torch.Tensor:
        """Return memory for a bucket's payload: implements `WeightSender.buffer`."""
        update = self._expect_open()
        if bucket != update.num_sent or bucket >= len(update.plan.sizes):
            raise self._out_of_order(update, bucket)
        buffer = self._buffer(update, bucket, nbytes)
        self._check_ended(update)
        update.buffered = bucket
        return buffer

    def send(self, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None = None) -> None:
        """Send the bucket whose buffer was filled last: implements `WeightSender.send`. Buckets encoded as `same` need
        no buffer."""
        update = self._expect_open()
        if frame.bucket != update.num_sent or (frame.nbytes and frame.bucket != update.buffered):
            raise self._out_of_order(update, frame.bucket)
        self._send(update, frame, digest)
        update.num_sent, update.buffered = frame.bucket + 1, None

    def finish(self) -> None:
        """Wait until the version is complete: implements `WeightSender.finish`."""
        update = self._expect_open()
        try:
            expect_all(update.plan, range(update.num_sent))
        except ValueError as error:
            self.abort(str(error))
            raise self._deadline(update).error(f"the version is incomplete: {error}") from None
        try:
            self._finish(update)
            self._check_ended(update)
        except WeightTransferError as error:
            self.abort(str(error))
            raise
        self._update = None

    def abort(self, reason: str) -> None:
        """End the open update: implements `WeightSender.abort`."""
        update = self._update
        if update is None or update.ended:
            return
        update.ended = reason or "aborted"
        self._abort(update, update.ended)

    def close(self) -> None:
        """Abort the open update and remove everything that was published. Idempotent."""
        if not self._closed:
            self.abort("the sender closes")
            self._closed = True
            self._update = None
            self._close()

    # ---------------- Subclasses implement or use these methods.

    @abstractmethod
    def _begin(self, update: SenderUpdate) -> str:
        """Announce the update, and return the location where receivers find it."""

    @abstractmethod
    def _buffer(self, update: SenderUpdate, bucket: int, nbytes: int) -> torch.Tensor: ...

    @abstractmethod
    def _send(self, update: SenderUpdate, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None) -> None: ...

    @abstractmethod
    def _finish(self, update: SenderUpdate) -> None: ...

    @abstractmethod
    def _abort(self, update: SenderUpdate, reason: str) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _deadline(self, update: SenderUpdate) -> Deadline:
        if update.deadline is None:
            update.deadline = Deadline("sender", update.version, self.timeout_s)
        return update.deadline

    def _check_ended(self, update: SenderUpdate) -> None:
        if update.ended:
            raise self._deadline(update).error(f"aborted: {update.ended}")

    # ---------------- These methods are private.

    def _expect_open(self) -> SenderUpdate:
        update = self._update
        if update is None:
            raise ValueError("weights: no update is open, call begin first")
        self._deadline(update).moved()  # The trainer's own work since the last call does not count as waiting.
        self._check_ended(update)
        return update

    def _out_of_order(self, update: SenderUpdate, bucket: int) -> WeightTransferError:
        error = self._deadline(update).error(f"got bucket {bucket}, but bucket {update.num_sent} was never sent")
        self.abort(str(error))
        return error


# ---------------- Some senders write their buckets in a background thread.


class BackgroundSender(Sender):
    """Base class of senders that write buckets in a background thread, from two buffers in host memory.

    The methods that subclasses implement run in that thread, one after another.
    """

    lasting = True

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"headrace-{self.kind}")
        self._ring: list[torch.Tensor] = []
        self._writes: list[Future[Any] | None] = [None] * _RING
        self._pending: list[Future[Any]] = []
        """Background writes of frames (bucket headers) without payload that may still be in progress."""
        self._num_payloads = 0

    def _begin(self, update: SenderUpdate) -> str:
        nbytes = max((ALIGN, *update.plan.sizes))
        for write in [*filter(None, self._writes), *self._pending]:
            write.exception(self._deadline(update).left_s)  # Errors of an aborted update were raised to its caller.
        self._writes = [None for _ in range(_RING)]
        self._pending, self._num_payloads = [], 0
        location = self._thread.submit(self._open, update).result()
        if not self._ring or len(self._ring[0]) < nbytes:
            self._ring = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(_RING)]
        update.deadline = None  # The deadline starts with the first bucket.
        return location

    def _buffer(self, update: SenderUpdate, bucket: int, nbytes: int) -> torch.Tensor:
        number = self._num_payloads % _RING
        if nbytes > len(self._ring[number]):
            raise ValueError(f"bucket {bucket}: got a payload of {nbytes} bytes, which is more than the largest bucket")
        self._await(update, self._writes[number], f"no room for bucket {bucket}: an earlier one is being written")
        return self._ring[number][:nbytes]

    def _send(self, update: SenderUpdate, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None) -> None:
        if frame.nbytes:
            number = self._num_payloads % _RING
            payload = self._ring[number][: frame.nbytes]
            self._writes[number] = self._thread.submit(self._write_open, update, frame, payload)
            self._num_payloads += 1
        else:
            self._pending.append(self._thread.submit(self._write_open, update, frame, self._ring[0][:0]))

    def _finish(self, update: SenderUpdate) -> None:
        for write in [*self._writes, *self._pending]:
            self._await(update, write, "the last buckets are being written")
            self._deadline(update).moved()
        self._await(update, self._thread.submit(self._complete, update), "the version is being completed")

    def _abort(self, update: SenderUpdate, reason: str) -> None:
        self._thread.submit(self._withdraw, update, reason)

    def _close(self) -> None:
        self._thread.submit(self._remove_all)
        self._thread.shutdown(wait=True)
        self._ring = []

    def _await(self, update: SenderUpdate, write: Future[Any] | None, what: str) -> None:
        """Wait until a write in the background thread has ended, and raise what it raised. Raises WeightTransferError
        when the update is aborted, or at the deadline."""
        deadline = self._deadline(update)
        while write is not None:
            self._check_ended(update)
            try:
                return write.result(min(_SLICE_S, deadline.left_s))
            except FutureTimeout:
                if write.done():  # It has ended just now, perhaps with a TimeoutError of its own.
                    return write.result()
                if not deadline.left_s:
                    raise deadline.error(what) from None
        self._check_ended(update)

    def _write_open(self, update: SenderUpdate, frame: BucketFrame, payload: torch.Tensor) -> None:
        if not update.ended:
            self._write(update, frame, payload)

    def _failed(self, update: SenderUpdate, what: str, error: Exception) -> WeightTransferError:
        return self._deadline(update).error(f"{what}: {error}")

    # ---------------- Subclasses implement or use these methods.

    @abstractmethod
    def _open(self, update: SenderUpdate) -> str:
        """Make room for the version and publish its bucket plan. Returns the location where receivers find it."""

    @abstractmethod
    def _write(self, update: SenderUpdate, frame: BucketFrame, payload: torch.Tensor) -> None: ...

    @abstractmethod
    def _complete(self, update: SenderUpdate) -> None:
        """Mark the version as complete; all its buckets are written."""

    @abstractmethod
    def _withdraw(self, update: SenderUpdate, reason: str) -> None: ...

    @abstractmethod
    def _remove_all(self) -> None: ...


class Stream(ABC):
    """The buckets of one update, as one receiver gets them. Iterate over it once, and always close it.

    Base class of the streams of all receivers. Subclasses implement `_arrivals` and `_close`.
    """

    lasting = False
    """True if payloads stay valid until `close`; otherwise each is valid only until the next one is requested."""
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
        """Yield the frame (header) and the payload of every bucket in order, and verify the payloads' checksums.
        Payloads are uint8 `[nbytes]`.

        On the CPU a payload is verified before it is yielded. On a GPU all payloads are verified when the iteration
        ends, so that nothing waits for the GPU in between; use a payload only in work queued on the current CUDA
        stream. No payload can be relied on before the iteration has ended.

        Raises WeightTransferError naming what is missing, damaged or late. With a lasting sender, the last check is
        that the version has not been withdrawn meanwhile.
        """
        expected = 0
        found: dict[int, torch.Tensor] = {}
        self.deadline.moved()  # Between joining and reading, an engine may have waited for its requests.
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
            self.deadline.moved()  # Work on the bucket does not count as waiting.
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

    # ---------------- Subclasses implement or use these methods.

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
            raise self.deadline.error("the stream was closed")

    # ---------------- These methods are private.

    def _check(self, frame: BucketFrame, payload: torch.Tensor, expected: int) -> None:
        name = f"bucket {frame.bucket} of {len(self.plan.sizes)}"
        if frame.bucket != expected:
            raise self.deadline.error(f"bucket {expected} of {len(self.plan.sizes)} never came; {name} came instead")
        if frame.encoding == "whole" and frame.nbytes != self.plan.sizes[frame.bucket]:
            raise self.deadline.error(
                f"{name} has {frame.nbytes} bytes, but the plan has {self.plan.sizes[frame.bucket]}"
            )
        if frame.encoding != "whole" and self.update.base is None:
            raise self.deadline.error(f"{name} is a delta, but the update has no base")
        if len(payload) != frame.nbytes:
            raise self.deadline.error(f"{name} has {len(payload)} bytes, but {frame.nbytes} were announced")
        if frame.nbytes and not payload.is_cuda:
            found = checksum(payload)
            if found != frame.checksum:
                raise self.deadline.error(
                    f"{name} is damaged: the checksum of its {frame.nbytes} bytes is {found:016x}, "
                    f"but {frame.checksum:016x} was sent"
                )

    def _damage(self, found: dict[int, torch.Tensor]) -> str:
        """Compare the digests of payloads on a GPU (`found`, by bucket) with the sender's. Returns a description of the
        damage, or "" when there is none."""
        sent = self._digests()
        # Usually all digests are compared; a selection would cost the GPU another round trip.
        same = torch.stack([*found.values()]) == (sent if len(found) == len(sent) else sent[list(found)])
        damaged = [bucket for bucket, right in zip(found, same.tolist(), strict=True) if not right]
        if not damaged:
            return ""
        more = f", and so are {len(damaged) - 1} more" if damaged[1:] else ""
        return f"bucket {damaged[0]} of {len(self.plan.sizes)} is damaged{more}: digests differ from those sent"


def bucket_offsets(plan: BucketPlan) -> list[int]:
    """Return the byte offset of each bucket, and the end of the last one, in memory that holds all buckets in order.

    A tensor that continues in the next bucket is contiguous in this memory, because the bucket that it continues from
    is full and a multiple of ALIGN long.
    """
    aligned = [round_up(size, ALIGN) for size in plan.sizes]
    return np.cumsum([0, *aligned]).tolist()


class Receiver(ABC):
    """Receives weight versions, in every process that holds an engine's weights.

    Base class of all receivers. Subclasses implement `_open`, and `close` if they need it.
    """

    def __init__(self, engine: str, worker: int) -> None:
        self.engine = engine
        self.worker = worker
        self._deadline: Deadline | None = None

    def open(self, update: WeightUpdate) -> Stream:
        """Join `update` and return its stream, waiting for the sender no longer than the update's timeout. Raises
        WeightTransferError if joining fails."""
        deadline = self._deadline = Deadline(worker_name(self.engine, self.worker), update.version, update.timeout_s)
        before = 0
        for group in update.receivers:
            if group.engine == self.engine and self.worker < group.num_workers:
                return self._open(update, before + self.worker, deadline)
            before += group.num_workers
        named = ", ".join(f"{group.engine} ({group.num_workers})" for group in update.receivers)
        raise deadline.error(f"this receiver has no part in the update, which is for {named or 'no receiver'}")

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
