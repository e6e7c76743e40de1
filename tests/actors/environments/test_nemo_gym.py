"""Tasks of NeMo-Gym over the requests of its resources servers. The product needs Python 3.13.14 and is not run here.

The server below follows nemo-gym 0.7.0: `/seed_session`, tools and `/verify` of the module
`nemo_gym.base_resources_server`, the cookie of `nemo_gym.server_utils`, and the counter of the resources server
`example_session_state_mgmt`. The response is read by openai's own types, of which NeMo-Gym's are subclasses.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

pytest.importorskip("openai")
pytest.importorskip("renderers")

from openai.types.responses import Response
from openai.types.responses.response_input_item import FunctionCallOutput

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.factory import build_environment
from headrace.actors.protocols import Prompt, Sample
from headrace.tests.actors.environments.endpoint_world import TOKENIZER, Recorder, World

EXAMPLE = Path(__file__).parents[3] / "examples" / "nemo-gym"
TOOL = {
    "type": "function",
    "name": "increment_counter",
    "description": "",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "strict": True,
}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 1 then add 2"}], "tools": [TOOL]},
    "expected_count": 6,
    "initial_count": 3,
}


def call(count: Any) -> str:
    said = json.dumps({"name": "increment_counter", "arguments": {"count": count}})
    return f"<tool_call>\n{said}\n</tool_call>"


class Counter:
    """The resources server: a counter for each session, which a cookie names."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.app = web.Application()
        self.app.add_routes([web.post("/{name}", self.answer)])

    async def answer(self, request: web.Request) -> web.Response:
        body, name = await request.json(), request.match_info["name"]
        session = request.cookies.get("session") or f"s{len(self.counters)}"
        if name == "seed_session":
            self.counters[session] = body["initial_count"]
            given: dict[str, Any] = {}
        elif name == "increment_counter":
            if not isinstance(body.get("count"), int):
                return web.json_response({"detail": "count: Input should be a valid integer"}, status=422)
            self.counters[session] += body["count"]
            given = {"success": True}
        elif name == "verify":
            self.verified.append(body)
            reward = float(body["expected_count"] == self.counters[session])
            given = {**body, "reward": reward, "mask_sample": False, **self.answers}
        else:
            return web.json_response({"detail": "Not Found"}, status=404)
        answer = web.json_response(given)
        answer.set_cookie("session", session)
        return answer


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests import the environment of examples/nemo-gym."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


def tasks(**options: Any) -> Any:
    """Return the environment of the example."""
    return build_environment(EnvironmentConfig(kind="nemo_gym_tasks:NemoGym", options=options))


def played(server: Counter, data: Path, *texts: str, n: int = 1, **options: Any) -> list[Sample]:
    async def main() -> list[Sample]:
        runner = web.AppRunner(server.app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        environment = tasks(server=f"http://127.0.0.1:{runner.addresses[0][1]}", data=str(data), **options)
        engine = Recorder(*texts, version=5)
        world = World(environment.play, engine, config=EnvironmentConfig(retries=0))
        try:
            prompt = Prompt("p0", "", "", {"task": 1})
            return await world.host.run(prompt, engine, TOKENIZER, SamplingParams(n=n, max_new_tokens=2000))
        finally:
            await world.host.close()
            await runner.cleanup()

    return asyncio.run(main())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "example.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    return path


def test_the_policy_calls_tools_and_the_verifier_scores_the_whole_response(data: Path) -> None:
    server = Counter()
    samples = played(server, data, call(1), call("x"), call(2), "done", n=2)
    for sample, body in zip(samples, server.verified, strict=True):
        assert not sample.error and sample.rewards == {"reward": 1.0}, sample.error
        assert {name: body[name] for name in ROW} == ROW, "the verifier reads the row again"
        items = body["response"]["output"]
        outputs = [item for item in items if item["type"] == "function_call_output"]
        Response.model_validate({**body["response"], "output": [item for item in items if item not in outputs]})
        assert [FunctionCallOutput.model_validate(one).output for one in outputs][0] == '{"success": true}'
        assert "valid integer" in outputs[1]["output"], "the policy reads a tool's error"
        assert [item["type"] for item in items] == ["function_call", "function_call_output"] * 3 + ["message"]
    assert sorted(server.counters.values()) == [6, 6], "each episode has a session of its own"


def test_a_sample_that_the_server_masks_fails_and_parts_of_rewards_are_named(data: Path) -> None:
    server = Counter()
    server.answers = {"mask_sample": True, "failure_kind": "sandbox", "failure_reason": "it was lost"}
    [sample] = played(server, data, "done")
    assert "NeMo-Gym masked the sample: sandbox it was lost" in sample.error
    server = Counter()
    server.answers = {"reward_components": {"right": 0.0, "short": 1.0}}
    [sample] = played(server, data, call(1), max_turns=1)
    assert sample.rewards == {"right": 0.0, "short": 1.0, "reward": 0.0} and sample.finish_reason == "length"
    [sample] = played(Counter(), data, '<tool_call>\n{"name": "no_tool", "arguments": {}}\n</tool_call>', "done")
    assert not sample.error and "Not Found" in TOKENIZER.decode(sample.input_ids.tolist())


def test_what_cannot_be_reached_or_read_is_named(data: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

    async def main() -> Sample:
        environment = tasks(server=url, data=str(data))
        engine = Recorder("x", version=5)
        world = World(environment.play, engine, config=EnvironmentConfig(retries=0))
        [sample] = await world.host.run(
            Prompt("p0", "", "", {"task": 0}), engine, TOKENIZER, SamplingParams(n=1, max_new_tokens=9)
        )
        await world.host.close()
        return sample

    assert f"ConnectionError: the NeMo-Gym server at {url}" in asyncio.run(main()).error
    with pytest.raises(ValueError, match="environment.options.data: got '/none.jsonl', which cannot be read"):
        tasks(server="http://x", data="/none.jsonl")
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="expected rows with responses_create_params.input, NeMo-Gym's format"):
        tasks(server="http://x", data=str(tmp_path / "wrong.jsonl"))
    with pytest.raises(ValueError, match="environment.options.server: got 'x', expected a URL"):
        tasks(server="x", data=str(data))
