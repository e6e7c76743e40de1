"""An environment of Harbor's tasks: an agent solves a task in a container, and calls the policy over the endpoint.

episode -> harbor run -> container of the task, agent -> HTTP -> the run's endpoint -> the policy
           result.json: rewards of the task's verifier

Written for harbor 0.26.0, whose command line takes these arguments; no task was run, because that needs Docker.
"""

import asyncio
import json
import os
import tempfile
from pathlib import Path


class HarborTasks:
    """Plays the tasks in a folder by number, each as a job of its own."""

    def __init__(self, tasks, agent="terminus-2", harbor="harbor", arguments=()):
        """tasks: folder of task folders. agent: Harbor's name of the agent. harbor: path of its command, which can have
        a Python of its own. arguments: further arguments of `harbor run`, such as `--env`."""
        self._tasks = sorted(path.parent for path in Path(tasks).expanduser().glob("*/task.toml"))
        if not self._tasks:
            raise ValueError(f"environment.options.tasks: got {tasks!r}, expected a folder of folders with a task.toml")
        self._agent, self._harbor, self._arguments = agent, os.path.expanduser(harbor), list(arguments)

    async def play(self, episode):
        task = self._tasks[episode.prompt.fields["task"] % len(self._tasks)]
        with tempfile.TemporaryDirectory() as folder:
            words = await self._run(task, episode.endpoint, folder)
            results = [json.loads(path.read_text()) for path in Path(folder, "job").glob("*/result.json")]
        if len(results) != 1 or not results[0]["reward_valid"]:
            failure = (results[0].get("exception_info") or {}) if results else {}
            raise RuntimeError(f"Harbor: {failure.get('exception_type', '')} {failure.get('exception_message', words)}")
        rewards = results[0]["verifier_result"]["rewards"]
        for name, value in rewards.items():
            episode.reward(value, name)
        return rewards.get("reward", sum(rewards.values()))

    async def _run(self, task, endpoint, folder):
        """Run Harbor and return the end of what it said. If the episode is cancelled, Harbor removes its container."""
        process = await asyncio.create_subprocess_exec(
            self._harbor, "run", "--path", str(task), "--agent", self._agent, "--model", f"openai/{endpoint.model}",
            "--base-url", endpoint.url, "--jobs-dir", folder, "--job-name", "job", "--n-attempts", "1", "--quiet",
            "--yes", *self._arguments, env={**os.environ, "OPENAI_API_KEY": endpoint.secret},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = await process.communicate()
            return said.decode(errors="replace").strip()[-500:]
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
