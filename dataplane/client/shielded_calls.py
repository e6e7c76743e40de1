"""Runs operations for the main thread in threads in which no signal's handler runs, so that no interrupt splits them.

Python runs the handlers of signals in the main thread, between any two of its instructions. An exception that a handler
raises, such as KeyboardInterrupt, can therefore come between a reply of the directory and the code that keeps it. A
shielded operation runs in another thread, and the main thread only waits for it. An interrupt of the wait cancels the
operation, or takes its result back, in a thread that a further interrupt does not reach.
"""

from __future__ import annotations

import os
import queue
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

Job = Callable[[], None]
_idle: list[queue.SimpleQueue[Job]] = []
"""Queues of the threads that have no work. A forked process has none of its parent's threads."""
os.register_at_fork(after_in_child=_idle.clear)


def can_be_interrupted() -> bool:
    """Return whether handlers of signals run in this thread. They run only in the main thread; when it has ended, no
    thread can be started any more."""
    main = threading.main_thread()
    return threading.current_thread() is main and main.is_alive()


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
        self._settled = threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def result(self) -> T:
        """Carry out the operation and return its result, or raise its error. An exception that a signal's handler
        raises meanwhile is raised once the operation has been taken back, TAKE_BACK_S seconds later at the latest."""
        try:
            _start(self._carry_out)
            self._ended.acquire()
            if self._error is None:
                return self._result  # No handler runs from here to the caller's assignment.
        except BaseException:
            _start(self._abandon)
            self._settled.wait(TAKE_BACK_S)
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
            self._is_abandoned = True
            phase = self._phase
        if phase == "begun":
            self._cancellation.request()
        elif phase == "ended":
            self._take_back()
        else:
            self._settled.set()

    def _take_back(self) -> None:
        try:
            if self._error is None:
                self._undo(self._result)
        finally:
            self._error = None  # As in `result`.
            self._settled.set()


def _start(job: Job) -> None:
    """Run `job` in a thread without work, or in a new one."""
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="data-plane-call", daemon=True).start()
    jobs.put(job)


def _work(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        try:
            job = jobs.get(timeout=IDLE_S)
        except queue.Empty:
            try:
                _idle.remove(jobs)
            except ValueError:  # A caller has just taken this thread.
                continue
            return
        job()
        del job  # An idle thread must not keep the rows of its last operation alive.
        _idle.append(jobs)
