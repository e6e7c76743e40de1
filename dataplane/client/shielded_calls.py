"""Runs operations for the main thread in threads in which no signal's handler runs, so that no interrupt splits them.

Python runs the handlers of signals in the main thread, between any two of its instructions. An exception that a handler
raises, such as KeyboardInterrupt, can therefore come between a reply of the directory and the code that keeps it. A
shielded operation runs in another thread, and the main thread only waits for it. An interrupt of the wait cancels the
operation, or takes its result back, in a thread that a further interrupt does not reach.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..rpc.cancellation import Cancellation

T = TypeVar("T")
IDLE_S = 30.0
"""Seconds after which a thread without work ends."""
TAKE_BACK_S = 2.0
"""Seconds for which an interrupted caller waits until its operation has been taken back. After that, the interrupt is
raised while the taking back goes on."""
LOOK_S = 0.2
"""Seconds after which a waiting caller looks for signals. A signal that comes in the instant before a wait begins does
not end the wait."""

Job = Callable[[], None]


def can_be_interrupted() -> bool:
    """Return whether handlers of signals run in this thread. They run only in the main thread. While the interpreter
    ends, no other thread can run any more."""
    # Thread.is_alive is not asked: an interrupt within it marks the main thread as ended (Python 3.11 and 3.12).
    return threading.current_thread() is threading.main_thread() and not sys.is_finalizing()


class Shielded(Generic[T]):
    """One operation that runs in another thread on behalf of the main thread."""

    def __init__(self, run: Callable[[Cancellation], T], undo: Callable[[T], None]) -> None:
        """Prepare an operation. run: carries it out, and ends soon after its cancellation is requested. undo: takes
        back a result that its caller never got."""
        self._run = run
        self._undo = undo
        self._cancellation = Cancellation()
        self._lock = threading.Lock()
        self._phase = "new"
        self._is_abandoned = False
        self._ended = threading.Lock()
        self._ended.acquire()
        # Both are locks, since an interrupt within the wait for an event leaves the event's own lock in disorder.
        self._settled = threading.Lock()
        self._settled.acquire()
        self._result: T
        self._error: BaseException | None = None

    def result(self) -> T:
        """Carry out the operation and return its result, or raise its error. An exception that a signal's handler
        raises meanwhile is raised once the operation has been taken back, TAKE_BACK_S seconds later at the latest."""
        try:
            _threads.run(self._carry_out)
            while not self._ended.acquire(timeout=LOOK_S):
                pass
            if self._error is None:
                return self._result  # No handler runs from here to the caller's assignment.
        except BaseException:
            try:
                _threads.run(self._abandon)
            except BaseException:  # A second signal came at once. The error of the first one is raised.
                _threads.run(self._abandon)
            self._settled.acquire(timeout=TAKE_BACK_S)
            raise
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # Its traceback refers to this frame, and a cycle would keep the operation's receipts alive.

    def _carry_out(self) -> None:
        with self._lock:
            if self._is_abandoned:
                return
            self._phase = "begun"
        try:
            self._result = self._run(self._cancellation)
        except BaseException as error:
            self._error = error
        with self._lock:
            self._phase = "ended"
            is_abandoned = self._is_abandoned
        self._ended.release()
        if is_abandoned:
            self._take_back()

    def _abandon(self) -> None:
        with self._lock:
            if self._is_abandoned:
                return
            self._is_abandoned = True
            phase = self._phase
        if phase == "begun":
            self._cancellation.request()
        elif phase == "ended":
            self._take_back()
        else:
            self._settled.release()

    def _take_back(self) -> None:
        try:
            if self._error is None:
                self._undo(self._result)
        finally:
            self._error = None  # As in `result`.
            self._settled.release()


class _Threads:
    """Threads that run jobs. An interrupt of `run`, at whatever instruction, loses no thread, and a job runs completely
    or not at all."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0
        """Number of threads that wait for a job. Only the threads themselves change it, because an interrupt cannot
        come between two of their instructions."""

    def run(self, job: Job) -> None:
        """Run `job` in a thread without work, or in a new one. If none can be started, as when the interpreter ends, it
        runs in this thread."""
        self._jobs.put(job)
        if not self._start_if_short():
            with contextlib.suppress(queue.Empty):
                self._jobs.get_nowait()()

    def _start_if_short(self) -> bool:
        """Start a thread if more jobs wait than threads do. Returns False if that was impossible."""
        if self._jobs.qsize() > self._num_idle:
            try:
                threading.Thread(target=self._work, name="data-plane-call", daemon=True).start()
            except RuntimeError:
                return False
        return True

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._start_if_short()  # `run` may have counted this thread as waiting for its job.
            job()
            del job  # An idle thread must not keep the rows of its last operation alive.

    def _next(self) -> Job | None:
        """Return the next job; None when there was none for IDLE_S seconds."""
        with self._lock:
            self._num_idle += 1
        try:
            return self._jobs.get(timeout=IDLE_S)
        except queue.Empty:
            pass
        finally:
            with self._lock:
                self._num_idle -= 1
        try:
            return self._jobs.get_nowait()  # `run` may have counted this thread as waiting for its job.
        except queue.Empty:
            return None


_threads = _Threads()
# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=lambda: _threads.__init__())  # type: ignore[misc]
