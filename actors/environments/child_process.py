"""Runs a library of environments in a process of its own, which answers each JSON line with another.

    {"id": 7, ...} -> script under a keeper, in its own Python -> {"id": 7, ...}
    `ChildProcess.start` sends the first line, which says what the process hosts, and waits until it is ready
    `ReplacedChild` starts the process when it is first needed, and again after its death

The Python may be another than that of the run, so that the pinned versions of the two cannot conflict. The process and
all that it has started end with the process that started it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..failures import SandboxFailed
from ..process.process_keeper import end_kept, kept_command

START_S = 600.0
"""Time limit in seconds for loading the environment in the child process."""
MAX_STARTS = 10
"""Number of times in a row that the child process is started without an answer before the environment raises an
error."""
_LINE_BYTES = 1 << 24


def checked_python(python: str | None) -> str:
    """Return the path of the Python interpreter that `environment.options.python` names; None is the run's. Raises
    ValueError if it is not executable."""
    path = os.path.expanduser(python) if isinstance(python, str) else python
    if path is not None and not (isinstance(path, str) and os.access(path, os.X_OK)):
        raise ValueError(f"environment.options.python: got {python!r}, expected the path of a Python interpreter")
    return path or sys.executable


def import_folders(path: Sequence[str]) -> list[str]:
    """Return the folders that are put in front of a child's import path: those of `path`, and the working folder.
    Raises ValueError if `environment.options.path` is no list of folders."""
    if isinstance(path, str) or not isinstance(path, Sequence) or not all(isinstance(one, str) for one in path):
        raise ValueError(f"environment.options.path: got {path!r}, expected a list of folders, such as [{path or '.'}]")
    folders = [os.path.abspath(os.path.expanduser(folder)) for folder in (*path, ".")]
    for given, folder in zip(path, folders, strict=False):
        if not os.path.isdir(folder):
            raise ValueError(f"environment.options.path: got {given!r}, expected a folder (there is none at {folder})")
    return folders


def check_installed(library: str, extra: str, folders: Sequence[str]) -> None:
    """Raise ValueError unless the run's own Python can import a library. folders: those it is looked for in first."""
    found = (PathFinder.find_spec(library, list(folders)), find_spec(library))
    # A folder of the same name, such as that of an example, is no library.
    if not any(spec is not None and spec.origin is not None for spec in found):
        raise ValueError(
            f"environment.options.python: unset, and the run's Python has no {library}; expected a Python that has it, "
            f"or pip install 'headrace[{extra}]'"
        )


def checked_section(name: str, value: Any) -> dict[str, Any]:
    """Return `environment.options.NAME`, a section of keys and values, as a dict; None is an empty one. Raises
    ValueError for other values."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"environment.options.{name}: got {value!r}, expected a section of keys and values")
    return dict(value or {})


class ChildProcess:
    """A process that runs a script and answers calls."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        """name: name of the library, for error messages."""
        self._name = name
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._last_words: deque[str] = deque(maxlen=20)
        self._tasks = [asyncio.create_task(self._read_errors())]
        self._killed = False
        self.said: dict[str, Any] = {}
        """The line with which the process said that it is ready."""
        self.answered = False
        """True once the process has answered a call, or done its work in another way."""
        self.num_answers = 0
        """Number of calls that the process has answered."""

    @staticmethod
    async def start(
        name: str, script: Path, first: Mapping[str, Any], python: str, path: Sequence[str] = ()
    ) -> ChildProcess:
        """Start the process and wait until it has loaded the environment. Raises RuntimeError if it cannot be loaded.

        first: line that describes the environment. python: its interpreter. path: folders to import from.
        """
        inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        # The import paths of this process are for its own Python. Another Python gets only the user's folders.
        paths = [*path, *(inherited if python == sys.executable else ())]
        # With a fixed seed of hashes, a game that walks through a set is the same game again after a death.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
        process = await asyncio.create_subprocess_exec(
            *kept_command(python, "-P", str(script)), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=_LINE_BYTES, env=env,
        )  # fmt: skip
        child = ChildProcess(name, process)
        try:
            await child._send(first)
            assert process.stdout is not None
            try:
                async with asyncio.timeout(START_S):
                    line = await process.stdout.readline()
            except TimeoutError:
                raise RuntimeError(f"{name} has not loaded the environment within {START_S:g} s") from None
            child.said = json.loads(line) if line else {"failed": f"it ended: {await child.last_words()}"}
            if "failed" in child.said:
                raise RuntimeError(f"environment.options: {name} cannot load {dict(first)}: {child.said['failed']}")
        except BaseException:
            await child.close()
            raise
        child._tasks.append(asyncio.create_task(child._read_answers()))
        return child

    @property
    def died(self) -> bool:
        """True if the process has ended or was killed."""
        return self._killed or self._process.returncode is not None

    @property
    def words(self) -> str:
        """Last lines that the process wrote to its standard error."""
        return " | ".join(self._last_words)[-1000:] or "it said nothing"

    async def last_words(self) -> str:
        """Return `words` of a process that has ended, once its standard error has been read."""
        await asyncio.wait({self._tasks[0]}, timeout=1.0)
        return self.words

    async def call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message, and return the answer of the process. Raises SandboxFailed if the process dies."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, **message})
            return await answer
        except asyncio.CancelledError:
            with suppress(SandboxFailed):
                await self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    async def ended(self, within_s: float) -> bool:
        """Wait until the process has ended, and return whether it has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.wait()
        return self.died

    def kill(self) -> None:
        """Kill the process and all that it has started, without waiting. Its calls raise SandboxFailed."""
        self._killed = True
        with suppress(ProcessLookupError):
            self._process.terminate()

    async def close(self) -> None:
        """End the process by closing its input, or after three seconds together with all that it has started.
        Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(3.0):
                await self._process.wait()
        except TimeoutError:
            await end_kept(self._process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise SandboxFailed(f"the {self._name} process has ended: {await self.last_words()}") from error

    async def _read_answers(self) -> None:
        assert self._process.stdout is not None
        try:
            # A process that was killed may leave a line without its end.
            while (line := await self._process.stdout.readline()).endswith(b"\n"):
                message = json.loads(line)
                self.answered = True
                self.num_answers += 1
                answer = self._waiting.get(message.get("id"))
                if answer is not None and not answer.done():
                    answer.set_result(message)
            await self._process.wait()
        except ValueError as error:  # The line is too long, or no JSON. Those who wait must not wait forever.
            self._last_words.append(f"its answer cannot be read: {error}")
            self.kill()
        words = await self.last_words()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxFailed(f"the {self._name} process has ended: {words}"))

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # A line longer than the reader's limit is left out.
                continue
            if not line:
                return
            self._last_words.append(line.decode(errors="replace").strip()[:500])


class ReplacedChild:
    """A child process that is started when it is first needed, and replaced after its death."""

    def __init__(self, start: Callable[[], Awaitable[ChildProcess]]) -> None:
        """start: coroutine function that starts the process."""
        self._start = start
        self._child: ChildProcess | None = None
        self._starting = asyncio.Lock()
        self._starts = 0
        self._why = ""

    async def get(self) -> ChildProcess:
        """Return the process. Raises RuntimeError if it cannot be loaded, and SandboxFailed after MAX_STARTS starts
        in a row without an answer."""
        async with self._starting:
            if self._child is None or self._child.died:
                if self._child is not None:
                    self._starts = 0 if self._child.answered else self._starts
                    self._why = await self._child.last_words()
                    await self.close()
                if self._starts >= MAX_STARTS:
                    raise SandboxFailed(
                        f"the process of the environment was started {self._starts} times in vain: {self._why}"
                    )
                self._starts += 1
                try:
                    self._child = await self._start()
                except RuntimeError as error:
                    self._why = str(error)
                    raise
            return self._child

    async def close(self) -> None:
        """End the process. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()
