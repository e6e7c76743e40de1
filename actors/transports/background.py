"""A sender that writes in a thread of its own: while one bucket is written the next one is filled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch

from ...codecs.buckets import ALIGN
from .protocol import BucketFrame, WeightTransferError
from .sending import OpenUpdate, Sender

_RING = 2
_SLICE_S = 0.05


class BackgroundSender(Sender):
    """Has two buffers in host memory. The methods of subclasses run in the thread, one after another."""

    lasting = True

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"headrace-{self.kind}")
        self._ring: list[torch.Tensor] = []
        self._writes: list[Future[Any] | None] = [None] * _RING
        self._pending: list[Future[Any]] = []
        """Writes without a buffer."""
        self._num_payloads = 0

    def _begin(self, update: OpenUpdate) -> str:
        nbytes = max((ALIGN, *update.plan.sizes))
        for write in [*filter(None, self._writes), *self._pending]:
            write.exception(self._bound(update).left_s)  # of an update that was aborted, and told to who sent it
        self._writes = [None for _ in range(_RING)]
        self._pending, self._num_payloads = [], 0
        location = self._thread.submit(self._open, update).result()
        if not self._ring or len(self._ring[0]) < nbytes:
            self._ring = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(_RING)]
        update.bound = None  # it runs from the first bucket on
        return location

    def _buffer(self, update: OpenUpdate, bucket: int, nbytes: int) -> torch.Tensor:
        number = self._num_payloads % _RING
        if nbytes > len(self._ring[number]):
            raise ValueError(f"bucket {bucket}: got a payload of {nbytes} bytes, the largest bucket is smaller")
        self._await(update, self._writes[number], f"no room for bucket {bucket}: an earlier one is being written")
        return self._ring[number][:nbytes]

    def _send(self, update: OpenUpdate, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None) -> None:
        if frame.nbytes:
            number = self._num_payloads % _RING
            payload = self._ring[number][: frame.nbytes]
            self._writes[number] = self._thread.submit(self._write_open, update, frame, payload)
            self._num_payloads += 1
        else:
            self._pending.append(self._thread.submit(self._write_open, update, frame, self._ring[0][:0]))

    def _finish(self, update: OpenUpdate) -> None:
        for write in [*self._writes, *self._pending]:
            self._await(update, write, "the last buckets are being written")
        self._await(update, self._thread.submit(self._complete, update), "the version is being completed")

    def _abort(self, update: OpenUpdate, reason: str) -> None:
        self._thread.submit(self._withdraw, update, reason)

    def _close(self) -> None:
        self._thread.submit(self._remove_all)
        self._thread.shutdown(wait=True)
        self._ring = []

    def _await(self, update: OpenUpdate, write: Future[Any] | None, what: str) -> None:
        """Until it is over; raises what it raised."""
        bound = self._bound(update)
        while write is not None:
            self._check_ended(update)
            try:
                return write.result(min(_SLICE_S, bound.left_s))
            except FutureTimeout:
                if write.done():  # the write itself has raised one
                    raise
                if not bound.left_s:
                    raise bound.error(what) from None
        self._check_ended(update)

    def _write_open(self, update: OpenUpdate, frame: BucketFrame, payload: torch.Tensor) -> None:
        if not update.ended:
            self._write(update, frame, payload)

    def _failed(self, update: OpenUpdate, what: str, error: Exception) -> WeightTransferError:
        return self._bound(update).error(f"{what}: {error}")

    # ------------------------------------------------------------ for subclasses

    def _open(self, update: OpenUpdate) -> str:
        """Make room and publish the plan. Returns the location."""
        raise NotImplementedError

    def _write(self, update: OpenUpdate, frame: BucketFrame, payload: torch.Tensor) -> None:
        raise NotImplementedError

    def _complete(self, update: OpenUpdate) -> None:
        """All buckets are written: make the version whole."""
        raise NotImplementedError

    def _withdraw(self, update: OpenUpdate, reason: str) -> None:
        raise NotImplementedError

    def _remove_all(self) -> None:
        raise NotImplementedError
