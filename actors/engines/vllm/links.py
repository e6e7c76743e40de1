"""Carries orders from the engine to each vLLM worker, and the workers' reports back, bypassing vLLM's engine process.

vLLM's engine process answers calls only between two steps of the model, and runs no step during a call. A weight update
would need dozens of these calls, and each would have to wait for a step. Instead, a thread in each worker listens on a
socket of its own, which delays nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....codecs import messages
from ....codecs.weights.parameter_digests import ParameterDigests
from ...weight_sync.transports.protocol import WeightUpdate
from ..protocol import EngineDied
from .process import all_of
from .weights.wire import LoadReport, PrepareState, VerifyReport

_LENGTH = struct.Struct("<I")


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


@dataclass(frozen=True, slots=True)
class Answer:
    """A message from a worker to the engine: first a greeting, then one of its orders' answers. The answers are
    `state`, `report` and `verified`.

    A message with an order's number but without any of these says that the load has begun. A message with
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
        self._folder = tempfile.mkdtemp(prefix="headrace-vllm-")
        path = str(Path(self._folder) / "workers")
        self._server = await asyncio.start_unix_server(self._serve, path)
        return path

    async def prepare(self, update: WeightUpdate) -> list[PrepareState]:
        """Have all workers receive `update`, and return their states.

        When a worker has failed, only the states of the workers that have answered by then are returned. Raises
        EngineDied when a worker's connection breaks.
        """
        await self._order(prepare=update)
        await self._until(lambda: any(one.state and one.state.phase == "failed" for one in self._answers.values()))
        return [one.state for _, one in sorted(self._answers.items()) if one.state is not None]

    async def load(self, version: int, meanwhile: Callable[[], Coroutine[Any, Any, None]] | None) -> list[LoadReport]:
        """Have all workers load the prepared version, and return their reports when all have finished. No model step
        may run during the load.

        meanwhile: function whose coroutine is started once all workers have begun to load, and is awaited too; None if
        there is none. Raises EngineDied if a worker's connection breaks, and what `meanwhile` raises.
        """
        await self._order(load=version)
        await self._until(lambda: len(self._begun | self._answers.keys()) == self._num_workers)
        await all_of(*([] if meanwhile is None else [meanwhile()]), self._until(lambda: False))
        return [one.report for _, one in sorted(self._answers.items()) if one.report is not None]

    async def verify(self, digests: ParameterDigests) -> list[VerifyReport]:
        """Have all workers compare their weights with the trainer's, and return their reports. Raises EngineDied if a
        worker's connection breaks."""
        await self._order(verify=digests)
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
    ) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._lost or len(self._writers) == self._num_workers)
        self._expect_all()
        self._begun.clear()
        self._answers.clear()
        self._number += 1
        data = messages.encode(Order(self._number, prepare, load, verify))
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
        """Send the outcome of `order`; without any outcome, the message says that the load has begun. Does nothing if
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
            return  # the engine is gone, or has closed
