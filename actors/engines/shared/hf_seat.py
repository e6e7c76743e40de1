"""`HfSeat` is the part of a shared `hf` engine that belongs to one run: its own adapter, versions and requests.

The engine decodes one batch at a time, and a batch has requests of one seat only. A batch keeps the version with which
it began, so that a commit or a pause of one run stops no batch. A seat never sleeps, and never replaces the base.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from ....codecs.weights.parameter_digests import ParameterDigests
from ...adapters.spec import AdapterSpec
from ...process.memory import ProcessMemory
from ...weight_sync.transports.protocol import ReceiverConfig
from ..hf.adapters import Adapter
from ..hf.decoding import Pending
from ..hf.engine import HfEngine
from ..in_process import InProcessEngine
from ..protocol import Completion, EngineBroken, KeysAndValues, PauseMode, SamplingParams, expect_pause_mode


class HfSeat(InProcessEngine[Adapter]):
    """One run's view of an HfEngine that several runs share."""

    def __init__(self, host: HfEngine, name: str, receiver: ReceiverConfig | None, version: int) -> None:
        """See `open_seat`."""
        host.layers  # noqa: B018 - It raises an error if the engine has no room for adapters.
        super().__init__(receiver, self._check, version)
        self._host = host
        self.adapter: Adapter | None = None
        """The adapter in service; None for the base alone."""
        self._in_flight: dict[str, Pending] = {}
        self._held: deque[Pending] = deque()  # These requests wait for `resume`, or for a good version.
        self._paused = False
        self._swapping = asyncio.Lock()  # Only one commit at a time changes the version.

    @property
    def progress(self) -> int:
        """Sum of the tokens of this run that were returned and of the buckets of its adapters that were received. A
        batch in progress counts through the steps of the engine, unless all requests of this run are held."""
        own = self.stats.tokens + self._incoming.num_received
        return own + (self._host.progress if self._num_running else 0)

    # ---------------- These methods serve and pause requests.

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """See `HfEngine.generate`."""
        self._expect_usable(request_id, self._in_flight)
        pending = self._in_flight[request_id] = self._host.checked(request_id, prompt_ids, params, self)
        if self._is_held:
            self._held.append(pending)
        else:
            self._host.enqueue([pending])
        try:
            return await pending.future
        finally:
            del self._in_flight[request_id]
            if pending.future.cancelled():
                self._end(pending)

    async def abort(self, request_id: str) -> None:
        if (pending := self._in_flight.get(request_id)) is not None:
            self._end(pending)

    def _end(self, pending: Pending) -> None:
        if pending in self._held:
            self._held.remove(pending)
            pending.settle_empty()
        else:
            self._host.end(pending)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Let no request of this run begin until `resume`. A batch in progress goes on with the version with which it
        began; for `wait` the call lasts until it has ended, for `abort` its requests are cut off."""
        expect_pause_mode(mode)
        self._paused = True
        if mode == "abort":
            for pending in list(self._in_flight.values()):
                self._end(pending)
        if mode == "keep":
            self._held.extendleft(reversed(self._host.withdraw(self, running=False)))
            return
        while running := [one.future for one in self._in_flight.values() if one not in self._held]:
            await asyncio.wait(running)
            await asyncio.sleep(0)  # Answered requests leave `_in_flight`.

    async def resume(self) -> None:
        self._paused = False
        self._release()

    @property
    def _is_held(self) -> bool:
        return self._paused or bool(self._differs)

    def _release(self) -> None:
        if not self._is_held:
            held, self._held = self._held, deque()
            self._host.enqueue(held)

    # ---------------- These methods change and check the adapter.

    def _check(self, named: Mapping[str, torch.Tensor], spec: AdapterSpec | None) -> Adapter:
        if spec is None:
            raise ValueError(
                "weights: got the weights of the whole model, expected an adapter, because other runs share the engine"
            )
        return self._host.layers.check(spec, named)

    def _replaces(self, ready: Adapter) -> bool:
        return False

    async def _replace_weights(self, version: int, kv: KeysAndValues) -> int:
        kept = self._num_running
        await asyncio.shield(self._swap(version))  # The swap finishes even if this call is cancelled.
        return kept

    async def _swap(self, version: int) -> None:
        async with self._swapping:
            if not self._serves(version):
                async with self._incoming.committing(version) as adapter:
                    await self._host.load(adapter)
                    self.adapter = adapter
                    self._put_in_service(version)
        self._release()

    async def verify_weights(self, digests: ParameterDigests) -> int:
        async with self._swapping:
            self._expect_served(digests)
            if self.adapter is None:
                raise ValueError(f"weights: version {digests.version} cannot be verified, because it is no adapter")
            verify = self._host.layers.verify
            count, self._differs = await self._host.alone(verify, self.adapter, digests, self._name)
            if self._differs:
                self._held.extendleft(reversed(self._host.withdraw(self, running=True)))
                raise EngineBroken(self._differs)
        return count

    # ---------------- These methods concern the engine's memory and end.

    async def sleep(self, level: int = 1) -> None:
        """Raise RuntimeError, because other runs use the engine."""
        raise RuntimeError("the engine is shared with other runs, and does not sleep")

    async def wake(self) -> None:
        """Do nothing, because a shared engine is always awake."""

    async def memory(self) -> ProcessMemory:
        return await self._host.memory()

    async def close(self) -> None:
        """End this run's requests: those that run return the tokens generated so far, the others raise RuntimeError.
        Idempotent."""
        self._unusable = "closed"
        waiting = [*self._held, *self._host.withdraw(self, running=False)]
        self._held.clear()
        for pending in waiting:
            pending.fail(RuntimeError("the engine was closed before the request ran"))
        for pending in list(self._in_flight.values()):
            self._host.end(pending)
        self._incoming.close()

    @property
    def _num_running(self) -> int:
        return sum(not pending.future.done() and pending not in self._held for pending in self._in_flight.values())

    @property
    def _is_paused(self) -> bool:
        return self._paused
