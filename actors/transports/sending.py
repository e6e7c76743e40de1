"""What all senders have in common: the order of calls, versions that rise, and an abort from any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...codecs.buckets import BucketPlan, expect_all
from .bounds import Bound
from .protocol import BucketFrame, ReceiverGroup, WeightTransferError, WeightUpdate


@dataclass(slots=True)
class OpenUpdate:
    """The update under way."""

    number: int
    """Of the updates of this sender, the first is 1; a version that is sent again has another number."""
    version: int
    plan: BucketPlan
    receivers: tuple[ReceiverGroup, ...]
    base: int | None
    bound: Bound | None = None
    """Runs from the first bucket on."""
    num_sent: int = 0
    buffered: int | None = None
    """The bucket whose buffer was handed out and not sent."""
    ended: str = ""
    """Why it was aborted."""
    location: str = field(default="", kw_only=True)


class Sender:
    """A WeightSender but for how bytes travel: subclasses have the methods with a leading underscore.

    `_abort` may be called by another thread while any other of them runs.
    """

    kind = ""
    lasting = False

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._newest: int | None = None
        self._number = 0
        self._update: OpenUpdate | None = None
        self._closed = False

    def begin(
        self, version: int, plan: BucketPlan, receivers: Sequence[ReceiverGroup], base: int | None = None
    ) -> WeightUpdate:
        """See the protocol."""
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
        update = OpenUpdate(self._number, version, plan, tuple(receivers), base)
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
        """See the protocol."""
        update = self._expect_open()
        if bucket != update.num_sent or bucket >= len(update.plan.sizes):
            raise self._out_of_order(update, bucket)
        buffer = self._buffer(update, bucket, nbytes)
        self._check_ended(update)
        update.buffered = bucket
        return buffer

    def send(self, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None = None) -> None:
        """See the protocol. `same` buckets need no buffer."""
        update = self._expect_open()
        if frame.bucket != update.num_sent or (frame.nbytes and frame.bucket != update.buffered):
            raise self._out_of_order(update, frame.bucket)
        self._send(update, frame, digest)
        update.num_sent, update.buffered = frame.bucket + 1, None

    def finish(self) -> None:
        """See the protocol."""
        update = self._expect_open()
        try:
            expect_all(update.plan, range(update.num_sent))
        except ValueError as error:
            self.abort(str(error))
            raise self._bound(update).error(f"not whole: {error}") from None
        try:
            self._finish(update)
            self._check_ended(update)
        except WeightTransferError as error:
            self.abort(str(error))
            raise
        self._update = None

    def abort(self, reason: str) -> None:
        """See the protocol."""
        update = self._update
        if update is None or update.ended:
            return
        update.ended = reason or "aborted"
        self._abort(update, update.ended)

    def close(self) -> None:
        """See the protocol."""
        if not self._closed:
            self.abort("the sender closes")
            self._closed = True
            self._update = None
            self._close()

    # ------------------------------------------------------------ for subclasses

    def _begin(self, update: OpenUpdate) -> str:
        """Announce. Returns the location."""
        raise NotImplementedError

    def _buffer(self, update: OpenUpdate, bucket: int, nbytes: int) -> torch.Tensor:
        raise NotImplementedError

    def _send(self, update: OpenUpdate, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None) -> None:
        raise NotImplementedError

    def _finish(self, update: OpenUpdate) -> None:
        raise NotImplementedError

    def _abort(self, update: OpenUpdate, reason: str) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _bound(self, update: OpenUpdate) -> Bound:
        if update.bound is None:
            update.bound = Bound("sender", update.version, self.timeout_s)
        return update.bound

    def _check_ended(self, update: OpenUpdate) -> None:
        """Raises when the update was aborted meanwhile."""
        if update.ended:
            raise self._bound(update).error(f"aborted: {update.ended}")

    # ------------------------------------------------------------ inside

    def _expect_open(self) -> OpenUpdate:
        update = self._update
        if update is None:
            raise ValueError("weights: no update is open, call begin first")
        self._bound(update)
        self._check_ended(update)
        return update

    def _out_of_order(self, update: OpenUpdate, bucket: int) -> WeightTransferError:
        error = self._bound(update).error(f"got bucket {bucket}, but bucket {update.num_sent} was never sent")
        self.abort(str(error))
        return error
