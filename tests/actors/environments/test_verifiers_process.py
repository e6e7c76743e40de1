"""The process of a verifiers environment: its episodes, errors, time limits and death. A small fake stands for the
library; the real one plays the example where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("renderers")

import headrace
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.verifiers_process import VerifiersEnvironment
from headrace.actors.protocols import Prompt, Sample
from headrace.tests.actors.environments.endpoint_world import TOKENIZER, Recorder, World

pytestmark = pytest.mark.processes

FAKE = """
import asyncio, contextlib, json, os, urllib.request
from types import SimpleNamespace as Some


class EvalClientConfig:
    def __init__(self, base_url, api_key_var):
        self.base_url, self.api_key_var = base_url, api_key_var

    def model_dump_json(self):
        return self.api_key_var


class ModelContext:
    def __init__(self, model, client):
        self.model, self.client = model, client


class Env:
    def __init__(self, config):
        self.config = config
        self.taskset = Some(load=lambda: iter(range(config["taskset"].get("size", 3))))

    @contextlib.asynccontextmanager
    async def serving(self):
        print("noise on the standard output")
        yield

    def slots(self, task, n):
        return [task] * n

    async def run_slot(self, task, context, semaphore):
        said = await asyncio.to_thread(ask, context, task)
        if said == "die":
            os._exit(7)
        if said == "hang":
            await asyncio.sleep(3600)
        trace = Some(
            reward=0.5, rewards={"found": Some(score=1.0), "none": None}, is_timeout=said == "late", last_reply=said,
            errors=[],
        )
        errors = [Some(type="EnvError", message="it was bad")]
        return Some(traces=[trace], ok=said != "bad", is_timeout=False, errors=errors)


def ask(context, task):
    body = {"model": context.model, "messages": [{"role": "user", "content": f"task {task}"}]}
    request = urllib.request.Request(
        context.client.base_url + "/chat/completions", json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ[context.client.api_key_var]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def resolve_env_config(data):
    if data["taskset"]["id"] == "missing":
        raise ModuleNotFoundError("no taskset 'missing'")
    return data


load_environment = Env
"""


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """A folder with a package `verifiers` of the few names that the process uses."""
    package = tmp_path / "verifiers"
    (package / "v1" / "utils").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "v1" / "__init__.py").write_text(FAKE)
    (package / "v1" / "utils" / "__init__.py").touch()
    (package / "v1" / "utils" / "loaders.py").write_text(
        "from verifiers.v1 import load_environment, resolve_env_config"
    )
    return str(tmp_path)


def episodes(environment: VerifiersEnvironment, engine: Recorder, tasks: list[int], **config: Any) -> list[Sample]:
    async def main() -> list[Sample]:
        world = World(environment.play, engine, config=EnvironmentConfig(**config))
        params = SamplingParams(n=1, max_new_tokens=500)
        try:
            found = []
            for task in tasks:
                prompt = Prompt(f"p{task}", str(task), "", {"task": task})
                found += await world.host.run(prompt, engine, TOKENIZER, params)
            return found
        finally:
            await environment.close()
            await world.host.close()

    return asyncio.run(main())


def test_a_task_is_played_over_the_endpoint_and_its_rewards_come_back(fake: str) -> None:
    environment = VerifiersEnvironment({"taskset": {"id": "t"}}, path=[fake])
    engine = Recorder("fine", version=5)
    samples = episodes(environment, engine, [1, 4])
    for sample in samples:
        assert not sample.error, sample.error
        assert sample.rewards == {"found": 1.0, "reward": 0.5} and (sample.text, len(sample.turns)) == ("fine", 1)
    assert all("task 1" in TOKENIZER.decode(prompt) for _, prompt, _ in engine.seen), "task 4 of 3 is task 1"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("bad", "RuntimeError: EnvError: it was bad"),
        ("late", "LimitExceeded: a time limit of the verifiers environment was exceeded"),
        ("hang", "TimeoutError: the environment took longer than environment.turn_timeout_s=3 s"),
        ("die", "SandboxFailed: the verifiers process has ended"),
    ],
)
def test_an_episode_that_fails_over_there_fails_here_and_the_next_is_played(fake: str, said: str, words: str) -> None:
    environment = VerifiersEnvironment({"taskset": {"id": "t"}}, path=[fake])

    class Once(Recorder):
        def _say(self, request_id: str, prompt_ids: Any, sample: int) -> list[int]:
            self._texts = (said,) if request_id.startswith("p0") else ("fine",)
            return super()._say(request_id, prompt_ids, sample)

    first, second = episodes(environment, Once(version=5), [0, 1], turn_timeout_s=3.0 if said == "hang" else 60.0)
    assert words in first.error and not second.error, (first.error, second.error)


def test_what_cannot_be_loaded_is_said(fake: str) -> None:
    [sample] = episodes(VerifiersEnvironment({"taskset": {"id": "missing"}}, path=[fake]), Recorder("x"), [0])
    assert "verifiers cannot load {'env': {'taskset': {'id': 'missing'}}}: ModuleNotFoundError: no ta" in sample.error
    with pytest.raises(ValueError, match="expected verifiers' configuration of an environment with taskset.id"):
        VerifiersEnvironment({})
    with pytest.raises(ValueError, match="environment.options.python: got '/no/python'"):
        VerifiersEnvironment({"taskset": {"id": "t"}}, python="/no/python")


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="needs the extra verifiers")
def test_the_example_is_played_by_verifiers_itself() -> None:
    folder = Path(headrace.__file__).resolve().parent / "examples" / "verifiers"
    env = {"taskset": {"id": "digits-v1"}, "interception": {"type": "server"}}
    engine = Recorder("a1", "b2", "345", version=5)
    [sample] = episodes(VerifiersEnvironment(env, path=[str(folder)]), engine, [7])
    assert not sample.error and len(sample.turns) == 3 and len(sample.rows) == 1
    assert sample.rewards["reward"] == pytest.approx(5 / 7)
    assert [prompt + answer for _, prompt, answer in engine.seen][-1] == sample.input_ids.tolist()
