"""Runs a service in a forked process, and in another one as soon as that process has died.

The keeper itself does nothing but wait, so it hardly can fail. What it has opened before (memory, listening sockets,
processes of the store) stays open, and each forked process goes on with it. Forking takes milliseconds, because all
modules are imported already.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ..errors import DirectoryLost

_logger = logging.getLogger(__name__)

MOST_DEATHS = 6
"""Number of processes in a row that may die within SHORT_S seconds of their start. No other one is started then,
because it would die, too."""
SHORT_S = 1.0
_CLOSE = b"c"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class Keeper:
    """Keeps one service running in a process of its own."""

    def __init__(self, serve: Callable[[Callable[[], object], int], None], may_go_on: Callable[[], bool]) -> None:
        """serve: function (ready, control) that runs in the forked process. It calls `ready` once it serves, and
        returns soon after `told_to_close(control)` may be called, that is, once the file descriptor `control` can be
        read. may_go_on: function that returns whether another process can go on after a death."""
        self._serve = serve
        self._may_go_on = may_go_on
        self._pid = 0
        self._control = -1
        self._started = 0.0
        """Time (`time.monotonic()`) at which the current process was forked."""
        self._num_short = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self._ended = threading.Event()

    def start(self, timeout_s: float, gone: Callable[[], None]) -> None:
        """Start the service, and wait until it serves. gone: function that is called in a thread when the service has
        ended for good, unless `close` was called. Raises DirectoryLost when it does not serve within `timeout_s`."""
        served, ready = os.pipe()
        try:
            self._fork(ready)
            os.close(ready)
            poll = select.poll()  # `select` refuses descriptors above 1023.
            poll.register(served, select.POLLIN)
            if not poll.poll(timeout_s * 1000) or not os.read(served, 1):
                self._kill()
                os.waitpid(self._pid, 0)
                raise DirectoryLost("the directory's process did not start; its output says why", op="open")
        finally:
            os.close(served)
        threading.Thread(target=self._keep, args=(gone,), name="keeper", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """Tell the service to close, and kill it after `timeout_s` seconds. Idempotent."""
        with self._lock:
            self._is_closing = True
            if self._control >= 0:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._control, _CLOSE)
        if not self._ended.wait(timeout_s):
            self._kill()
            self._ended.wait(timeout_s)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _keep(self, gone: Callable[[], None]) -> None:
        try:
            while True:
                _, status = os.waitpid(self._pid, 0)
                lived_s = time.monotonic() - self._started
                with self._lock:
                    os.close(self._control)
                    self._control = -1
                    if self._is_closing:
                        return
                    self._num_short = self._num_short + 1 if lived_s < SHORT_S else 0
                    if self._num_short == MOST_DEATHS or not self._may_go_on():
                        _logger.error("the directory's process %d has died (%s)", self._pid, _described(status))
                        gone()
                        return
                    before = self._pid
                    self._fork(-1)
                _logger.warning(
                    "the directory's process %d has died (%s); process %d goes on",
                    before,
                    _described(status),
                    self._pid,
                )
        finally:
            self._ended.set()

    def _fork(self, ready: int) -> None:
        """Start a process. ready: file descriptor to which it writes a byte once it serves; -1 for none."""
        control, self._control = os.pipe()
        self._started = time.monotonic()
        self._pid = os.fork()
        if self._pid:
            os.close(control)
            return
        try:
            os.close(self._control)
            # A process that is stopped does not notice the end of `control`. It would keep its memory for ever.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._serve(lambda: os.write(ready, b"r") if ready >= 0 else None, control)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def told_to_close(control: int) -> bool:
    """Return whether the keeper has asked the service to close, and False if the keeper has died. Waits for one of
    both."""
    return os.read(control, 1) == _CLOSE


def kept_process(pid: int) -> int:
    """Return the pid of the process that the keeper `pid` has forked last.

    A process that keeps none is itself the one.
    """
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, task.read_text().split())
    # The storage units have command lines of their own; a forked process has that of its parent.
    own = [child for child in children if _command(child) == _command(pid)]
    return max(own, key=_start, default=pid)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _start(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return -1


def _described(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit code {code}"
