"""Describes the errors of users' functions, and keeps errors such as `SystemExit` from ending the process.

Some libraries end a call with an error that is not an `Exception`, as math-verify does at its time limit. In an event
loop, `SystemExit` would end the loop with all its tasks.
"""

from __future__ import annotations

import asyncio
import os
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_ROOT = Path(__file__).parents[2]
_OWN = tuple(f"{_ROOT / name}{os.sep}" for name in ("actors", "codecs", "dataplane", "testing", "trainers"))
_LIBRARIES = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")), "<frozen")


class UserCodeStopped(RuntimeError):
    """Stands for an error of a user's function that is not an `Exception`. The message has its type and text."""


def contained(error: BaseException) -> Exception:
    """Return an `Exception` with the same traceback for what a user's function raised. Raises a KeyboardInterrupt in
    the main thread again, because it is the user's Ctrl-C."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    return UserCodeStopped(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def made(target: Callable[..., T], options: Mapping[str, Any], name: str) -> T:
    """Return the object that a user's class or function makes of `options`. Raises ValueError with a sentence about
    `name`, the key and its value, for what it raises; a ValueError of the user's own is passed on."""
    try:
        return target(**options)
    except ValueError:
        raise
    except BaseException as error:  # User code can raise anything, and `SystemExit` would end the actor silently.
        raise ValueError(f"{name} raised {described(contained(error))}") from error


async def awaited(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Await a coroutine function of a user, and raise what it raises as an `Exception`. A cancellation of the calling
    task is passed on."""
    try:
        return await function(*arguments)
    except GeneratorExit:
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise contained(error) from None


def is_users(filename: str) -> bool:
    """Return whether a file has code of the user, as its path in a traceback says."""
    return not filename.startswith((*_OWN, *_LIBRARIES))


def described(error: BaseException) -> str:
    """Return the type, the text and the place of an error in one line. The place is the last line of the user's own
    code, or else of a library, that the error came through."""
    said = " ".join(str(error).split())
    text = said if isinstance(error, UserCodeStopped) else f"{type(error).__name__}: {said}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN)]
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f"{text} ({os.path.basename(users[-1].filename)} line {users[-1].lineno})" if users else text
