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
    return UserCodeStopped(text_of_error(error)).with_traceback(error.__traceback__)


def counted(count: int, noun: str) -> str:
    """Return a number of things in words for a message, such as `1 picture`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def text_of_error(error: BaseException) -> str:
    """Return the type and the text of an error in one line, as text that can be stored and sent."""
    return f"{type(error).__name__}: {' '.join(said_by(error).split())}"


def said_by(error: BaseException) -> str:
    """Return the text of an error, as text that can be stored and sent."""
    try:
        return storable(str(error))
    except BaseException as second:  # The method `__str__` of a user's error can raise anything.
        return f"its text cannot be shown, because its __str__ raised {type(second).__name__}"


def storable(text: str) -> str:
    """Return a text with a question mark for each half of a surrogate pair, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


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
    text = " ".join(said_by(error).split()) if isinstance(error, UserCodeStopped) else text_of_error(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN)]
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return storable(f"{text} ({os.path.basename(users[-1].filename)} line {users[-1].lineno})") if users else text
