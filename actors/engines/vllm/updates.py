"""`WeightUpdates` runs weight updates in vLLM's workers: it has a new version prepared, and then loaded or dropped."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ....codecs.weights.parameter_digests import ParameterDigests
from ...weight_sync.transports.protocol import ReceiverConfig, WeightTransferError, WeightUpdate
from ..protocol import Prepared
from .links import WorkerLinks
from .process import CALL_PATIENCE_S, VllmProcess
from .weights.wire import PrepareState

T = TypeVar("T")

_PREPARE_TIMEOUTS = 20
"""Time without a new bucket after which a worker's thread counts as hung, as a multiple of the update's `timeout_s`."""
_LOOK_S = 1.0
"""Seconds between two checks of how many buckets the workers have received."""


class WeightUpdates:
    """Drives the weight updates of one engine. At most one version at a time is prepared or being received."""

    def __init__(self, process: VllmProcess, model: str, receiver: ReceiverConfig | None, num_workers: int) -> None:
        self._process = process
        self._receiver_info = None if receiver is None else {"receiver": pickle.dumps(receiver), "model": model}
        self._opened = False
        self._links = WorkerLinks(num_workers)
        self.turn = asyncio.Lock()
        """Lock that is held while a version is prepared, and that the engine holds while it commits one."""
        self._arriving: int | None = None
        self.loading: int | None = None
        """Version that is being loaded; None when there is none."""
        self.prepared: int | None = None
        """Version that is prepared and can be loaded; None when there is none."""
        self.way = ""
        """How the last version was loaded: `in place` (written straight into the live parameters), or another way and
        its reason, as in `LoadReport.way`; "" before the first."""

    @property
    def num_received(self) -> int:
        """Number of buckets that the workers have received, according to their last messages."""
        return self._links.num_received

    @property
    def lost(self) -> str:
        """Description of a worker that has died, as its broken connection shows; "" when there is none."""
        return self._links.lost

    async def prepare(self, update: WeightUpdate, current: Callable[[], int]) -> Prepared:
        """Have the workers receive and verify `update`. Returns `staged` once they have done so, or `joined` if the
        weights will only arrive during the load.

        If the call fails or is cancelled, what has arrived is dropped. If another version is still being received, it
        is dropped first. current: function that returns the version in service, or -1 if the engine has no complete
        one. Raises WeightTransferError if the transfer fails, and ValueError if the weights do not fit the model or are
        older than those in service.
        """
        if self._arriving is not None:
            await self.drop(self._arriving)
        async with self.turn:
            if update.version == current():
                return "staged"
            if update.version < current():
                raise ValueError(
                    f"weights: got version {update.version}, expected the current {current()} or a later one"
                )
            if self._receiver_info is None:
                raise ValueError("weights: the engine was built without a receiver")
            if not self._opened:
                info = {**self._receiver_info, "link": await self._links.listen()}
                await self._process.call("init_weight_transfer_engine", init_info=info)
                self._opened = True
            if self.prepared is not None:
                await self.drop(self.prepared)
            self._arriving = update.version
            try:
                prepared = await self._receive(update)
            except BaseException:
                await asyncio.shield(self.drop(update.version))
                raise
            finally:
                self._arriving = None
            self.prepared = update.version
            return prepared

    def expect(self, version: int) -> None:
        """Raise ValueError unless `version` is the one that is prepared."""
        if version != self.prepared:
            raise ValueError(f"weights: version {version} is not the prepared one ({self.prepared})")

    async def drop(self, version: int) -> None:
        """Forget a prepared version, or stop receiving it. A load that has begun is not interrupted. Idempotent."""
        if self.prepared == version:
            self.prepared = None
        if self._opened and version != self.loading:
            await self._process.call("headrace_drop", version)

    async def load(self, version: int, meanwhile: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """Have the workers replace all weights with those of `version`. No model step may run during the call.
        meanwhile: work for the engine process at the same time, see `WorkerLinks.load`; None if there is none.

        Raises what `meanwhile` raises, EngineDied if a worker has died, WeightTransferError if the version did not
        arrive completely, and RuntimeError if loading failed otherwise. After the last two, the model holds a mix of
        two versions.
        """
        self.prepared, self.loading = None, version
        try:
            reports = await self._moving(self._links.load(version, meanwhile), CALL_PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(
                f"weights of version {version}: not loaded, and no bucket came for {CALL_PATIENCE_S:.0f} s"
            ) from None
        finally:
            self.loading = None
        failed = [report for report in reports if report.error]
        if failed:
            told = "; ".join(
                f"worker {worker}: {report.error}" for worker, report in enumerate(reports) if report.error
            )
            failure = WeightTransferError if all(report.in_transfer for report in failed) else RuntimeError
            raise failure(f"weights of version {version}: {told}")
        self.way = reports[0].way

    async def verify(self, digests: ParameterDigests) -> int:
        """Have the workers compare their weights with the trainer's. Returns the smallest number of weights that a
        worker has compared; 0 for weights that no update brought. Raises EngineDied if a worker has died, and
        RuntimeError, naming a weight, if one differs or cannot be read."""
        if not self._opened:
            return 0
        try:
            reports = await self._moving(self._links.verify(digests), CALL_PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(
                f"weights of version {digests.version}: not compared with the trainer's for {CALL_PATIENCE_S:.0f} s"
            ) from None
        failed = [f"worker {worker}: {report.error}" for worker, report in enumerate(reports) if report.error]
        if failed:
            raise RuntimeError("; ".join(failed))
        return min(report.num_compared for report in reports)

    async def close(self) -> None:
        """Close the connections to the workers. Idempotent."""
        await self._links.close()

    async def _moving(self, work: Coroutine[Any, Any, T], bound_s: float) -> T:
        """Run `work` and return its result. Raises TimeoutError once the workers have received no bucket for `bound_s`
        seconds."""
        task, received, since = asyncio.ensure_future(work), self.num_received, time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=min(_LOOK_S, bound_s))
                if self.num_received != received:
                    received, since = self.num_received, time.monotonic()
                elif time.monotonic() >= since + bound_s and not task.done():
                    raise TimeoutError
            return task.result()
        finally:
            task.cancel()

    async def _receive(self, update: WeightUpdate) -> Prepared:
        """Have all workers receive `update`. Returns `staged` once they have done so, or `joined` if the weights will
        only arrive during the load. Raises an error as soon as one worker has failed."""
        started, timeout_s = time.perf_counter(), _PREPARE_TIMEOUTS * update.timeout_s
        try:
            states = await self._moving(self._links.prepare(update), timeout_s)
        except TimeoutError:
            raise WeightTransferError(
                f"weights of version {update.version}: the workers have not finished, and no bucket came for "
                f"{timeout_s:.1f} s"
            ) from None
        if any(state.phase == "failed" for state in states):
            raise _failure(states, update, time.perf_counter() - started)
        return "staged" if all(state.staged for state in states) else "joined"


def _failure(states: list[PrepareState], update: WeightUpdate, waited_s: float) -> Exception:
    """Return the error for workers that failed to prepare a version. It is a ValueError when the version does not fit
    the model, else a WeightTransferError."""
    failed = [(worker, state) for worker, state in enumerate(states) if state.phase == "failed"]
    for _, state in failed:
        if state.kind == "value":
            return ValueError(state.error)
    told = "; ".join(f"worker {worker}: {state.error}" for worker, state in failed)
    return WeightTransferError(f"weights of version {update.version}, after {waited_s:.1f} s: {told}")
