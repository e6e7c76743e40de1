"""Defines the exit codes of the command, reports what failed, and ends it on a signal."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

DONE, FAILED, MISTAKE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
ONE_STOP_S = 2.0
"""Seconds within which several signals to stop are taken for one."""
LOST_S = 1.0
"""Seconds after which an exception that a signal raised is raised again if it got lost."""


def mistake(sentences: Sequence[str]) -> int:
    """Print what a user did wrong, a sentence a line. Returns the exit code."""
    for sentence in sentences:
        print(f"headrace: {sentence}", file=sys.stderr)
    return MISTAKE


def failure(error: Exception) -> int:
    """Print a panel that says what failed, and below it where the traceback was saved. The path is on a line of its
    own, so that it can be copied. Print the traceback itself if it was not saved in a run folder."""
    notes = getattr(error, "__notes__", [])
    if not notes:
        traceback.print_exception(error)
    console = Console(stderr=True)
    text = Text(f"{type(error).__name__}: {error}")
    console.print(Panel(text, title="headrace failed", title_align="left", border_style="red"))
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    return FAILED


class Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM, the signal that schedulers and containers send to end a process."""


def stop_on_sigterm() -> None:
    """Make SIGTERM raise an exception in the main thread, as Ctrl-C does. The run then ends its processes and removes
    its files."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    raise Terminated


class Interrupted(KeyboardInterrupt):
    """Raised at a SIGINT within `stop_at_once`. It can be referred to weakly, which KeyboardInterrupt itself cannot."""


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Context manager in whose body SIGINT and SIGTERM raise an exception in the main thread, whatever it does.

    Python alone lets asyncio.run wait for the next `await` at a SIGINT, which an engine that starts does not reach for
    minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = _Stop()
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        stop.over = True
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Stop:
    """Handles the signals to stop.

    `timeout` sends its signal to the process and to its group. A second one within ONE_STOP_S of one that is heeded is
    ignored, for it would end the cleaning up. An exception that is no longer referenced while the body still runs was
    lost, and is raised again: `zmq_socket_ctx` of vLLM 0.26 to 0.32 swallows a KeyboardInterrupt at an engine's start.
    """

    def __init__(self) -> None:
        self.over = False
        """True if the body has ended."""
        self._last = -math.inf
        self._error: Callable[[], BaseException | None] = lambda: None

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._error() is not None and now - self._last <= ONE_STOP_S:
            return
        self._last = now
        error = Terminated() if signum == signal.SIGTERM else Interrupted()
        self._error = weakref.ref(error)
        timer = threading.Timer(LOST_S, self._raise_lost, (signum,))
        timer.daemon = True
        timer.start()
        try:
            raise error
        finally:
            del error  # otherwise this frame, part of its traceback, would hold it

    def _raise_lost(self, signum: int) -> None:
        if not self.over and self._error() is None:
            assert (main := threading.main_thread().ident) is not None
            signal.pthread_kill(main, signum)
