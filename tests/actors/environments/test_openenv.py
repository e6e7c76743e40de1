"""Episodes of OpenEnv: the protocol, places on servers that take one session, actions, and the death of a server. A
small fake stands for the library's server; the real one is served where it is installed."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("renderers")

from headrace.actors.environments import openenv
from headrace.actors.environments.openenv import OpenEnv
from headrace.tests.actors.environments.endpoint_world import Recorder
from headrace.tests.actors.environments.test_games import Saying, played, read

pytestmark = pytest.mark.processes

# uvicorn with WebSockets is not among what the tests need, and aiohttp is.
UVICORN = """
import asyncio
from aiohttp import web


class Config:
    def __init__(self, app, log_level):
        self.app = app


class Server:
    started = False

    def __init__(self, config):
        self.config = config

    async def serve(self, sockets):
        runner = web.AppRunner(self.config.app)
        await runner.setup()
        await web.SockSite(runner, sockets[0]).start()
        self.started = True
        await asyncio.Event().wait()
"""
APP = """
import asyncio, json, os
from aiohttp import web

open_sessions = 0
ACTION = {"required": ["guess"], "properties": {"guess": {"type": "integer"}, "metadata": {}}}


async def schema(request):
    return web.json_response({"action": ACTION, "observation": {}, "state": {}})


def said(text, reward, done=False):
    observation = {"prompt": text, "pid": os.getpid()}
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


async def session(request):
    global open_sessions
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    if open_sessions >= 1:
        await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
        await socket.close()
        return socket
    open_sessions += 1
    try:
        async for message in socket:
            message = json.loads(message.data)
            if message["type"] == "close":
                break
            await socket.send_json(await answer(message))
    finally:
        open_sessions -= 1
        await socket.close()
    return socket


async def answer(message):
    data = message["data"]
    if message["type"] == "reset":
        return said(f"seed {data['seed']} {data.get('level', '')}", None)
    guess = data["guess"]
    if guess == "die":
        os._exit(7)
    if guess == "hang":
        await asyncio.sleep(3600)
    if guess == "bad":
        return {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
    if guess != "end" and not guess.isdigit():
        errors = [{"loc": ["guess"], "msg": "not an integer"}]
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}}
    return said("more", 0.25, done=guess == "end")


app = web.Application()
app.add_routes([web.get("/schema", schema), web.get("/ws", session)])
"""


@pytest.fixture
def path(tmp_path: Path) -> list[str]:
    """A folder with an application of the same protocol, and what serves it."""
    (tmp_path / "uvicorn.py").write_text(UVICORN)
    (tmp_path / "game.py").write_text(APP)
    return [str(tmp_path)]


def test_episodes_wait_for_places_and_get_the_sum_of_their_rewards(path: list[str]) -> None:
    environment = OpenEnv(app="game:app", path=path, reset={"level": "hard"}, max_servers=2)
    samples = played(environment, Recorder("12", "x", "end"), [7], n=5)
    assert [sample.error for sample in samples] == [""] * 5
    assert {sample.rewards["reward"] for sample in samples} == {0.5}
    text = read(samples[0])
    assert "seed 7 hard" in text and "error: guess: not an integer" in text and "pid" not in text
    assert {sample.finish_reason for sample in samples} == {"stop"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("bad", "RuntimeError: the OpenEnv environment raised EXECUTION_ERROR: it broke"),
        ("hang", "TimeoutError: the environment took longer than environment.turn_timeout_s=2 s"),
        ("die", "SandboxFailed: the OpenEnv server"),
    ],
)
def test_an_episode_that_fails_fails_alone(
    path: list[str], said: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv, "CLOSE_S", 0.5)
    environment = OpenEnv(app="game:app", path=path, max_servers=1)
    first, *others = played(environment, Saying(said), [0, 1, 2], turn_timeout_s=2.0 if said == "hang" else 60.0)
    assert words in first.error and [other.error for other in others] == ["", ""]


def test_what_the_policy_reads_and_writes_is_configured(path: list[str]) -> None:
    settings: dict[str, Any] = {"app": "game:app", "path": path, "max_turns": 2, "turn_tokens": 2}
    [sample] = played(OpenEnv(observation="pid", action={"guess": "{text}"}, **settings), Recorder("123"), [1])
    assert "seed" not in read(sample) and sample.rewards == {"reward": 0.5} and sample.finish_reason == "stop"
    assert [turn.text for turn in sample.turns] == ["12", "12"]
    [sample] = played(OpenEnv(observation="board", **settings), Recorder("1"), [1])
    assert "environment.options.observation: got 'board', expected one of ['pid', 'prompt']" in sample.error
    [sample] = played(OpenEnv(**{**settings, "sessions": 2, "max_servers": 1}), Recorder("1"), [1], n=1)
    assert not sample.error and sample.rewards == {"reward": 0.5}
    samples = played(OpenEnv(**{**settings, "sessions": 2, "max_servers": 1}), Recorder("1"), [1], n=2)
    assert any("environment.options.sessions: the server takes fewer sessions: full" in one.error for one in samples)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    [sample] = played(OpenEnv(server=url), Recorder("1"), [1])
    assert f"SandboxFailed: the OpenEnv server at {url} is gone" in sample.error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "environment.options: got server=None and app=None, expected the URL"),
        ({"server": "localhost:8000"}, "environment.options.server: got 'localhost:8000', expected a URL"),
        ({"app": "echo_env"}, "environment.options.app: got 'echo_env', expected a path like"),
        ({"app": "a:b", "reset": 3}, "environment.options.reset: got 3, expected a section of keys and values"),
        ({"app": "a:b", "action": 3}, "environment.options.action: got 3, expected the name of a field, or a section"),
        ({"app": "a:b", "observation": 3}, "environment.options.observation: got 3, expected the name of a field"),
        ({"app": "a:b", "sessions": 0}, "environment.options.sessions: got 0, expected a whole number >= 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OpenEnv(**options)


@pytest.mark.slow
def test_the_environment_that_openenv_writes_is_served(tmp_path: Path) -> None:
    python = os.environ.get("HEADRACE_GAMES_PYTHON")
    if not python:
        pytest.skip("needs a Python with openenv: make test-all")
    subprocess.run([str(Path(python).with_name("openenv")), "init", "echo_env"], cwd=tmp_path, check=True)
    environment = OpenEnv(
        app="echo_env.server.app:app", path=[str(tmp_path)], python=python, max_turns=2, max_servers=1
    )
    samples = played(environment, Recorder("hello", "h"), [3], n=2)
    assert [sample.rewards for sample in samples] == [{"reward": pytest.approx(0.6)}] * 2, samples[0].error
    assert '"echoed_message": "hello"' in read(samples[0])
