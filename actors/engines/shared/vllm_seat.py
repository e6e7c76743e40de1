"""`VllmSeat` is the part of a shared vLLM engine that belongs to one run: its own adapter, versions and requests.

    run a --> seat a --+                  its adapters' slots, 2 of them
                       +--> vLLM's processes and base weights
    run b --> seat b --+                  its adapters' slots, 2 of them

vLLM computes the requests of all seats together, each with the adapter of its run. What stops vLLM as a whole in an
engine of one run's own (`pause`, `keep`) stops only the new requests of the run here; those in flight end with the
version with which they began. A seat never sleeps, and never replaces the base.
"""

from __future__ import annotations

from ....codecs.weights.parameter_digests import ParameterDigests
from ...adapters.spec import AdapterSlots
from ...weight_sync.transports.protocol import ReceiverConfig, WeightUpdate
from ..protocol import Prepared
from ..vllm.adapter_slots import HeldAdapters
from ..vllm.engine import VllmEngine
from ..vllm.worker_orders import WeightUpdates

SLOTS = 2
"""Number of versions of its adapter that a run can have in a shared engine at the same time."""


class VllmSeat(VllmEngine):
    """One run's view of a VllmEngine that several runs share."""

    def __init__(self, host: VllmEngine, name: str, receiver: ReceiverConfig | None, version: int) -> None:
        """See `open_seat`. Does not start anything."""
        if host._adapters is None:
            raise ValueError(f"engine of run {name!r}: got an engine without room for adapters, expected some")
        self._process, self._checks, self._logprobs, self._routes = (
            host._process, host._checks, host._logprobs, host._routes
        )  # fmt: skip
        self._tp, self._model, self._speculates = host._tp, host._model, host._speculates
        slots = AdapterSlots(host._adapters.slots.rank, SLOTS)
        self._updates = WeightUpdates(self._process, self._model, receiver, self._tp, adapters=True, seat=name)
        self._adapters = HeldAdapters(self._process, slots, self._model, host._adapters)
        self._version = self._base_version = version
        self._prefix = f"{name}/"
        self._begin()

    @property
    def progress(self) -> int:
        """Number that changes with each token of this run and each bucket of its adapters. While a request, commit or
        comparison of this run is in vLLM, it also changes with the tokens of other runs, behind which it waits."""
        self._expect_alive("progress")
        waits = self._control.locked() or any(request.submitted for request in self._in_flight.values())
        own = self.stats.tokens + self._updates.num_received
        return own + (self._process.versions.num_tokens if waits else 0)

    async def prepare_weights(self, update: WeightUpdate) -> Prepared:
        """Receive and check an adapter. Raises ValueError for weights of the whole model, which would replace the base
        of other runs, and as `VllmEngine.prepare_weights` does."""
        if update.adapter is None:
            raise ValueError(
                f"weights: version {update.version} has the weights of the whole model, expected an adapter, because "
                "other runs share the engine"
            )
        return await super().prepare_weights(update)

    async def verify_weights(self, digests: ParameterDigests) -> int:
        assert self._adapters is not None
        if self._adapters.current is None:
            raise ValueError(f"weights: version {digests.version} cannot be verified, because it is no adapter")
        return await super().verify_weights(digests)

    async def sleep(self, level: int = 1) -> None:
        """Raise RuntimeError, because other runs use the engine."""
        raise RuntimeError("the engine is shared with other runs, and does not sleep")

    async def wake(self) -> None:
        """Do nothing, because a shared engine is always awake."""

    async def close(self) -> None:
        """End this run's requests, which return the tokens generated so far, and free its slots. Idempotent."""
        if self._closed:
            return
        if await self._end_all():  # Adapters of requests that have not ended stay in their slots until the engine ends.
            assert self._adapters is not None
            await self._adapters.remove_all()
            await self._updates.leave()
        await self._updates.close()

    async def _set_frozen(self, frozen: bool) -> None:
        """Do nothing: vLLM computes for other runs, too."""
