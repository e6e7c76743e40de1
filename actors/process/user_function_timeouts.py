"""Runs functions that users wrote (tools, rewards, environments) in threads or processes of their own, in bounded time.

`UserThreads` cannot end a call that exceeds its time limit, because Python cannot end a thread. Such a call is
abandoned: its thread keeps running until the function returns, if it ever does, but the call no longer counts toward
the limit of concurrent calls. When too many such calls hang, the next call raises TooManyHang.

`UserProcesses` ends a process whose call takes too long, with all that it has started.

    call -> a free process, else a new one, else wait -> a line of JSON -> the function -> a line of JSON
                                                          |  no answer in time, or the process has died
                                                          +--> ended; the call is tried again as often as it may
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...dataplane.imports import shipped_objects
from .process_keeper import end_kept, kept_command
from .user_errors import contained
from .user_process_child import PROMPT

START_S = 60.0
"""Time limit in seconds for importing the user's function in a process."""
_SCRIPT = Path(__file__).with_name("user_process_child.py")
_LINE_BYTES = 1 << 26
T = TypeVar("T")
MAX_HUNG = 16
"""Number of hanging calls (timed out or cancelled, but still running) at which new calls are refused. Each hanging call
may use CPU time of this process."""


class UserFunctionFailed(RuntimeError):
    """Raised when the user's function raised an error in its process, did not return in time, or its process died. The
    message says which of these happened."""


class UserProcessDied(UserFunctionFailed):
    """Raised when the process of the user's function died, or did not start in time."""


class UserProcesses:
    """Calls one function, named by its import path, in at most `num_processes` processes. Must be used from one event
    loop."""

    def __init__(self, target: str, options: Mapping[str, Any], num_processes: int) -> None:
        """target: import path `package.module:name`, or path of a shipped object. It names a function, or a class whose
        instances are called. options: keyword arguments of the function or of the class."""
        self._first: dict[str, Any] = {"target": target, "options": dict(options)}
        self._places = asyncio.Semaphore(num_processes)
        self._free: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._name = target.rpartition(":")[2]

    async def call(self, arguments: Sequence[Any], timeout_s: float, retries: int = 0, method: str = "__call__") -> Any:
        """Call the function, or another method of the class's instance, and return what it returns. Prompts among the
        arguments arrive as objects with the same attributes; everything else must fit into JSON.

        Raises UserFunctionFailed when the first attempt and `retries` more have failed.
        """
        given = [
            {PROMPT: plain_prompt(one)} if is_dataclass(one) and not isinstance(one, type) else one for one in arguments
        ]
        line = json.dumps({"method": method, "arguments": given}, default=str).encode() + b"\n"
        async with self._places:
            for attempt in range(retries + 1):
                try:
                    return await self._attempt(line, timeout_s)
                except UserFunctionFailed:
                    if attempt == retries:
                        raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def close(self) -> None:
        """End all processes, and what they have started. Idempotent."""
        for process in list(self._all):
            await self._kill(process)
        self._free.clear()

    async def _attempt(self, line: bytes, timeout_s: float) -> Any:
        process = self._free.pop() if self._free else await self._start()
        try:
            said = await self._ask(process, line, timeout_s)
        except BaseException as error:  # Without this, a cancelled call would leave the process running.
            await self._kill(process)
            if isinstance(error, TimeoutError):
                raise UserFunctionFailed(f"{self._name!r} did not return within {timeout_s:g} s") from None
            if isinstance(error, (ConnectionError, ValueError)):
                raise UserProcessDied(f"the process of {self._name!r} died: {error}") from None
            raise
        self._free.append(process)
        if "error" in said:
            raise UserFunctionFailed(said["error"])
        return said["value"]

    async def _ask(self, process: asyncio.subprocess.Process, line: bytes, timeout_s: float) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        async with asyncio.timeout(timeout_s):
            process.stdin.write(line)
            await process.stdin.drain()
            answer = await process.stdout.readline()
        if not answer:
            raise ConnectionError("its output was closed")
        return json.loads(answer)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *kept_command(sys.executable, "-P", str(_SCRIPT)), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, limit=_LINE_BYTES,
        )  # fmt: skip
        self._all.add(process)
        path = [folder or os.getcwd() for folder in (*sys.path, "")]
        shipped = {at: base64.b64encode(data).decode() for at, data in shipped_objects([self._first["target"]]).items()}
        first = json.dumps({**self._first, "path": path, "shipped": shipped})
        try:
            said = await self._ask(process, first.encode() + b"\n", START_S)
        except BaseException as error:
            await self._kill(process)
            if isinstance(error, (TimeoutError, ConnectionError, ValueError)):
                why = f" within {START_S:g} s" if isinstance(error, TimeoutError) else f": {error}"
                raise UserProcessDied(f"the process of {self._name!r} did not start{why}") from None
            raise
        if "failed" in said:
            await self._kill(process)
            raise UserFunctionFailed(f"{self._name!r} cannot be loaded in a separate process: {said['failed']}")
        return process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        await end_kept(process)


class TooManyHang(RuntimeError):
    """Raised instead of starting a call of a user's function when too many earlier calls hang. A call hangs if it still
    runs after it timed out or was cancelled. The message names the function that was not started, and the time
    limit."""


class UserThreads:
    """Runs each call in its own daemon thread, and limits the number of concurrent calls. Must be used from a
    single event loop."""

    def __init__(self, what: str, num_threads: int) -> None:
        """what: kind of the functions in the plural, such as `tools`, for error messages. num_threads: largest number
        of calls that run at the same time, not counting calls that hang (timed out or cancelled, but still running)."""
        self._what = what
        self._places = asyncio.Semaphore(num_threads)
        self._lock = threading.Lock()
        self._num_hung = 0

    async def call(
        self, name: str, function: Callable[[], T], timeout_s: float, since: Callable[[], float] | None = None
    ) -> T:
        """Run `function` in a thread and return what it returns, or raise what it raises.

        name: name of the function in error messages. since: function that returns the `time.monotonic()` value at which
        the current time limit began; with it, work in several pieces can have `timeout_s` seconds per piece. With None
        the limit counts from the start of the call. Raises TimeoutError if the time limit is exceeded, and TooManyHang
        if too many earlier calls still hang.
        """
        async with self._places:
            if self._num_hung >= MAX_HUNG:
                raise TooManyHang(
                    f"{self._what}: {self._num_hung} calls hang, each for longer than its limit of {timeout_s:g} s, "
                    f"and each keeps a thread; {name} was not started; give the function its own time limit"
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
                if not result.done():  # The call has timed out or was cancelled.
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
        except BaseException as raised:  # The caller raises this error.
            settle = partial(self._result.set_exception, contained(raised))
        with self._lock:
            self._over = True
            given_up = self._given_up
        if given_up:
            self._returned()
            return
        try:
            self._loop.call_soon_threadsafe(self._settle, settle)
        except RuntimeError:
            return  # The event loop was closed.

    def give_up(self) -> bool:
        """Stop waiting for the function. Returns whether it is still running."""
        with self._lock:
            self._given_up = not self._over
            return self._given_up

    def _settle(self, settle: Callable[[], None]) -> None:
        if not self._result.done():
            settle()


def plain_prompt(prompt: Any) -> dict[str, Any]:
    """Return the fields of a prompt without its pictures, because JSON has no bytes."""
    return asdict(replace(prompt, pictures=(), prepared=()) if getattr(prompt, "pictures", ()) else prompt)
