"""The `verifiers` environment plays episodes of an environment of the library verifiers in a separate process.

    play -> a line of JSON -> child process: verifiers, its harness -> HTTP -> the run's endpoint -> the policy
                                             rewards <- a line of JSON <-

The child may use another Python than the run (`options.python`), so that the pinned versions of the two cannot
conflict.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..failures import LimitExceeded, SandboxFailed
from ..process.process_keeper import end_kept, kept_command
from .episode import Episode

TASK = "task"
"""Name of the prompt's field that holds the task number; see `data.train=environment`."""
START_S = 600.0
"""Time limit in seconds for loading the environment in the child process."""
MAX_STARTS = 10
"""Number of times in a row that the child process is started, without an episode that it plays to its end, before the
environment raises an error."""
_SCRIPT = Path(__file__).with_name("verifiers_child.py")
_LINE_BYTES = 1 << 24


class VerifiersEnvironment:
    """Plays tasks of a verifiers environment by number. One child process plays all episodes of a rollout actor."""

    def __init__(self, env: Mapping[str, Any], python: str | None = None, path: Sequence[str] = ()) -> None:
        """Set the environment up. env: verifiers' configuration of the environment, such as `{taskset: {id:
        my-taskset}, agent: {runtime: {type: subprocess}}}`. python: path of a Python interpreter with verifiers; None
        uses the run's interpreter. path: folders that are put in front of the child's import path.

        Raises ValueError if `env` names no taskset or `python` is not executable.
        """
        taskset = env.get("taskset") if isinstance(env, Mapping) else None
        if not isinstance(taskset, Mapping) or not taskset.get("id"):
            raise ValueError(
                f"environment.options.env: got {env!r}, expected verifiers' configuration of an environment with "
                "taskset.id"
            )
        if python is not None and not os.access(os.path.expanduser(python), os.X_OK):
            raise ValueError(f"environment.options.python: got {python!r}, expected the path of a Python interpreter")
        self._env = dict(env)
        self._python = os.path.expanduser(python) if python else sys.executable
        self._path = [os.path.abspath(os.path.expanduser(folder)) for folder in (*path, ".")]
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._starts = 0

    async def play(self, episode: Episode) -> float | None:
        """Play one task. The episode gets the environment's rewards, by name, and their weighted sum. Raises
        RuntimeError if verifiers reports that the episode failed, LimitExceeded if one of its own time limits was
        exceeded, and SandboxFailed if the child process died."""
        number = episode.prompt.fields.get(TASK)
        if not isinstance(number, int):
            raise ValueError(f"prompt {episode.prompt.uid!r} has no task number, expected data.train=environment")
        with episode.clock.stopped():  # The start has its own time limit and must not count against the episode.
            child = await self._started()
        address = episode.endpoint
        said = await child.play({TASK: number, "url": address.url, "secret": address.secret, "model": address.model})
        self._starts = 0
        for name, value in said["rewards"].items():
            episode.reward(value, name)
        if said["error"]:
            raise RuntimeError(said["error"])
        if said["timeout"]:
            raise LimitExceeded("a time limit of the verifiers environment was exceeded")
        episode.answer = said["text"]
        return said["reward"]

    async def close(self) -> None:
        """End the child process. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _started(self) -> _Child:
        async with self._starting:
            if self._child is None or self._child.died:
                if self._child is not None:
                    await self._child.close()
                if self._starts >= MAX_STARTS:
                    assert self._child is not None
                    raise SandboxFailed(
                        f"the verifiers process ended {self._starts} times in a row; {self._child.words}"
                    )
                self._starts += 1
                self._child = await _Child.start(self._python, self._path, self._env)
            return self._child


class _Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._last_words: deque[str] = deque(maxlen=20)
        self._tasks = [asyncio.create_task(self._read_errors())]

    @staticmethod
    async def start(python: str, path: Sequence[str], env: Mapping[str, Any]) -> _Child:
        """Start the process and wait until it has loaded the environment. Raises RuntimeError if it cannot be
        loaded."""
        inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        # The import paths of this process are for its own Python. Another Python gets only the user's folders.
        paths = [*path, *(inherited if python == sys.executable else ())]
        process = await asyncio.create_subprocess_exec(
            *kept_command(python, "-P", str(_SCRIPT)), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=_LINE_BYTES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        child = _Child(process)
        try:
            await child._send({"env": dict(env)})
            assert process.stdout is not None
            try:
                async with asyncio.timeout(START_S):
                    line = await process.stdout.readline()
            except TimeoutError:
                raise RuntimeError(f"verifiers has not loaded the environment within {START_S:g} s") from None
            first = json.loads(line) if line else {"failed": f"it ended: {child.words}"}
            if "failed" in first:
                raise RuntimeError(f"the verifiers environment cannot be loaded: {first['failed']}")
        except BaseException:
            await child.close()
            raise
        child._tasks.append(asyncio.create_task(child._read_answers()))
        return child

    @property
    def died(self) -> bool:
        """True if the process has ended."""
        return self._process.returncode is not None

    @property
    def words(self) -> str:
        """Last lines that the process wrote to its standard error."""
        return " | ".join(self._last_words)[-1000:] or "it said nothing"

    async def play(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let the process play an episode, and return its report on the episode. Raises SandboxFailed if the process
        dies."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, **message})
            return await answer
        except asyncio.CancelledError:
            with suppress(RuntimeError):
                await self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

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
            raise SandboxFailed(f"the verifiers process has ended: {self.words}") from error

    async def _read_answers(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            answer = self._waiting.get(message.get("id"))
            if answer is not None and not answer.done():
                answer.set_result(message)
        await self._process.wait()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxFailed(f"the verifiers process has ended: {self.words}"))

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with suppress(ValueError):  # A line longer than the reader's limit raises ValueError.
            while line := await self._process.stderr.readline():
                self._last_words.append(line.decode(errors="replace").strip()[:500])
