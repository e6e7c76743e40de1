"""Runs functions that users wrote (tools and rewards) in threads of their own, with a time limit for each call.

Python cannot end a thread. A call that exceeds its time limit is given up: its thread runs on until the function
returns, if it ever does, but no longer counts against the limit of concurrent calls. When too many such calls hang, the
next call raises TooManyHang.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_HUNG = 16
"""Number of hanging calls (timed out or cancelled, but still running) at which new calls are refused. Each hanging call
may use CPU time of this process."""


class TooManyHang(RuntimeError):
    """Raised instead of starting a call of a user's function when too many earlier calls hang. A call hangs if it still
    runs after it timed out or was cancelled. The message names the function that was not started, and the time
    limit."""


class UserThreads:
    """Runs each call in a daemon thread of its own, and limits the number of concurrent calls. Must be used from a
    single event loop."""

    def __init__(self, what: str, num_threads: int) -> None:
        """what: kind of the functions in the plural, such as `tools`, for error messages. num_threads: largest number
        of calls that run at the same time, not counting calls that hang (timed out or cancelled, but still running)."""
        self._what = what
        self._places = asyncio.Semaphore(num_threads)
        self._lock = threading.Lock()
        self._num_hung = 0

    @property
    def num_hung(self) -> int:
        """Number of calls that hang: they timed out or were cancelled, but their functions are still running."""
        return self._num_hung

    async def call(
        self, name: str, function: Callable[[], T], timeout_s: float, since: Callable[[], float] | None = None
    ) -> T:
        """Run `function` in a thread and return what it returns, or raise what it raises.

        name: name of the function in error messages. since: function that returns the `time.monotonic()` value at which
        the current time limit began; it lets work that consists of several pieces have `timeout_s` for each piece. With
        None the limit counts from the start of the call. Raises TimeoutError if the time limit is exceeded, and
        TooManyHang if too many earlier calls still hang.
        """
        async with self._places:
            if self._num_hung >= MAX_HUNG:
                raise TooManyHang(
                    f"{self._what}: {self._num_hung} calls hang, each for longer than its bound of {timeout_s:g} s, "
                    f"and keep a thread each; the next was to be {name}: give the function a time limit of its own"
                )
            loop, started = asyncio.get_running_loop(), time.monotonic()
            result: asyncio.Future[T] = loop.create_future()
            call = _Call(function, loop, result, self._returned)
            threading.Thread(target=call.run, name=f"headrace-{self._what}", daemon=True).start()
            try:
                while not result.done():
                    left_s = (started if since is None else max(started, since())) + timeout_s - time.monotonic()
                    if left_s <= 0.0:
                        raise TimeoutError(f"{name} did not return within {timeout_s:g} s")
                    await asyncio.wait({result}, timeout=left_s)
                return result.result()
            finally:
                if not result.done():  # given up, or cancelled
                    result.cancel()
                    with self._lock:
                        self._num_hung += call.give_up()

    def _returned(self) -> None:
        with self._lock:
            self._num_hung -= 1


class _Call(Generic[T]):
    """One call of a user's function, in its own thread."""

    def __init__(
        self,
        function: Callable[[], T],
        loop: asyncio.AbstractEventLoop,
        result: asyncio.Future[T],
        returned: Callable[[], None],
    ) -> None:
        """Watch a call. returned: callback for a function that returns only after its call timed out or was
        cancelled."""
        self._function = function
        self._loop = loop
        self._result = result
        self._returned = returned
        self._lock = threading.Lock()
        self._over = False
        self._given_up = False

    def run(self) -> None:
        settle: Callable[[], None]
        try:
            settle = partial(self._result.set_result, self._function())
        except BaseException as raised:  # the caller raises it
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
            settle = partial(self._result.set_exception, error)
        with self._lock:
            self._over = True
            given_up = self._given_up
        if given_up:
            self._returned()
            return
        try:
            self._loop.call_soon_threadsafe(self._settle, settle)
        except RuntimeError:
            return  # the loop was closed

    def give_up(self) -> bool:
        """Stop waiting for the function. Returns whether it is still running."""
        with self._lock:
            self._given_up = not self._over
            return self._given_up

    def _settle(self, settle: Callable[[], None]) -> None:
        if not self._result.done():
            settle()
