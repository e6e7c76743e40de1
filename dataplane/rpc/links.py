"""Carries a client's requests to the directory, in its own process or in the directory's actor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..block_store import StoreHost
from ..config import DataPlaneConfig
from ..directory.service import DirectoryService
from ..errors import DirectoryLost

GRACE_S = 5.0
"""Seconds beyond a call's own time limit after which a directory that has not answered is taken for lost."""


class Link(Protocol):
    """Carries requests to the directory. Thread-safe.

    Every call returns or raises DirectoryLost within `timeout_s` + GRACE_S.
    """

    peer: str
    """Name of the directory, as errors show it."""

    def call(self, op: str, payload: bytes, timeout_s: float) -> bytes:
        """Send a request and return the reply, blocking this thread."""
        ...

    async def call_async(self, op: str, payload: bytes, timeout_s: float) -> bytes:
        """Send a request and return the reply. If cancelled, the directory may still act on the request."""
        ...

    def detach(self) -> None:
        """Disconnect. Idempotent. The directory goes on."""
        ...

    async def detach_async(self) -> None:
        """Disconnect, from the event loop that made the calls."""
        ...


_directories: dict[str, InProcessLink] = {}
"""Directories of this process, by run."""


class InProcessLink:
    """Runs a directory on an event loop in a thread of this process, and carries requests to it."""

    def __init__(self, run_id: str, config: DataPlaneConfig, build_host: Callable[[], StoreHost]) -> None:
        """Raise ValueError when this process has a directory of that run already, and what `build_host` raises."""
        if run_id in _directories:
            raise ValueError(f"run_id {run_id!r}: this process has a data plane of that name, expected another name")
        self.peer = f"directory of run {run_id!r} in this process"
        self._run_id = run_id
        self.host = build_host()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"directory-{run_id}", daemon=True)
        self._thread.start()
        self._service = asyncio.run_coroutine_threadsafe(self._start(config), self._loop).result()
        _directories[run_id] = self

    async def _start(self, config: DataPlaneConfig) -> DirectoryService:
        return DirectoryService(config, self.host)

    def call(self, op: str, payload: bytes, timeout_s: float) -> bytes:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking call from the directory's own thread would never return")
        started = time.monotonic()
        future = self._submit(op, payload)
        try:
            return future.result(timeout_s + GRACE_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise self._lost(op, "did not answer", started) from None
        except concurrent.futures.CancelledError:
            raise self._lost(op, "was closed", started) from None

    async def call_async(self, op: str, payload: bytes, timeout_s: float) -> bytes:
        started = time.monotonic()
        future = asyncio.wrap_future(self._submit(op, payload))
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await future
        except TimeoutError:
            raise self._lost(op, "did not answer", started) from None

    def detach(self) -> None:
        """Do nothing, as clients of this process share the link."""

    async def detach_async(self) -> None:
        """Do nothing, as clients of this process share the link."""

    def close(self) -> None:
        """End the service, the store and the thread. Idempotent."""
        if _directories.pop(self._run_id, None) is None:
            return
        asyncio.run_coroutine_threadsafe(self._service.close(), self._loop).result(GRACE_S * 4)
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE_S)
        self._loop.close()

    def _submit(self, op: str, payload: bytes) -> concurrent.futures.Future[bytes]:
        if _directories.get(self._run_id) is not self:
            raise self._lost(op, "is closed", time.monotonic())
        return asyncio.run_coroutine_threadsafe(self._service.call(op, payload), self._loop)

    def _lost(self, op: str, what: str, started: float) -> DirectoryLost:
        return DirectoryLost(f"the directory {what}", op=op, peer=self.peer, elapsed_s=time.monotonic() - started)


async def _end_tasks() -> None:
    """Let the calls that the close woke come to their end, so that callers get their errors."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if others:
        _, pending = await asyncio.wait(others, timeout=1.0)
        for task in pending:
            task.cancel()


def in_process_link(run_id: str) -> InProcessLink:
    """Return the link to this process's directory of that run. Raises DirectoryLost when there is none."""
    link = _directories.get(run_id)
    if link is None:
        raise DirectoryLost("this process has no such data plane (closed, or opened in another process)", peer=run_id)
    return link
