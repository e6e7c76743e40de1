"""Receives and checks the next version of the weights for an engine in this process, before the engine serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from ..weight_sync.inbox import WeightInbox
from ..weight_sync.transports.protocol import ReceiverConfig, WeightTransferError, WeightUpdate
from .protocol import Prepared

Ready = TypeVar("Ready")


class IncomingWeights(Generic[Ready]):
    """Receives versions of the weights for an engine. It holds at most one received version, with the result of the
    engine's check, until that version is committed or dropped. Methods run in the event loop."""

    def __init__(self, receiver: ReceiverConfig | None, check: Callable[[Mapping[str, torch.Tensor]], Ready]) -> None:
        """Set up the receiver. It always holds a new version as a complete second copy beside the served one, so that a
        commit cannot fail half-way.

        check: function that is called in a thread with the received tensors by Hugging Face (HF) name. It returns the
        data that the commit needs, and raises ValueError if the tensors do not fit the model. receiver: settings of the
        receiver; None when weights never change.
        """
        self._inbox: WeightInbox | None = None
        if receiver is not None:
            staged = receiver.sync.model_copy(update={"staging": "full"})
            self._inbox = WeightInbox(replace(receiver, sync=staged), 0)
        self._check = check
        self._turn = asyncio.Lock()
        self._arriving: int | None = None
        self._dropped = False
        """True if the version that is being received was dropped in the meantime."""
        self._committing: int | None = None
        self._ready: tuple[int, Ready] | None = None

    @property
    def num_received(self) -> int:
        """Number of buckets (pieces of a weight update) received since the start."""
        return 0 if self._inbox is None else self._inbox.num_received

    async def prepare(self, update: WeightUpdate, served: Callable[[], int]) -> Prepared:
        """Receive and verify `update` and run the engine's check on it; implements `WeightHost.prepare_weights`.

        served: function that returns the version that the engine serves, or -1 when it holds no complete one.
        """
        if self._inbox is None:
            raise RuntimeError("weights: this engine was built without a weight receiver")
        if self._arriving is not None:
            self.drop(self._arriving)  # the latest announcement replaces the one before
        async with self._turn:
            if update.version == served():
                return "staged"
            if update.version < served():
                raise ValueError(
                    f"weights: got version {update.version}, expected the current {served()} or a later one"
                )
            if self._ready is not None:
                self.drop(self._ready[0])
            self._arriving, self._dropped = update.version, False
            work = asyncio.ensure_future(asyncio.to_thread(self._receive, self._inbox, update))
            try:
                ready = await asyncio.shield(work)
                if self._dropped:
                    raise WeightTransferError(f"weights: version {update.version} was dropped while it was checked")
            except BaseException:  # also when cancelled: the lock is kept until the thread has ended
                self._inbox.drop(update.version)
                await asyncio.wait({work})
                work.exception()
                raise
            finally:
                self._arriving = None
            self._ready = (update.version, ready)
            return "staged"

    def _receive(self, inbox: WeightInbox, update: WeightUpdate) -> Ready:
        inbox.prepare(update)
        staged = inbox.staged
        if staged is None or staged.version != update.version:
            raise WeightTransferError(f"weights: version {update.version} was dropped while it arrived")
        return self._check(staged.named)

    def expect(self, version: int) -> Ready:
        """Return the result of the engine's check for `version`. Raises ValueError unless `version` is the prepared
        version."""
        if self._ready is None or self._ready[0] != version:
            prepared = "none" if self._ready is None else self._ready[0]
            raise ValueError(f"weights: got version {version} to commit, expected the prepared one, {prepared}")
        return self._ready[1]

    @asynccontextmanager
    async def committing(self, version: int) -> AsyncIterator[Ready]:
        """Yield the result of the engine's check for `version` to a `with` block that puts the version into service.

        During the block, `drop` and `prepare` cannot touch the version. When the block ends without an error, the
        version counts as served. Raises ValueError when `version` is not the prepared one.
        """
        async with self._turn:
            ready = self.expect(version)
            self._committing = version
            try:
                yield ready
            finally:
                self._committing = None
            assert self._inbox is not None
            self._ready = None
            self._inbox.committed(version)  # releases the staged bytes, or keeps them as base of a later delta

    def drop(self, version: int) -> None:
        """Discard `version`, or abort its transfer if it is still being received. Idempotent; has no effect while
        `version` is being committed."""
        if version == self._committing:
            return
        if self._ready is not None and self._ready[0] == version:
            self._ready = None
        if version == self._arriving:
            self._dropped = True
        if self._inbox is not None:
            self._inbox.drop(version)

    async def free_spare(self) -> None:
        """Free the memory that is kept for the next version, as soon as none is being received or committed."""
        async with self._turn:
            if self._inbox is not None:
                self._inbox.free_spare()

    def close(self) -> None:
        """Abort a transfer in progress and release everything that is staged. Idempotent."""
        self._ready = None
        if self._inbox is not None:
            self._inbox.close()
