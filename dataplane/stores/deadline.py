"""Adds time limits to calls into a library without time limits, and says what a passed time limit means.

The calls run on threads that may be left behind.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from ..block_store import Want
from ..errors import DataPlaneError, DataPlaneTimeout, IntegrityError, StoreLost

SILENT_S = 5.0
"""Seconds without a sign of life after which a process of a store counts as lost. A call whose time limit ends earlier
only took too long."""


def unanswered(
    who: str, op: str, peer: str, started: float, *, moved: float | None = None, progress: str = ""
) -> DataPlaneError:
    """Return the error of a call whose time limit ended before the process `who` had answered. It is DataPlaneTimeout,
    or StoreLost after SILENT_S seconds of silence.

    started, moved: times at which the call began and at which its last byte moved, by `time.monotonic()`. progress:
    text that says how many bytes were moved.
    """
    now = time.monotonic()
    silent_s = now - (started if moved is None else moved)
    behind = f": {progress}" if progress else ""
    context: dict[str, Any] = {"op": op, "peer": peer, "elapsed_s": now - started}
    if silent_s >= SILENT_S:
        return StoreLost(f"{who} did not answer for {silent_s:.1f} s{behind}", **context)
    return DataPlaneTimeout(f"{who} had not answered in full when the time limit ended{behind}", **context)


MAX_THREADS = 16
"""Maximum number of calls that run at the same time. Further calls wait for a thread, within their time limit."""


class DeadlineThreads:
    """Runs calls on daemon threads, each with a time limit. Thread-safe.

    A call that exceeds its time limit continues in its thread. Its arguments must stay alive until it returns, and its
    result is dropped.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_running = 0
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        self._num_threads = 0
        self._ended: BaseException | None = None

    def run(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Run `call`, and return its result or raise its error. Raises TimeoutError when it takes longer than
        `timeout_s`, and the error given to `end` after a call of `end`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._pending.add(future)
            if len(self._pending) > self._num_threads and self._num_threads < MAX_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._queue.put((future, call))
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise TimeoutError from None

    def end(self, error: BaseException) -> None:
        """Make all calls raise `error` from now on, including running ones, and end the idle threads. Later calls of
        this method do nothing."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            for future in self._pending:
                future.set_exception(error)
            self._pending.clear()
            for _ in range(self._num_threads):
                self._queue.put(None)

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait, after `end`, until no call is running any more (timeout_s None: without limit). Returns whether no call
        is running."""
        with self._idle:
            return self._idle.wait_for(lambda: self._num_running == 0, timeout_s)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            future, call = task
            if self._begin(future):
                try:
                    self._settle(future, call(), None)
                except BaseException as error:
                    self._settle(future, None, error)
            del task, future, call  # An idle thread would otherwise keep a request's buffers in memory.

    def _begin(self, future: Future[Any]) -> bool:
        with self._lock:
            if future not in self._pending:
                return False
            self._num_running += 1
            return True

    def _settle(self, future: Future[Any], result: Any, error: BaseException | None) -> None:
        with self._idle:
            self._num_running -= 1
            self._idle.notify_all()
            if future not in self._pending:
                return
            self._pending.discard(future)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)


# ---------------- Every part that reached this process over a network is checked here.


def received_part(view: Any, want: Want, part: int, peer: str) -> np.ndarray:
    """Check a part of a block that a store returned, and return it read-only. Raises IntegrityError unless it is a
    uint8 array of the length that the block's layout states."""
    expected = want.block.layout.part_bytes[part]
    if not isinstance(view, np.ndarray) or view.dtype != np.uint8 or view.shape != (expected,):
        found = f"{view.dtype} {list(view.shape)}" if isinstance(view, np.ndarray) else type(view).__name__
        text = f"block {want.block.block_id} part {part}: store returned {found}, expected uint8 [{expected}]"
        raise IntegrityError(text, op="get", peer=peer)
    view.flags.writeable = False
    return view


# ---------------- Stores that receive into memory of the C library's heap are faster when it keeps freed memory.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""Largest value in bytes that glibc accepts for M_MMAP_THRESHOLD."""
_TRIM_FROM_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Make glibc keep up to a GiB of freed memory for later allocations. Returns whether the C library accepted the
    settings.

    ZeroMQ receives every frame into memory from the heap. By default glibc maps large frames each time, and unmaps them
    afterwards. The page faults, one for every 4 KiB, take as long as the transfer itself: a get of 8 MiB takes 10 ms by
    default and 5 ms with these settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # This C library has no mallopt.
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _TRIM_FROM_BYTES))
