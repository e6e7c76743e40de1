"""The `verifiers` environment plays episodes of an environment of the library verifiers in a separate process.

    play -> a line of JSON -> child process: verifiers, its harness -> HTTP -> the run's endpoint -> the policy
                                             rewards <- a line of JSON <-

The child may use another Python than the run (`options.python`), so that the pinned versions of the two cannot
conflict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..failures import LimitExceeded
from .child_process import ChildProcess, ReplacedChild, check_installed, checked_python, import_folders
from .episode import Episode

TASK = "task"
"""Name of the prompt's field that holds the task number; see `data.train=environment`."""
_SCRIPT = Path(__file__).with_name("verifiers_child.py")


class VerifiersEnvironment:
    """Plays tasks of a verifiers environment by number. One child process plays all episodes of a rollout actor."""

    def __init__(self, env: Mapping[str, Any], python: str | None = None, path: Sequence[str] = ()) -> None:
        """Set the environment up. env: verifiers' configuration of the environment, such as `{taskset: {id:
        my-taskset}, agent: {runtime: {type: subprocess}}}`. python: path of a Python interpreter with verifiers; None
        uses the run's interpreter. path: folders that are put in front of the child's import path.

        Raises ValueError if `env` names no taskset, or if `python` or `path` does not fit.
        """
        taskset = env.get("taskset") if isinstance(env, Mapping) else None
        if not isinstance(taskset, Mapping) or not taskset.get("id"):
            raise ValueError(
                f"environment.options.env: got {env!r}, expected verifiers' configuration of an environment with "
                "taskset.id"
            )
        own, folders, first = checked_python(python), import_folders(path), {"env": dict(env)}
        if python is None:
            check_installed("verifiers", "verifiers", folders)
        self._child = ReplacedChild(lambda: ChildProcess.start("verifiers", _SCRIPT, first, own, folders))

    async def play(self, episode: Episode) -> float | None:
        """Play one task. The episode gets the environment's rewards, by name, and their weighted sum. Raises
        RuntimeError if verifiers reports that the episode failed, LimitExceeded if one of its own time limits was
        exceeded, and SandboxFailed if the child process died."""
        number = episode.prompt.fields.get(TASK)
        if not isinstance(number, int):
            raise ValueError(f"prompt {episode.prompt.uid!r} has no task number, expected data.train=environment")
        with episode.clock.stopped():  # The start has its own time limit and must not count against the episode.
            child = await self._child.get()
        address = episode.endpoint
        said = await child.call({TASK: number, "url": address.url, "secret": address.secret, "model": address.model})
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
        await self._child.close()
