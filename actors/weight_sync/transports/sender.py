"""Base classes of all senders: they check the order of calls and versions, and allow an abort from any thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import torch

from ....codecs.integers import ALIGN
from ....codecs.weights.buckets import BucketPlan, expect_all
from .deadline import Deadline
from .protocol import BucketFrame, ReceiverGroup, WeightTransferError, WeightUpdate


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
            raise ValueError(f"weights: got base {base} of version {version}, expected an earlier one")
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
            raise self._deadline(update).error(f"not whole: {error}") from None
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

    # ------------------------------------------------------------ for subclasses

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
        """Raise WeightTransferError if the update has been aborted."""
        if update.ended:
            raise self._deadline(update).error(f"aborted: {update.ended}")

    # ------------------------------------------------------------ inside

    def _expect_open(self) -> SenderUpdate:
        update = self._update
        if update is None:
            raise ValueError("weights: no update is open, call begin first")
        self._deadline(update).moved()  # what the trainer did since the last call was no wait
        self._check_ended(update)
        return update

    def _out_of_order(self, update: SenderUpdate, bucket: int) -> WeightTransferError:
        error = self._deadline(update).error(f"got bucket {bucket}, but bucket {update.num_sent} was never sent")
        self.abort(str(error))
        return error


# ---------------- A sender that writes in a thread of its own, so that the next bucket is filled while one is written.

_RING = 2
_SLICE_S = 0.05


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
            write.exception(self._deadline(update).left_s)  # errors of an aborted update were raised to its caller
        self._writes = [None for _ in range(_RING)]
        self._pending, self._num_payloads = [], 0
        location = self._thread.submit(self._open, update).result()
        if not self._ring or len(self._ring[0]) < nbytes:
            self._ring = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(_RING)]
        update.deadline = None  # it runs from the first bucket on
        return location

    def _buffer(self, update: SenderUpdate, bucket: int, nbytes: int) -> torch.Tensor:
        number = self._num_payloads % _RING
        if nbytes > len(self._ring[number]):
            raise ValueError(f"bucket {bucket}: got a payload of {nbytes} bytes, the largest bucket is smaller")
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
                if write.done():  # the write itself has raised a TimeoutError
                    raise
                if not deadline.left_s:
                    raise deadline.error(what) from None
        self._check_ended(update)

    def _write_open(self, update: SenderUpdate, frame: BucketFrame, payload: torch.Tensor) -> None:
        if not update.ended:
            self._write(update, frame, payload)

    def _failed(self, update: SenderUpdate, what: str, error: Exception) -> WeightTransferError:
        return self._deadline(update).error(f"{what}: {error}")

    # ------------------------------------------------------------ for subclasses

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
