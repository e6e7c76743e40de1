"""An environment whose one episode is a whole evaluation by lm-eval, which asks the policy over the run's endpoint.

lm-eval may be installed in another virtual environment: `command` is the path of its program.
"""

import asyncio
import json
import os
import tempfile
from pathlib import Path


class LmEval:
    """Runs lm-eval on its tasks, and returns `exact_match` of the first as the reward of the episode."""

    def __init__(self, tasks, command="lm-eval", include_path=None, limit=None, chat=True, concurrent=16):
        """tasks: names of tasks that generate text; tasks that compare log-probs of given answers need another engine.
        include_path: folder with task files of your own. limit: number of questions of each task; None is all."""
        self._arguments = [command, "run", "--tasks", *tasks, *(["--apply_chat_template"] if chat else [])]
        self._arguments += ["--include_path", include_path] if include_path else []
        self._arguments += ["--limit", str(limit)] if limit else []
        self._task, self._chat, self._concurrent = tasks[0], chat, concurrent

    async def play(self, episode) -> float:
        address, folder = episode.endpoint, tempfile.mkdtemp(prefix="lm-eval-")
        model = "local-chat-completions" if self._chat else "local-completions"
        path = "chat/completions" if self._chat else "completions"
        settings = f"model={address.model},base_url={address.url}/{path},num_concurrent={self._concurrent},"
        settings += "tokenizer_backend=None,tokenized_requests=False"
        command = [*self._arguments, "--model", model, "--model_args", settings, "--output_path", folder]
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, "OPENAI_API_KEY": address.secret},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"lm-eval ended with {process.returncode}: {said.decode(errors='replace')[-2000:]}")
        [file] = Path(folder).rglob("results_*.json")
        results = json.loads(file.read_text())["results"]
        for task, metrics in results.items():
            for metric, value in metrics.items():
                if isinstance(value, (int, float)) and "stderr" not in metric:
                    episode.reward(value, name=f"{task}/{metric.partition(',')[0]}")
        return next(value for name, value in results[self._task].items() if name.startswith("exact_match,"))
