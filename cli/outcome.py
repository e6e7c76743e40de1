"""Defines the exit codes of the command, reports failures, and ends the command on a signal."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

DONE, FAILED, MISTAKE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 0, 1, 2, 130, 141, 143
ONE_STOP_S = 2.0
"""Seconds within which several signals to stop count as one."""
LOST_S = 1.0
"""Seconds after which an exception of a signal is raised a second time if the program lost it."""


def mistake(sentences: Sequence[str]) -> int:
    """Print the user's mistakes, one sentence per line. Returns the exit code."""
    for sentence in sentences:
        print(f"headrace: {sentence}", file=sys.stderr)
    return MISTAKE


def failure(error: Exception) -> int:
    """Print a panel with the error, and below it the path of the saved traceback. The path has its own line, so that it
    can be copied. If the traceback was not saved in a run folder, it is printed. Returns the exit code."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    notes = getattr(error, "__notes__", [])
    if not notes:
        traceback.print_exception(error)
    console = Console(stderr=True)
    text = Text(f"{type(error).__name__}: {error}")
    console.print(Panel(text, title="headrace failed", title_align="left", border_style="red"))
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    return FAILED


def output_is_closed() -> bool:
    """Return whether the program that reads this process's output has ended, as `head` does. The rest of the output is
    then dropped without a word."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # The output of a notebook has no file descriptor.
        return False
    watched = select.poll()
    watched.register(output, 0)  # An error of the pipe is always reported.
    if not watched.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


class Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM, the signal that schedulers and containers send to end a process."""


def stop_on_sigterm() -> None:
    """Let SIGTERM raise an exception in the main thread, as Ctrl-C does. The run then ends its processes and removes
    its files."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    raise Terminated


class Interrupted(KeyboardInterrupt):
    """Raised at a SIGINT within `stop_at_once`. Unlike KeyboardInterrupt itself, it supports weak references."""


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Context manager in whose body SIGINT and SIGTERM raise an exception in the main thread at once.

    Without it, asyncio.run reacts to a SIGINT only at the next `await`. A starting engine can take minutes to reach
    one.
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

    The command `timeout` sends its signal both to the process and to its group. A second signal within ONE_STOP_S is
    therefore ignored, because it would interrupt the cleanup. If the exception is no longer referenced while the body
    still runs, the program has lost it, and it is raised a second time. For example, `zmq_socket_ctx` of vLLM 0.26 to
    0.32 swallows a KeyboardInterrupt while an engine starts.
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
            del error  # Otherwise this frame would keep the exception alive, because its traceback contains the frame.

    def _raise_lost(self, signum: int) -> None:
        if not self.over and self._error() is None:
            assert (main := threading.main_thread().ident) is not None
            signal.pthread_kill(main, signum)
