"""`WeightUpdates` runs weight updates in vLLM's workers: the workers prepare a new version, and then load or drop it.

Orders to each worker, and the workers' reports, bypass vLLM's engine process. That process answers calls only between
two steps of the model, and runs no step during a call. A weight update would need dozens of these calls, and each would
have to wait for a step. Instead, a thread in each worker listens on a socket of its own, which delays nothing.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ....codecs import messages
from ....codecs.weights.parameter_digests import ParameterDigests
from ....codecs.weights.quantization import Scheme
from ...process.socket_folder import vllm_folder
from ...weight_sync.transports.protocol import ReceiverConfig, WeightTransferError, WeightUpdate
from ..protocol import EngineDied, Prepared
from .process import CALL_PATIENCE_S, LoadReport, PrepareState, VerifyReport, VllmProcess, all_of

_LENGTH = struct.Struct("<I")
T = TypeVar("T")
_PREPARE_TIMEOUTS = 20
"""Time without a new bucket after which a worker's thread counts as hung, as a multiple of the update's `timeout_s`."""
_LOOK_S = 1.0
"""Seconds between two checks of the number of buckets that the workers have received."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order from the engine to its workers; exactly one of `prepare`, `load` and `verify` is set."""

    number: int
    """Sequence number of the order."""
    prepare: WeightUpdate | None = None
    """Update to receive and verify; None in another order."""
    load: int | None = None
    """Number of the prepared version to load; None in another order."""
    verify: ParameterDigests | None = None
    """Digests to compare with the weights in service; None in another order."""
    adapter: int = 0
    """Number in vLLM of the adapter that is to be loaded or verified; 0 for whole weights."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A message from a worker to the engine. The first message is a greeting; later ones answer orders with `state`,
    `report` or `verified`.

    A message with an order's number but without an answer says that the load has begun. A message with
    `received` only reports progress.
    """

    worker: int
    """Number of the worker in its engine, from 0."""
    number: int = 0
    """Number of the order that is answered; 0 in the greeting and in progress messages."""
    state: PrepareState | None = None
    """Outcome of an order to prepare."""
    report: LoadReport | None = None
    """Outcome of an order to load."""
    verified: VerifyReport | None = None
    """Outcome of an order to verify."""
    received: int = 0
    """In a progress message, number of buckets that the worker has received since its start; 0 in all other
    messages."""


class WorkerLinks:
    """The engine's end of the sockets to its workers. It belongs to one event loop, which sends one order at a time and
    waits for its answers."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._folder = ""
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._begun: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._number = 0
        self._lost: set[int] = set()
        self._received: dict[int, int] = {}
        self._changed = asyncio.Condition()

    @property
    def num_received(self) -> int:
        """Number of buckets that the workers have received, according to their last messages."""
        return sum(self._received.values())

    @property
    def lost(self) -> str:
        """Description of a worker whose connection broke before `close`; "" when there is none."""
        return f"vLLM's worker {min(self._lost)} has ended its connection; its process died" if self._lost else ""

    async def listen(self) -> str:
        """Open a Unix socket that workers can connect to, and return its path."""
        self._folder = tempfile.mkdtemp(prefix="headrace-vllm-", dir=vllm_folder())
        path = str(Path(self._folder) / "workers")
        self._server = await asyncio.start_unix_server(self._serve, path)
        return path

    async def prepare(self, update: WeightUpdate) -> list[PrepareState]:
        """Make all workers receive `update`, and return their states.

        If a worker fails, the call returns early, with the states of the workers that have answered by then. Raises
        EngineDied when a worker's connection breaks.
        """
        await self._order(prepare=update)
        await self._until(lambda: any(one.state and one.state.phase == "failed" for one in self._answers.values()))
        return [one.state for _, one in sorted(self._answers.items()) if one.state is not None]

    async def load(
        self, version: int, meanwhile: Callable[[], Coroutine[Any, Any, None]] | None, adapter: int = 0
    ) -> list[LoadReport]:
        """Make all workers load the prepared version, and return their reports when all have finished. No model step
        may run during the load.

        meanwhile: coroutine function that is called once all workers have begun to load, and awaited; None for no such
        function. adapter: number of the adapter that the version is; 0 for whole weights. Raises EngineDied if a
        worker's connection breaks, and any error of `meanwhile`.
        """
        await self._order(load=version, adapter=adapter)
        await self._until(lambda: len(self._begun | self._answers.keys()) == self._num_workers)
        await all_of(*([] if meanwhile is None else [meanwhile()]), self._until(lambda: False))
        return [one.report for _, one in sorted(self._answers.items()) if one.report is not None]

    async def verify(self, digests: ParameterDigests, adapter: int = 0) -> list[VerifyReport]:
        """Make all workers compare their weights with the trainer's, and return their reports. Raises EngineDied if a
        worker's connection breaks. adapter: number of the adapter to verify; 0 for whole weights."""
        await self._order(verify=digests, adapter=adapter)
        await self._until(lambda: False)
        return [one.verified for _, one in sorted(self._answers.items()) if one.verified is not None]

    async def close(self) -> None:
        """Close all connections and delete the socket. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            for writer in self._writers.values():
                writer.close()
            server.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _order(
        self,
        *,
        prepare: WeightUpdate | None = None,
        load: int | None = None,
        verify: ParameterDigests | None = None,
        adapter: int = 0,
    ) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._lost or len(self._writers) == self._num_workers)
        self._expect_all()
        self._begun.clear()
        self._answers.clear()
        self._number += 1
        data = messages.encode(Order(self._number, prepare, load, verify, adapter))
        for writer in self._writers.values():
            writer.write(_LENGTH.pack(len(data)) + data)

    async def _until(self, over: Callable[[], bool]) -> None:
        """Wait until `over()` is true or all workers have answered. Raises EngineDied when a worker's connection
        breaks."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._lost or len(self._answers) == self._num_workers or over())
        self._expect_all()

    def _expect_all(self) -> None:
        if self.lost:
            raise EngineDied(self.lost)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = -1
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                answer = messages.decode(await reader.readexactly(length), Answer)
                worker = answer.worker
                if answer.received:
                    self._received[worker] = answer.received
                    continue
                async with self._changed:
                    self._writers[worker] = writer
                    if answer.number == self._number and (answer.state or answer.report or answer.verified):
                        self._answers[worker] = answer
                    elif answer.number == self._number:
                        self._begun.add(worker)
                    self._changed.notify_all()
        except (asyncio.IncompleteReadError, ConnectionError):
            async with self._changed:
                if worker >= 0 and self._server is not None:
                    self._lost.add(worker)
                self._changed.notify_all()
        finally:
            writer.close()


class WorkerLink:
    """A worker's end of the socket to its engine."""

    def __init__(self, path: str, worker: int, follow: Callable[[Order], None]) -> None:
        """Connect to the engine. follow: function that a background thread calls with each order, one after another."""
        self._worker = worker
        self._follow = follow
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._send(Answer(worker))
        threading.Thread(target=self._listen, name="weights-link", daemon=True).start()

    def answer(
        self,
        order: Order,
        *,
        state: PrepareState | None = None,
        report: LoadReport | None = None,
        verified: VerifyReport | None = None,
    ) -> None:
        """Send the outcome of `order`; without an outcome, the message says that the load has begun. Does nothing if
        the engine is gone."""
        self._send(Answer(self._worker, order.number, state, report, verified))

    def tell_received(self, num_received: int) -> None:
        """Report to the engine how many buckets this worker has received since its start."""
        self._send(Answer(self._worker, received=num_received))

    def close(self) -> None:
        """Close the socket, which ends the background thread. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._socket.close()

    def _send(self, answer: Answer) -> None:
        data = messages.encode(answer)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            return

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as incoming:
                while head := incoming.read(_LENGTH.size):
                    self._follow(messages.decode(incoming.read(*_LENGTH.unpack(head)), Order))
        except (OSError, ValueError, struct.error):
            return  # The engine is gone, or has closed the connection.


class WeightUpdates:
    """Drives the weight updates of one engine. At most one version at a time is prepared or being received."""

    def __init__(
        self,
        process: VllmProcess,
        model: str,
        receiver: ReceiverConfig | None,
        num_workers: int,
        *,
        adapters: bool,
        seat: str = "",
        quantization: Scheme | None = None,
    ) -> None:
        """adapters: whether adapters come, too. quantization: kind of the 8-bit weights; None for none. seat: name of
        the run that gets the updates, if several runs share the engine."""
        self._process = process
        self._adapters = adapters
        self._seat = seat
        self._receiver_info = (
            None
            if receiver is None
            else {"receiver": pickle.dumps(receiver), "model": model, "quantization": quantization}
        )
        self._opened = False
        self._links = WorkerLinks(num_workers)
        self.turn = asyncio.Lock()
        """Lock that is held while a version is prepared, and that the engine holds while it commits one."""
        self._arriving: int | None = None
        self.loading: int | None = None
        """Version that is being loaded; None when there is none."""
        self.prepared: int | None = None
        """Version that is prepared and can be loaded; None when there is none."""
        self.is_adapter = False
        """True if the prepared version is an adapter."""
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
        """Make the workers receive and verify `update`. Returns `staged` once they have done so, or `joined` if the
        weights will only arrive during the load.

        If the call fails or is cancelled, the received data is dropped. If another version is still being received, it
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
                if self._seat:
                    await self._process.call("headrace_open_seat", self._seat, info)
                else:
                    await self._process.call("init_weight_transfer_engine", init_info=info)
                    if self._adapters:
                        await self._process.call("headrace_open_adapters")
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
            self.prepared, self.is_adapter = update.version, update.adapter is not None
            return prepared

    def expect(self, version: int) -> None:
        """Raise ValueError unless `version` is the prepared version."""
        if version != self.prepared:
            raise ValueError(f"weights: got version {version} to commit, expected the prepared one, {self.prepared}")

    async def drop(self, version: int) -> None:
        """Forget a prepared version, or stop receiving it. A load that has begun is not interrupted. Idempotent."""
        if self.prepared == version:
            self.prepared = None
        if self._opened and version != self.loading:
            await self._process.call("headrace_drop", version, self._seat)

    async def load(
        self, version: int, meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None, *, adapter: int = 0
    ) -> None:
        """Make the workers replace all weights with those of `version`. No model step may run during the call, unless
        the version is an adapter, which the workers only stage for vLLM.

        meanwhile: function for other work of the engine process during the load, see `WorkerLinks.load`; None for no
        such function. adapter: number that the adapter gets in vLLM; 0 for whole weights.

        Raises any error of `meanwhile`, EngineDied if a worker has died, WeightTransferError if the version did not
        arrive completely, and RuntimeError if loading failed otherwise. After the last two, the model holds a mix of
        two versions.
        """
        self.prepared, self.loading = None, version
        try:
            reports = await self._moving(self._links.load(version, meanwhile, adapter), CALL_PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(
                f"weights of version {version}: the workers did not load them, and no bucket came for "
                f"{CALL_PATIENCE_S:.0f} s"
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

    async def verify(self, digests: ParameterDigests, adapter: int = 0) -> tuple[int, bool]:
        """Make the workers compare their weights with the trainer's, or an adapter if its number in vLLM is not 0.

        Returns the smallest number of weights that a worker has compared, 0 if the weights did not come from an update;
        and whether the adapter changes the model. Raises EngineDied if a worker has died, and RuntimeError if the
        workers do not answer in time, or if a weight differs or cannot be read; the error then names the weight.
        """
        if not self._opened:
            return 0, False
        try:
            reports = await self._moving(self._links.verify(digests, adapter), CALL_PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(
                f"weights of version {digests.version}: the workers have not compared them with the trainer's weights "
                f"within {CALL_PATIENCE_S:.0f} s"
            ) from None
        failed = [f"worker {worker}: {report.error}" for worker, report in enumerate(reports) if report.error]
        if failed:
            raise RuntimeError("; ".join(failed))
        return min(report.num_compared for report in reports), any(report.changes for report in reports)

    async def leave(self) -> None:
        """Make the workers close what they have for this seat. A no-op if they have nothing."""
        if self._opened:
            await self._process.call("headrace_close_seat", self._seat)

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
        """Make all workers receive `update`. Returns `staged` once they have done so, or `joined` if the weights will
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
