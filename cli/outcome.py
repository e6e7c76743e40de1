"""Defines the exit codes of the command, reports what failed, and ends it when it is told to stop."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

DONE, FAILED, MISTAKE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
ONE_STOP_S = 2.0
"""Seconds within which several signals to stop are taken for one."""


def mistake(sentences: Sequence[str]) -> int:
    """Print what a user did wrong, a sentence a line. Returns the exit code."""
    for sentence in sentences:
        print(f"headrace: {sentence}", file=sys.stderr)
    return MISTAKE


def failure(error: Exception) -> int:
    """Print a panel that says what failed, and below it where the traceback was saved, on a line of its own so that the
    path can be copied. Print the traceback itself if it was not saved in a run folder."""
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
    """Make SIGTERM raise an exception in the main thread, as Ctrl-C does, so that the run ends its processes and
    removes its files."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    raise Terminated


def stop_at_once() -> None:
    """Make SIGINT and SIGTERM raise an exception in the main thread, whatever it does.

    Python alone lets asyncio.run wait for the next `await` at a SIGINT, which an engine that starts does not reach for
    minutes. Signals within ONE_STOP_S of the first are taken for the same one, as `timeout` sends its signal to the
    process and to its group, and the second would end the cleaning up.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    last = -math.inf

    def stop(signum: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > ONE_STOP_S:
            last = now
            raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
