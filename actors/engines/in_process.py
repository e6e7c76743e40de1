"""`InProcessEngine` is the base class of engines that run in this process; `IncomingWeights` receives their weights."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Container, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from ...codecs.weights.parameter_digests import ParameterDigests
from ..adapters.spec import AdapterSpec
from ..weight_sync.inbox import WeightInbox
from ..weight_sync.transports.protocol import ReceiverConfig, WeightTransferError, WeightUpdate
from .protocol import (
    BadSchema,
    CommitReport,
    EngineBroken,
    EngineStats,
    KeysAndValues,
    PauseMode,
    Prepared,
    SamplingParams,
)

Ready = TypeVar("Ready")
Check = Callable[[Mapping[str, torch.Tensor], AdapterSpec | None], Ready]
"""Check of a received version, which an engine supplies.

It is called in a thread with the received tensors by Hugging Face (HF) name, and the adapter whose tensors they are;
None if they are the whole model's. It returns the data that the commit needs, and raises ValueError if the tensors do
not fit the model.
"""

DROPPED = "its weights were dropped (sleep level 2), commit a version"
"""Reason, for error messages, why an engine that sleeps at level 2 has no complete version of the weights."""
_ASLEEP = "asleep: wake it first"


class IncomingWeights(Generic[Ready]):
    """Receives versions of the weights for an engine. It holds at most one received version, with the result of the
    engine's check, until that version is committed or dropped. Methods run in the event loop."""

    def __init__(self, receiver: ReceiverConfig | None, check: Check[Ready]) -> None:
        """Set up the receiver. It always holds a new version as a complete second copy beside the served one, so that a
        commit cannot fail half-way.

        check: the engine's check of a received version. receiver: settings of the receiver; None when weights never
        change.
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
            self.drop(self._arriving)  # The latest announcement replaces the previous one.
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
            except BaseException:  # Even a cancelled call keeps the lock until the thread has ended.
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
        return self._check(staged.named, update.adapter)

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
            # The inbox releases the staged bytes, or keeps them as the base of a later delta.
            self._inbox.committed(version)

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
        """Free the memory that is kept for the next version, as soon as no version is being received or committed."""
        async with self._turn:
            if self._inbox is not None:
                self._inbox.free_spare()

    def close(self) -> None:
        """Abort a transfer in progress and release everything that is staged. Idempotent."""
        self._ready = None
        if self._inbox is not None:
            self._inbox.close()


class InProcessEngine(ABC, Generic[Ready]):
    """Base class of engines that run in this process. It holds the version that the engine serves, the next version,
    and the reason why the engine refuses requests."""

    died = ""

    def __init__(self, receiver: ReceiverConfig | None, check: Check[Ready], version: int) -> None:
        """receiver, check: see `IncomingWeights`. version: policy version of the weights at the start."""
        self._incoming = IncomingWeights(receiver, check)
        self._name = "" if receiver is None else receiver.engine
        self._version = version
        self._unusable = ""
        """Why requests are refused; "" while they are not."""
        self._broken = ""
        """Why there is no complete version of the weights; "" if there is one."""
        self._differs = ""
        """How the weights differ from the trainer's, as `verify_weights` found; "" if they do not. Requests wait
        meanwhile."""
        self.stats = EngineStats()

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_workers(self) -> int:
        return 1

    @property
    def _asleep(self) -> bool:
        return self._unusable == _ASLEEP

    def _expect_usable(self, request_id: str, in_flight: Container[str]) -> None:
        """Check that the engine can take a request. Raises RuntimeError if the engine is asleep or closed,
        EngineBroken if it has no weights, and ValueError if the id is already in flight."""
        if self._unusable:
            raise RuntimeError(f"request {request_id!r}: the engine is {self._unusable}")
        if self._broken:
            raise EngineBroken(f"request {request_id!r}: {self._broken}")
        if request_id in in_flight:
            raise ValueError(f"request {request_id!r} is already in flight; ids must be unique")

    def _expect_free(self, params: SamplingParams) -> None:
        """Raise BadSchema if a request has a JSON schema, which engines in this process cannot follow."""
        if params.schema:
            raise BadSchema("this engine cannot restrict answers to a JSON schema, expected rollout.engine=vllm")

    def _fall_asleep(self, level: int) -> None:
        """Refuse requests until `wake`. Raises ValueError for an unknown level."""
        if level not in (1, 2):
            raise ValueError(f"sleep level: got {level}, expected 1 or 2")
        self._unusable = self._unusable or _ASLEEP

    async def prepare_weights(self, update: WeightUpdate) -> Prepared:
        """Receive and verify the new version `update`, and check it against the model, if there is one. `hf` accepts a
        tied parameter under any of its names, or under several if the values are equal, and converts other float
        dtypes; `scripted` accepts tensors of any names and shapes, adapters included."""
        return await self._incoming.prepare(update, lambda: -1 if self._broken or self._differs else self._version)

    async def commit_weights(
        self, version: int, in_flight: PauseMode = "wait", kv: KeysAndValues = "recompute"
    ) -> CommitReport:
        """Start serving the prepared `version`. An engine that was paused before stays paused. Requests that the pause
        froze (mode `keep`) stay frozen, unless `in_flight` is `abort`, which ends them with the tokens generated so
        far. An adapter is served beside the version before it, so that without `abort` it affects no request in flight.
        A sleeping engine stays asleep. kv: treatment of the keys and values of requests that continue (see
        KeysAndValues)."""
        if self._serves(version):
            return CommitReport(version, 0.0, 0.0, 0, 0)
        stops = in_flight == "abort" or self._replaces(self._incoming.expect(version))
        if self._unusable and not self._asleep:
            raise RuntimeError(f"weights: the engine is {self._unusable}")
        clock = time.perf_counter()
        was_paused, running = self._is_paused, self._num_running
        if stops:
            await self.pause(in_flight)
        paused = time.perf_counter()
        try:
            kept = await self._replace_weights(version, kv)
        finally:
            if stops and not was_paused:
                await self.resume()
        done = time.perf_counter()
        return CommitReport(version, paused - clock, done - paused, kept, running if in_flight == "abort" else 0)

    def _replaces(self, ready: Ready) -> bool:
        """Return whether a prepared version takes the place of the weights in service, also for requests in flight."""
        return True

    def _serves(self, version: int) -> bool:
        return self._version == version and not self._broken and not self._differs

    def _put_in_service(self, version: int) -> None:
        self._version = version
        self._broken = self._differs = ""

    def _expect_served(self, digests: ParameterDigests) -> None:
        if not self._serves(digests.version):
            raise ValueError(
                f"weights: version {digests.version} cannot be verified, because the engine does not serve it; the "
                f"last version in service is {self._version}"
            )

    async def drop_weights(self, version: int) -> None:
        self._incoming.drop(version)

    @abstractmethod
    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop generating until `resume`; see `Sleeper.pause`."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue generating after `pause`. Idempotent."""

    @abstractmethod
    async def _replace_weights(self, version: int, kv: KeysAndValues) -> int:
        """Put the prepared version into service while the engine is paused, unless another commit has done it. Returns
        the number of requests that continue with it."""

    @property
    @abstractmethod
    def _num_running(self) -> int:
        """Number of requests that a commit finds running."""

    @property
    @abstractmethod
    def _is_paused(self) -> bool:
        """True between `pause` and `resume`."""
