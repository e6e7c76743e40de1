"""A socket from the engine to each worker, beside vLLM's own way: announcements there, states of reception back.

vLLM's engine process answers calls between two steps of the model, and makes no step meanwhile. A version on its way
would have it answer dozens, each late. What goes through here disturbs nobody: a thread of the worker listens.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....codecs import messages
from ...transports.protocol import WeightUpdate
from ..protocol import EngineDied
from .wire import PrepareState

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker says: once when it comes, and at every change."""

    worker: int
    number: int
    """Of the announcement."""
    state: PrepareState


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the engine says."""

    number: int
    update: WeightUpdate


class WorkerLinks:
    """The engine's end; belongs to one event loop."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._folder = ""
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._states: dict[int, PrepareState] = {}
        self._number = 0
        self._lost: set[int] = set()
        self._changed = asyncio.Condition()

    async def listen(self) -> str:
        """The path that workers are to connect to."""
        self._folder = tempfile.mkdtemp(prefix="headrace-vllm-")
        path = str(Path(self._folder) / "workers")
        self._server = await asyncio.start_unix_server(self._serve, path)
        return path

    async def announce(self, update: WeightUpdate) -> None:
        """Tell all workers to receive `update`. Raises EngineDied."""
        self._states.clear()
        self._number += 1
        data = messages.encode(Announcement(self._number, update))
        async with self._changed:
            await self._changed.wait_for(lambda: self._lost or len(self._writers) == self._num_workers)
        self._expect_all()
        for writer in self._writers.values():
            writer.write(_LENGTH.pack(len(data)) + data)

    async def states(self) -> list[PrepareState]:
        """Of all workers, each through with what was announced last; when one has failed, of those that are by then.
        Raises EngineDied."""

        def over() -> bool:
            failed = any(state.phase == "failed" for state in self._states.values())
            return bool(self._lost) or failed or len(self._states) == self._num_workers

        async with self._changed:
            await self._changed.wait_for(over)
        self._expect_all()
        return [self._states[worker] for worker in sorted(self._states)]

    async def close(self) -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            for writer in self._writers.values():
                writer.close()
            server.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _expect_all(self) -> None:
        if self._lost:
            raise EngineDied(f"vLLM's worker {min(self._lost)} has ended its connection; its process died")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = -1
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                said = messages.decode(await reader.readexactly(length), WorkerState)
                worker = said.worker
                async with self._changed:
                    self._writers[worker] = writer
                    if said.number == self._number and said.state.phase != "none":
                        self._states[worker] = said.state
                    self._changed.notify_all()
        except (asyncio.IncompleteReadError, ConnectionError):
            async with self._changed:
                if worker >= 0 and self._server is not None:
                    self._lost.add(worker)
                self._changed.notify_all()
        finally:
            writer.close()


class WorkerLink:
    """A worker's end."""

    def __init__(self, path: str, worker: int, receive: Callable[[int, WeightUpdate], None]) -> None:
        """receive: called in a thread for every announcement, with its number, one after another."""
        self._worker = worker
        self._receive = receive
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self.tell(0, PrepareState(-1, "none"))
        threading.Thread(target=self._listen, name="weights-link", daemon=True).start()

    def tell(self, number: int, state: PrepareState) -> None:
        """Let the engine know what became of an announcement; when it is gone, nobody needs to."""
        data = messages.encode(WorkerState(self._worker, number, state))
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            return

    def close(self) -> None:
        """Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._socket.close()

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as incoming:
                while head := incoming.read(_LENGTH.size):
                    told = messages.decode(incoming.read(*_LENGTH.unpack(head)), Announcement)
                    self._receive(told.number, told.update)
        except (OSError, ValueError, struct.error):
            return  # the engine is gone, or has closed
