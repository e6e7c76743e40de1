"""Plays episodes of a verifiers environment in a separate process. Its Python needs verifiers but not Headrace.

It reads one JSON object per line from its standard input and writes one per line to its standard output:
    in   {"env": {...}}                                              the configuration of the environment, first
    out  {"ready": true} or {"failed": "..."}
    in   {"id": 7, "task": 3, "url": "...", "secret": "...", "model": "..."}    play task 3
    in   {"cancel": 7}
    out  {"id": 7, "rewards": {...}, "reward": 1.0, "error": "", "timeout": false, "text": "..."}
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# This script runs without the package, so it reads the file of the package as a script.
_ERRORS = Path(__file__).parents[1] / "process" / "user_errors.py"
text_of_error = runpy.run_path(str(_ERRORS))["text_of_error"]


class Tasks:
    """The tasks of a taskset by number. An endless taskset is read as far as needed; a finite taskset repeats."""

    def __init__(self, taskset: Any) -> None:
        self._left: Iterator[Any] = iter(taskset.load())
        self._known: list[Any] = []
        self._whole = False

    def __getitem__(self, number: int) -> Any:
        while not self._whole and len(self._known) <= number:
            try:
                self._known.append(next(self._left))
            except StopIteration:
                self._whole = True
        if not self._known:
            raise ValueError("the taskset has no tasks")
        return self._known[number % len(self._known)]


class Player:
    """Plays all requested episodes at the same time."""

    def __init__(self, environment: Any, verifiers: Any) -> None:
        self._environment = environment
        self._verifiers = verifiers
        self._tasks = Tasks(environment.taskset)
        self._running: dict[int, asyncio.Task[None]] = {}

    def take(self, message: dict[str, Any], write: Any) -> None:
        if "cancel" in message:
            task = self._running.get(message["cancel"])
            if task is not None:
                task.cancel()
            return
        number = message["id"]
        task = self._running[number] = asyncio.create_task(self._play(message, write))
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def _play(self, message: dict[str, Any], write: Any) -> None:
        number = message["id"]
        try:
            write({"id": number, **await self._episode(message)})
        except asyncio.CancelledError:
            write({"id": number, "error": "cancelled", "rewards": {}, "reward": None})
        except BaseException as error:  # The environment failed, so this episode fails.
            write({"id": number, "error": text_of_error(error), "rewards": {}, "reward": None})

    async def _episode(self, message: dict[str, Any]) -> dict[str, Any]:
        vf, variable = self._verifiers, f"HEADRACE_EPISODE_{message['id']}"
        # A client reads its key from an environment variable. Each episode has its own variable, so that secrets stay
        # apart.
        os.environ[variable] = message["secret"]
        client = vf.EvalClientConfig(base_url=message["url"], api_key_var=variable)
        context = vf.ModelContext(model=message["model"], client=client)
        try:
            [slot] = self._environment.slots(self._tasks[message["task"]], 1)
            episode = await self._environment.run_slot(slot, context, None)
        finally:
            os.environ.pop(variable, None)
            await self._forget(client)
        return _outcome(episode)

    async def _forget(self, client: Any) -> None:
        """Close the client of an episode. verifiers 0.4 keeps a client per configuration until it ends."""
        server = getattr(self._environment, "_interception", None)
        made = getattr(server, "clients", {}).pop(client.model_dump_json(), None)
        if made is not None:
            with contextlib.suppress(Exception):
                await made.close()


def _outcome(episode: Any) -> dict[str, Any]:
    """Return the outcome of an episode. Rewards of several agents are added up. If an agent ran out of time, the
    outcome is a time-out, although verifiers reports such an episode as ok."""
    rewards: dict[str, float] = {}
    total = 0.0
    for trace in episode.traces:
        total += trace.reward or 0.0
        for name, reward in trace.rewards.items():
            if reward is not None:
                rewards[name] = rewards.get(name, 0.0) + reward.score
    timeout = bool(episode.is_timeout or any(trace.is_timeout for trace in episode.traces))
    failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    errors = [
        f"{getattr(error, 'type', type(error).__name__)}: {getattr(error, 'message', error)}" for error in failures
    ]
    error = "" if episode.ok else "; ".join(errors) or "the episode failed"
    text = episode.traces[-1].last_reply if episode.traces else ""
    return {"rewards": rewards, "reward": total, "error": error, "timeout": timeout, "text": text or ""}


async def serve(reader: asyncio.StreamReader, write: Any) -> None:
    """Build the environment that the first line describes, and play episodes until the input ends."""
    first = json.loads(await reader.readline())
    try:
        library = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        environment = loaders.load_environment(loaders.resolve_env_config(first["env"]))
        player = Player(environment, library)
    except Exception as error:
        write({"failed": text_of_error(error)})
        return
    async with environment.serving():
        write({"ready": True})
        while line := await reader.readline():
            player.take(json.loads(line), write)


async def main() -> None:
    # Output that the environment prints must not mix with the protocol's lines, so it goes to standard error.
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await serve(reader, lambda message: output.write(json.dumps(message) + "\n"))


if __name__ == "__main__":
    asyncio.run(main())
