"""Defines links, which carry a client's requests to the directory, and the link to a directory in the same process.

The link to a directory in another process is in `socket_link.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..block_store import StoreHost
from ..config import DataPlaneConfig
from ..directory.requests import CANCELLED, TAKE_EFFECT, WAITING_OPS, is_done
from ..directory.service import DirectoryService
from ..errors import DirectoryLost
from .cancellation import CallCancelled, Cancellation

_logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Seconds beyond a call's own time limit after which a directory that has not answered is considered lost."""
TAKE_BACK_PART = 5
"""Divisor of GRACE_S: GRACE_S / TAKE_BACK_PART seconds are reserved for undoing an interrupted call."""

Undo = Callable[[bytes], "tuple[str, bytes] | None"]
"""Function that builds the request to undo a call whose caller no longer waits for it. It takes the body of the reply
to the call, and returns (op, payload) of the undoing request, or None when there is nothing to undo."""


class Link(Protocol):
    """Carries requests to the directory (the metadata service). Thread-safe.

    Every call returns or raises DirectoryLost within `timeout_s` + GRACE_S. A call that is interrupted before its
    answer (cancelled, interrupted by a signal, out of time) is cancelled at the directory. If the directory has carried
    it out already, the link sends the request that `undo` builds. If it is not certain that the call was cancelled or
    undone, DirectoryLost says that it is not known whether the call took effect.
    """

    peer: str
    """Description of the directory for error messages."""

    def call(
        self,
        op: str,
        payload: bytes,
        timeout_s: float,
        undo: Undo | None = None,
        cancellation: Cancellation | None = None,
    ) -> bytes:
        """Send a request and return the reply, blocking this thread. With `cancellation`, another thread can end the
        wait: raises CallCancelled if the request was cancelled before the directory carried it out."""
        ...

    async def call_async(self, op: str, payload: bytes, timeout_s: float, undo: Undo | None = None) -> bytes:
        """Send a request and return the reply, without blocking the event loop."""
        ...

    def detach(self) -> None:
        """Disconnect from the directory, which keeps running. Idempotent."""
        ...

    async def detach_async(self) -> None:
        """Disconnect as `detach` does, on the event loop that made the calls."""
        ...


def call_s(timeout_s: float) -> float:
    """Return how many seconds a call waits for its answer. It is the time limit `timeout_s` plus GRACE_S, minus the
    part of GRACE_S that is reserved for undoing the call."""
    return timeout_s + GRACE_S - take_back_s()


def in_all(seconds: float) -> float:
    """Return the time limit of a call that is to end after `seconds`, its grace included."""
    return seconds - GRACE_S


def take_back_s() -> float:
    """Return how many seconds an interrupted call waits until it is undone. They are a part of GRACE_S."""
    return GRACE_S / TAKE_BACK_PART


def undoing(undo: Undo | None, reply: bytes) -> tuple[str, bytes] | None:
    """Return the (op, payload) that undoes what the directory did according to `reply`. None means nothing to undo."""
    return undo(reply[1:]) if undo is not None and is_done(reply) else None


def unknown_outcome(op: str) -> str:
    """Return the end of the error for a request without an answer: it is not known whether the call took effect.
    Returns "" for an operation without lasting effect."""
    return "; it is not known whether the call took effect" if op in TAKE_EFFECT else ""


def lasting_effect(op: str, undo: Undo | None, reply: bytes) -> str:
    """Return the end of the error for an interrupted request whose reply came late. It says that the call took effect,
    if it did and cannot be undone. Returns "" when it was cancelled or undone, or failed."""
    return "; the call took effect" if undo is None and op in TAKE_EFFECT and is_done(reply) else ""


async def wait_out(future: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait for `future` for at most `timeout_s`, even if the caller's task is cancelled again in the meantime. A
    timeout or an error of `future` is not raised, because the caller raises another error."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not future.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait([future], timeout=left)
        except asyncio.CancelledError:
            continue  # The cancellation is already under way, and the deadline bounds this wait.


_directories: dict[str, InProcessLink] = {}
"""Links to the directories that run in this process, by run id."""


class InProcessLink:
    """Runs a directory on an event loop in a thread of this process, and carries requests to it."""

    def __init__(self, run_id: str, config: DataPlaneConfig, build_host: Callable[[], StoreHost]) -> None:
        """Start a directory. Raises ValueError if this process already has a directory of that run. Errors that
        `build_host` raises are passed on."""
        if run_id in _directories:
            raise ValueError(f"run_id {run_id!r}: this process has a data plane of that name, expected another name")
        self.peer = f"directory of run {run_id!r} in this process"
        self._run_id = run_id
        self._pid = os.getpid()
        self.host = build_host()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"directory-{run_id}", daemon=True)
        self._thread.start()
        self._service = asyncio.run_coroutine_threadsafe(self._start(config), self._loop).result()
        _directories[run_id] = self

    async def _start(self, config: DataPlaneConfig) -> DirectoryService:
        return DirectoryService(config, self.host)

    def call(
        self,
        op: str,
        payload: bytes,
        timeout_s: float,
        undo: Undo | None = None,
        cancellation: Cancellation | None = None,
    ) -> bytes:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking call from the directory's own thread would never return")
        started = time.monotonic()
        call = self._prepare(op, payload, undo)
        try:  # From here on, an interrupt takes the call back.
            call.start()
            with (cancellation or Cancellation()).applies(call.cancel):
                reply = call.reply.result(call_s(timeout_s))
        except BaseException as error:
            call.abandon()
            concurrent.futures.wait([call.taken_back], take_back_s())
            if isinstance(error, concurrent.futures.TimeoutError):
                raise self._lost(op, f"did not answer{call.outcome()}", started) from None
            raise
        if cancellation is not None and cancellation.requested and reply == CANCELLED:
            raise CallCancelled(op)
        return self._checked(reply, op, started)

    async def call_async(self, op: str, payload: bytes, timeout_s: float, undo: Undo | None = None) -> bytes:
        started = time.monotonic()
        call = self._prepare(op, payload, undo)
        try:
            call.start()
            async with asyncio.timeout(call_s(timeout_s)):
                reply = await asyncio.wrap_future(call.reply)
        except BaseException as error:
            call.abandon()
            await wait_out(asyncio.wrap_future(call.taken_back), take_back_s())
            if isinstance(error, TimeoutError):
                raise self._lost(op, f"did not answer{call.outcome()}", started) from None
            raise
        return self._checked(reply, op, started)

    def detach(self) -> None:
        """No-op: all clients in this process share the link, and `close` ends it for all of them."""

    async def detach_async(self) -> None:
        """No-op: all clients in this process share the link, and `close` ends it for all of them."""

    def close(self) -> None:
        """End the directory's service, the store and the thread. Idempotent. No-op in a process that was forked from
        this one."""
        if _directories.pop(self._run_id, None) is None or self._pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self._service.close(), self._loop).result(GRACE_S * 4)
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE_S)
        self._loop.close()

    def check_process(self, op: str) -> None:
        """Raise DirectoryLost when this process was forked from the one that runs the directory."""
        if self._pid != os.getpid():
            what = (
                f"is in process {self._pid}, from which this one was forked; open the data plane without "
                "in_process=True to use it in several processes"
            )
            raise self._lost(op, what, time.monotonic())

    def _prepare(self, op: str, payload: bytes, undo: Undo | None) -> _Call:
        self.check_process(op)
        if _directories.get(self._run_id) is not self:
            raise self._lost(op, "is closed", time.monotonic())
        return _Call(self._service, self._loop, op, payload, undo)

    def _checked(self, reply: bytes, op: str, started: float) -> bytes:
        """Return `reply`. Raises DirectoryLost instead when the reply says that the directory ended the call because it
        was closed."""
        if reply == CANCELLED:
            raise self._lost(op, "was closed", started)
        return reply

    def _lost(self, op: str, what: str, started: float) -> DirectoryLost:
        return DirectoryLost(f"the directory {what}", op=op, peer=self.peer, elapsed_s=time.monotonic() - started)


class _Call:
    """One request from a caller in another thread, which runs on the event loop of the directory."""

    def __init__(
        self, service: DirectoryService, loop: asyncio.AbstractEventLoop, op: str, payload: bytes, undo: Undo | None
    ) -> None:
        self.reply: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        """Future of the reply. An exception set on it indicates a bug in the directory."""
        self.taken_back: concurrent.futures.Future[str] = concurrent.futures.Future()
        """Future that completes once an abandoned call has been cancelled or undone, or is known to have taken effect.
        Its result is the text that `lasting_effect` returns."""
        for future in (self.reply, self.taken_back):
            # A future that is marked as running cannot be cancelled by a waiter that is cancelled.
            future.set_running_or_notify_cancel()
        self._service = service
        self._loop = loop
        self._op = op
        self._payload = payload
        self._undo = undo
        self._task: asyncio.Task[bytes] | None = None
        self._taking_back: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Queue the call on the event loop of the directory. Returns at once."""
        self._loop.call_soon_threadsafe(self._start)

    def abandon(self) -> None:
        """Start to cancel the call, or to undo it if it has been carried out. Returns at once; the future `taken_back`
        completes when this is done."""
        try:
            self._loop.call_soon_threadsafe(self._abandon)
        except RuntimeError:  # The directory is closed, so nothing is left to undo.
            self.taken_back.set_result("")

    def cancel(self) -> None:
        """Cancel the call if it waits for rows or space. Its reply is then CANCELLED. Returns at once."""
        with contextlib.suppress(RuntimeError):  # The directory is closed.
            self._loop.call_soon_threadsafe(self._cancel)

    def outcome(self) -> str:
        """Return the end of the error for an abandoned call. It comes from `lasting_effect` if the outcome is known,
        otherwise from `unknown_outcome`."""
        return self.taken_back.result() if self.taken_back.done() else unknown_outcome(self._op)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._answer())

    async def _answer(self) -> bytes:
        try:
            reply = await self._service.call(self._op, self._payload)
        except asyncio.CancelledError:
            reply = CANCELLED
        except Exception as error:
            self.reply.set_exception(error)
            return CANCELLED
        self.reply.set_result(reply)
        return reply

    def _cancel(self) -> None:
        if self._task is not None and self._op in WAITING_OPS:
            self._task.cancel()

    def _abandon(self) -> None:
        self._taking_back = self._loop.create_task(self._take_back())

    async def _take_back(self) -> None:
        if self._task is None:  # The call was interrupted before `start` queued it, so it never began.
            self.taken_back.set_result("")
            return
        self._cancel()
        reply = await self._task
        request = undoing(self._undo, reply)
        if request is not None:
            _logger.debug("%s: its reply is no longer waited for, it is undone by %s", self._op, request[0])
            await self._service.call(*request)
        self.taken_back.set_result(lasting_effect(self._op, self._undo, reply))


async def _end_tasks() -> None:
    """Wait until the calls interrupted by the end of the service have passed their errors to their callers. Calls that
    are not done within a second are cancelled."""
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
    link.check_process("connect")
    return link
