"""Runs a blocking function in processes of its own, which are killed when a call takes too long.

call -> a free process, else a new one, else wait -> a line of JSON -> the function -> a line of JSON
                                                      |  no answer in time, or the process has died
                                                      +--> killed; the call is tried again as often as it may
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from .user_process_child import PROMPT

START_S = 60.0
"""Seconds within which a process must have imported the user's function."""
_SCRIPT = Path(__file__).with_name("user_process_child.py")
_LINE_BYTES = 1 << 26


class UserFunctionFailed(RuntimeError):
    """The user's function raised an error in its process, did not return in time, or its process died. The message says
    which."""


class UserProcesses:
    """Calls one function, named by its import path, in at most `num_processes` processes. Must be used from one event
    loop."""

    def __init__(self, target: str, options: Mapping[str, Any], num_processes: int) -> None:
        """target: import path `package.module:name` of a function, or of a class whose instances are called. options:
        keyword arguments of the function or of the class."""
        self._first = {"target": target, "options": dict(options)}
        self._places = asyncio.Semaphore(num_processes)
        self._free: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._name = target.rpartition(":")[2]

    @property
    def num_processes(self) -> int:
        """Number of processes that exist now."""
        return len(self._all)

    async def call(self, arguments: Sequence[Any], timeout_s: float, retries: int = 0, method: str = "__call__") -> Any:
        """Call the function, or another method of the class's instance, and return what it returns. Prompts among the
        arguments arrive as objects with the same attributes; everything else must fit into JSON.

        Raises UserFunctionFailed when the first attempt and `retries` more have failed.
        """
        given = [{PROMPT: asdict(one)} if is_dataclass(one) and not isinstance(one, type) else one for one in arguments]
        line = json.dumps({"method": method, "arguments": given}, default=str).encode() + b"\n"
        async with self._places:
            for attempt in range(retries + 1):
                try:
                    return await self._attempt(line, timeout_s)
                except UserFunctionFailed:
                    if attempt == retries:
                        raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End all processes. Idempotent."""
        for process in list(self._all):
            await self._kill(process)
        self._free.clear()

    async def _attempt(self, line: bytes, timeout_s: float) -> Any:
        process = self._free.pop() if self._free else await self._start()
        try:
            said = await self._ask(process, line, timeout_s)
        except BaseException as error:  # also when this call is cancelled: the process still works on it
            await self._kill(process)
            if isinstance(error, TimeoutError):
                raise UserFunctionFailed(f"{self._name!r} did not return within {timeout_s:g} s") from None
            if isinstance(error, (ConnectionError, ValueError)):
                raise UserFunctionFailed(f"the process of {self._name!r} died: {error}") from None
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
            raise ConnectionError("it closed its output")
        return json.loads(answer)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(_SCRIPT), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )  # fmt: skip
        self._all.add(process)
        path = [folder or os.getcwd() for folder in (*sys.path, "")]
        first = json.dumps({**self._first, "path": path, "parent": os.getpid()})
        try:
            said = await self._ask(process, first.encode() + b"\n", START_S)
        except BaseException as error:
            await self._kill(process)
            if isinstance(error, (TimeoutError, ConnectionError, ValueError)):
                raise UserFunctionFailed(f"the process of {self._name!r} did not start: {error}") from None
            raise
        if "failed" in said:
            await self._kill(process)
            raise UserFunctionFailed(f"{self._name!r} cannot be loaded in a process of its own: {said['failed']}")
        return process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
