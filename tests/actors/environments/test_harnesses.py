"""Unmodified harnesses play an episode over the endpoint: their tokens are recorded exactly, in one row."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.actors.environments.episode import Episode
from headrace.tests.actors.environments.endpoint_world import TOKENIZER, Recorder, check_rows, played
from headrace.tests.runs.cli_runs import ROOT

EXAMPLE = ROOT / "examples" / "harnesses"
TASK = 3


@pytest.fixture(autouse=True)
def _imports() -> Iterator[None]:
    """Let tests import the modules of the example as a run in its folder does."""
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def with_task(play: Any) -> Any:
    async def played_task(episode: Episode) -> Any:
        episode.prompt = replace(episode.prompt, fields={"task": TASK})
        return await play(episode)

    return played_task


def prompts(engine: Recorder) -> list[str]:
    """Return what the policy read before each of its turns."""
    return [str(TOKENIZER.decode(ids)) for _, ids, _ in engine.seen]


def shown(kind: str, turns: list[tuple[str, str]]) -> list[str]:
    """Return what make_start.py writes for a conversation of the example."""
    start = module("make_start")
    system, declared = {
        "tools": ("Find the price.", [{"type": "function", "function": start.TOOL}]),
        "bash": ("bash", []),
    }[kind]
    return [prompt for prompt, _ in start.texts(TOKENIZER, system, turns, declared)]


@pytest.mark.skipif(importlib.util.find_spec("agents") is None, reason="openai-agents is not installed")
def test_an_agent_of_openai_agents_calls_a_tool_over_responses() -> None:
    agent = module("tool_agent")
    item = agent.item_of(TASK)
    call = f'<tool_call>\n{{"name": "price", "arguments": {{"number": "{item[::-1]}"}}}}\n</tool_call>'
    price = agent.price_of(item)
    engine = Recorder(call, price, version=5)
    [sample] = played(with_task(agent.play), engine)
    assert not sample.error and sample.rewards["reward"] == 1.0 and len(sample.rows) == 1
    check_rows(sample, engine)
    turns = [("user", item), ("assistant", call), ("tool", price), ("assistant", price)]
    assert prompts(engine) == shown("tools", turns), "the supervised start has the same prompts"


MINI = os.environ.get("HEADRACE_MINI_SWE_AGENT", "")


@pytest.mark.processes
@pytest.mark.skipif(not MINI, reason="HEADRACE_MINI_SWE_AGENT does not name a Python with mini-swe-agent")
def test_mini_swe_agent_works_in_a_folder_over_messages() -> None:
    harness = module("mini_swe_agent")
    number = harness.number_of(TASK)
    answers = ("```\ncat n\n```", f"```\nsh submit {number[::-1]}\n```")
    engine = Recorder(*answers, version=5)
    environment = harness.MiniSweAgent(MINI)

    async def play(episode: Episode) -> float:
        try:
            return await with_task(environment.play)(episode)
        finally:
            await environment.close()

    [sample] = played(play, engine)
    assert not sample.error and sample.rewards["reward"] == 1.0 and len(sample.rows) == 1
    check_rows(sample, engine)
    turns = [("user", harness.TASK), ("assistant", answers[0]), ("user", number), ("assistant", answers[1])]
    assert prompts(engine) == shown("bash", turns)


CLAUDE_CODE = os.environ.get("HEADRACE_CLAUDE_CODE", "")


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.processes
@pytest.mark.skipif(not CLAUDE_CODE, reason="HEADRACE_CLAUDE_CODE does not name the command `claude` of Claude Code")
def test_claude_code_writes_a_file_and_runs_a_command(tmp_path: Path) -> None:
    """The engine is scripted. Claude Code sends its own prompts of over 70,000 bytes, and does what the answers say."""
    world = tmp_path / "world"
    world.mkdir()
    writes = tool_call("Write", file_path=str(world / "greeting.txt"), content="hello\n")
    engine = Recorder(writes, tool_call("Bash", command="cp greeting.txt copy.txt"), "Done.", version=5)

    async def play(episode: Episode) -> float:
        settings = {
            "ANTHROPIC_BASE_URL": episode.endpoint.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": episode.endpoint.secret,
            "ANTHROPIC_MODEL": episode.endpoint.model,
            "ANTHROPIC_SMALL_FAST_MODEL": episode.endpoint.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
        }
        process = await asyncio.create_subprocess_exec(
            CLAUDE_CODE, "-p", "Write hello into greeting.txt, and copy it.", "--allowedTools", "Write", "Bash",
            cwd=world, env=settings, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, _ = await asyncio.wait_for(process.communicate(), 120)
        return float(said.decode().strip() == "Done.")

    [sample] = played(play, engine, most=1 << 20)
    assert not sample.error and sample.rewards["reward"] == 1.0
    assert (world / "copy.txt").read_text() == "hello\n"
    check_rows(sample, engine)
    assert len(engine.seen) == 3 and len(sample.rows) == 1, "no request branched"
