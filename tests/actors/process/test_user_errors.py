"""Whatever functions of users raise costs their rows and names the user's line; the user's own Ctrl-C interrupts."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.factory import build_environment
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.environments.tool_use import ToolUse, build_tools
from headrace.actors.process.user_errors import contained, described
from headrace.actors.process.user_function_timeouts import UserThreads
from headrace.actors.protocols import Prompt, Sample, Score
from headrace.actors.rewards.config import RewardConfig, RewardFunctionConfig
from headrace.actors.rewards.rubric import Rubric, build_reward, build_rubric
from headrace.actors.rollout.results import group_figures
from headrace.dataplane.directory.requests import body_of, reply_error
from headrace.dataplane.directory.samplers import TaskConfig, build_sampler
from headrace.dataplane.errors import SamplerError
from headrace.dataplane.imports import import_object
from headrace.testing import TalkingEngine
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer
from headrace.trainers.losses.policy_objectives import OwnObjective

TOKENIZER = make_chat_tokenizer()
MODULE = """
import asyncio, json, sys
class Stop(BaseException): pass
class Mute(Exception):
    def __str__(self): raise Stop("no text")
def stops(prompt=None, response="", finish_reason="", **options): sys.exit(3)
def odd(prompt, response, finish_reason): raise Stop("time is up")
def reads(prompt, response, finish_reason): return json.loads("{")
def large(prompt, response, finish_reason): return 1e39
def half(prompt, response, finish_reason): raise ValueError("half \\ud83d")
def mute(prompt, response, finish_reason): raise Mute
async def judge(prompt, response, finish_reason): sys.exit(4)
async def cancels(prompt, response, finish_reason): raise asyncio.CancelledError
def group(prompt, responses, finish_reasons): raise Stop("time is up")
class Built:
    def __init__(self): sys.exit(5)
    def __call__(self, prompt, response, finish_reason): return 1.0
    async def play(self, episode): pass
async def exits(episode): sys.exit(6)
async def room(episode): return {}["room"]
async def gives_up(episode): raise asyncio.CancelledError
async def blocks(episode): await episode.run_blocking(stops)
async def answers(episode): episode.answer = 5
async def tool(text): sys.exit(7)
def half_tool(text): return "\\ud83d"
def mute_tool(text): raise Mute
def two(first, second): pass
def loss(inputs): sys.exit(8)
def sampler(**options): raise KeyError("window")
"""


class Voter:
    def __call__(self, *_: Any) -> float:
        return 1.0

    def answer_of(self, response: str) -> Any:
        return [response]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_errors.py").write_text(MODULE)
    (tmp_path / "my_exit.py").write_text("import sys\nsys.exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_errors", raising=False)
    return "my_errors"


def line_of(name: str) -> str:
    number = next(n for n, line in enumerate(MODULE.splitlines(), 1) if f"def {name}(" in line)
    return f"(my_errors.py line {number})"


@pytest.mark.parametrize(
    ("name", "words"),
    [("stops", "SystemExit: 3"), ("odd", "Stop: time is up"), ("reads", "JSONDecodeError: Expecting property name "
      "enclosed in double quotes: line 1 column 2 (char 1)"),
     ("half", "ValueError: half ?"),
     ("mute", "Mute: its text cannot be shown, because its __str__ raised Stop")],
)  # fmt: skip
def test_a_reward_costs_its_row(mine: str, name: str, words: str) -> None:
    rubric = build_rubric(RewardConfig(functions=(RewardFunctionConfig(kind=f"{mine}:{name}"),)))
    score = rubric.score(Prompt("p", "q", "", {}), "r", "stop")
    assert not score.valid and score.error == f"reward {name!r} raised {words} {line_of(name)}"


def test_a_number_that_rows_cannot_hold_costs_its_row(mine: str) -> None:
    rubric = build_rubric(RewardConfig(functions=(RewardFunctionConfig(kind=f"{mine}:large"),)))
    score = rubric.score(Prompt("p", "q", "", {}), "r", "stop")
    assert not score.valid and "'large' returned 1e+39, expected a finite number that float32 can hold" in score.error
    sums = Rubric([("a", lambda *_: 3e38, 1.0), ("b", lambda *_: 3e38, 1.0)])
    score = sums.score(Prompt("p", "q", "", {}), "r", "stop")
    assert not score.valid and "the weighted sum of the rewards is 6e+38" in score.error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"kind": "judge"}, f"raised SystemExit: 4 {line_of('judge')}"),
        ({"kind": "cancels"}, f"raised CancelledError: {line_of('cancels')}"),
        ({"kind": "group", "per": "group"}, f"raised Stop: time is up {line_of('group')}"),
        pytest.param({"kind": "stops", "runs": "process"}, f"SystemExit: 3 {line_of('stops')}",
                     marks=pytest.mark.processes),
    ],
)  # fmt: skip
def test_a_reward_apart_costs_its_rows(mine: str, kind: dict[str, Any], words: str) -> None:
    function = RewardFunctionConfig.model_validate({**kind, "kind": f"{mine}:{kind['kind']}"})
    rubric = build_rubric(RewardConfig(functions=(function,)))
    four = np.zeros(4, np.int32)
    sample = Sample(Prompt("p", "q", "", {}), 0, four, four.astype(np.uint8), four.astype(np.float32), "", "stop", four)

    async def values() -> Any:
        assert rubric.apart is not None
        try:
            return await rubric.apart.values([sample])
        finally:
            await rubric.apart.close()

    [known] = asyncio.run(values())
    assert str(known.values[kind["kind"]]).endswith(words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exits", f"SystemExit: 6 {line_of('exits')}"),
        ("room", f"KeyError: 'room' {line_of('room')}"),
        ("gives_up", f"CancelledError: {line_of('gives_up')}"),
        ("blocks", f"SystemExit: 3 {line_of('stops')}"),
        ("answers", "the environment set the answer to a int, expected text or None"),
    ],
)
def test_an_environment_costs_its_episode(mine: str, name: str, words: str) -> None:
    host = EpisodeHost(build_environment(EnvironmentConfig(kind=f"{mine}:{name}")))
    run = host.run(Prompt("p", "q", "", {}), TalkingEngine(TOKENIZER, "ab"), TOKENIZER, SamplingParams(n=2))
    assert [sample.error for sample in asyncio.run(run)] == [words, words]


def test_a_tool_costs_its_call(mine: str) -> None:
    tools = ToolUse([f"{mine}:tool"])
    assert asyncio.run(tools._answer("tool", "")) == "error: SystemExit: 7"
    tools = ToolUse([f"{mine}:half_tool", f"{mine}:mute_tool"])
    assert asyncio.run(tools._answer("half_tool", "")) == "?"
    assert asyncio.run(tools._answer("mute_tool", "")).startswith("error: its text cannot be shown")
    with pytest.raises(ValueError, match=r"tools: 'my_errors:two' takes \(first, second\), expected a function of one"):
        build_tools([f"{mine}:two"])


def test_what_is_sent_and_stored_is_text(mine: str) -> None:
    reply = reply_error(SamplerError("half \ud83d"))
    with pytest.raises(SamplerError, match=r"half \?"):
        body_of(reply, "claim", 0.0)
    row = np.zeros(1, np.int32)
    made = Sample(Prompt("p", "q", "", {"data_source": "\ud83d"}), 0, row, row, row, "", "stop", row)
    assert group_figures([made], [Score(1.0, {}, True)]).source_rows == {"?": 1}
    votes = Rubric([("a", Voter(), 1.0)], voter="a").score(Prompt("p", "q", "", {}), "r", "stop")
    assert not votes.valid and "the answer_of of 'a' returned a list, expected text or None" in votes.error


def test_what_is_built_or_called_for_all_rows_ends_the_run_with_a_sentence(mine: str) -> None:
    with pytest.raises(ValueError, match=r"reward.functions: 'my_errors:Built' raised SystemExit: 5 \(my_errors.py"):
        build_reward(RewardFunctionConfig(kind=f"{mine}:Built"))
    with pytest.raises(ValueError, match=r"environment.kind: 'my_errors:Built' raised SystemExit: 5 \(my_errors.py"):
        build_environment(EnvironmentConfig(kind=f"{mine}:Built"))
    with pytest.raises(ValueError, match=r"loss.kind: 'my:loss' raised SystemExit: 8 \(my_errors.py line"):
        OwnObjective("my:loss", import_object(f"{mine}:loss", "loss.kind"))(torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its factory raised KeyError: 'window'"):
        build_sampler(TaskConfig("train", f"{mine}:sampler", {}), [f"{mine}:sampler"])
    with pytest.raises(ValueError, match="module 'my_exit' of 'my_exit:f' cannot be imported: SystemExit: 9"):
        import_object("my_exit:f", "reward.functions")
    with pytest.raises(ValueError, match="'gone_module' of .* cannot be .*; the working folder .* were searched"):
        import_object("gone_module:f", "reward.functions")


def test_ctrl_c_interrupts() -> None:
    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Rubric([("a", interrupted, 1.0)]).score(Prompt("p", "q", "", {}), "r", "stop")
    found: list[Exception] = []
    thread = threading.Thread(target=lambda: found.append(contained(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert described(found[0]) == "KeyboardInterrupt:"

    async def cancelled() -> Any:
        threads = UserThreads("rewards", 1)
        task = asyncio.ensure_future(threads.call("f", threading.Event().wait, 30.0))
        await asyncio.sleep(0)
        task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    assert isinstance(asyncio.run(cancelled()), asyncio.CancelledError), "it is passed on"
