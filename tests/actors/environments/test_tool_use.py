"""Tests of the tool_use environment and the calculator: calls, masked results, versions and limits."""

from __future__ import annotations

import asyncio
import copy
import os
import string
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.router import Router
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.factory import build_environment
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.environments.tool_use import ToolUse, build_tools, calculator, find_call
from headrace.actors.process.user_function_timeouts import MAX_HUNG, TooManyHang
from headrace.actors.protocols import Prompt, Sample
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver

EOS = 0


@pytest.fixture(scope="module")
def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = {token: index for index, token in enumerate(["<eos>", *string.printable])}
    inner = Tokenizer(BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def hosted(environment: Any) -> EpisodeHost:
    return EpisodeHost(environment)


def actor_of(tokenizer: Any, turns: Sequence[str]) -> Any:
    """A script that says `turns` one by one; {} stands for the last result in what it is given."""

    def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        assert sample == 0, "each turn of each episode is a request of its own"
        given = tokenizer.decode(prompt_ids)
        turn = int(request_id.rpartition("/")[2])
        assert given.count("<result>") == turn
        said = turns[turn].replace("{}", given.rpartition("<result>")[2].partition("</result>")[0])
        return [*tokenizer(said)["input_ids"], EOS]

    return script


def play(
    environment: Any, tokenizer: Any, turns: Sequence[str], *, n: int = 1, max_new_tokens: int = 200
) -> list[Sample]:
    engine = ScriptedEngine(actor_of(tokenizer, turns), tokenizer=tokenizer, version=3)
    prompt = Prompt("p", "what is 12*3?", "36", {})
    return asyncio.run(environment.run(prompt, engine, tokenizer, SamplingParams(n=n, max_new_tokens=max_new_tokens)))


def test_an_episode_with_two_calls(ascii_tokenizer: Any) -> None:
    turns = ["first <tool>calculator: 12*3</tool>", "then <tool>calculator: {}+1</tool>", "it is {}"]
    environment = hosted(build_environment(EnvironmentConfig(kind="tool_use")))
    samples = play(environment, ascii_tokenizer, turns, n=3)
    assert [sample.index for sample in samples] == [0, 1, 2]
    pieces = [
        ("what is 12*3?", 0),
        ("first <tool>calculator: 12*3</tool>", 1),
        ("<result>36</result>", 0),
        ("then <tool>calculator: 36+1</tool>", 1),
        ("<result>37</result>", 0),
        ("it is 37", 1),
    ]
    ids = [token for text, _ in pieces for token in ascii_tokenizer(text)["input_ids"]] + [EOS]
    mask = [chosen for text, chosen in pieces for _ in text] + [1]
    for sample in samples:
        assert sample.input_ids.tolist() == ids and sample.response_mask.tolist() == mask
        assert sample.versions.tolist() == [3 if chosen else -1 for chosen in mask] and sample.version == 3
        assert sample.logprobs.tolist() == [-1.0 * chosen for chosen in mask]
        assert (sample.text, sample.finish_reason) == ("it is 37", "stop")
        assert (sample.input_ids.dtype, sample.response_mask.dtype) == (np.int32, np.uint8)
        assert (sample.logprobs.dtype, sample.versions.dtype) == (np.float32, np.int32)


def test_a_call_between_special_tokens_is_found(ascii_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(ascii_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "</tool>"]})
    turns = ["so <tool>calculator: 1+1</tool>", "it is {}"]
    (sample,) = play(hosted(ToolUse({"calculator": calculator}, 2)), tokenizer, turns)
    assert (sample.text, sample.turns[0].text) == ("it is 2", "so calculator: 1+1")


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("<tool>calculator: 1/0</tool>", "error: division by zero"),
        ("<tool>calculator: open('x')</tool>", "error: \"open('x')\" is not made of numbers"),
        ("<tool>search: cats</tool>", "error: there is no tool search, expected calculator"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(ascii_tokenizer: Any, call: str, result: str) -> None:
    (sample,) = play(hosted(ToolUse({"calculator": calculator}, 2)), ascii_tokenizer, [call, "so: {}"])
    assert sample.text.startswith(f"so: {result}") and sample.finish_reason == "stop"


def test_turns_and_tokens_are_bounded(ascii_tokenizer: Any) -> None:
    call = "<tool>calculator: 1+1</tool>"
    (sample,) = play(hosted(ToolUse({"calculator": calculator}, 3)), ascii_tokenizer, [call] * 3)
    assert (sample.finish_reason, sample.text) == ("length", call)
    response = ascii_tokenizer.decode(sample.input_ids[13:])
    assert response.count(call) == 3 and response.count("<result>2</result>") == 2
    for most in range(1, 90):
        (sample,) = play(
            hosted(ToolUse({"calculator": calculator}, 3)), ascii_tokenizer, [call, call, "2"], max_new_tokens=most
        )
        assert len(sample.input_ids) - 13 <= most and sample.response_mask[-1] == 1, "it ends with the policy's words"
        assert sample.finish_reason == "length"


def test_a_slow_tool_holds_up_nobody_and_is_given_up(ascii_tokenizer: Any) -> None:
    def slow(arguments: str) -> str:
        time.sleep(0.3)
        return "done"

    environment = hosted(ToolUse({"slow": slow}, 2))
    started = time.monotonic()
    samples = play(environment, ascii_tokenizer, ["<tool>slow: x</tool>", "{}"], n=4)
    assert [sample.text for sample in samples] == ["done"] * 4 and time.monotonic() - started < 1.1
    environment = hosted(ToolUse({"slow": slow}, 2, timeout_s=0.05))
    (sample,) = play(environment, ascii_tokenizer, ["<tool>slow: x</tool>", "{}"])
    assert sample.text == "error: tool 'slow' did not return within 0.05 s"


def test_hung_tools_hold_up_neither_weights_nor_the_journal_until_too_many_hang(
    ascii_tokenizer: Any, tmp_path: Path
) -> None:
    release, publisher = threading.Event(), Publisher(tmp_path)

    def hang(arguments: str) -> str:
        release.wait()
        return "late"

    async def main() -> None:
        script = actor_of(ascii_tokenizer, ["<tool>hang: x</tool>", "{}"])
        engine = ScriptedEngine(script, tokenizer=ascii_tokenizer, receiver=receiver())
        environment, prompt = hosted(ToolUse({"hang": hang}, 2, timeout_s=0.1)), Prompt("p", "q", "", {})

        async def episodes(count: int) -> list[Sample]:
            params = SamplingParams(n=count, max_new_tokens=200)
            return await environment.run(prompt, engine, ascii_tokenizer, params)

        samples = await episodes(MAX_HUNG)  # more than the event loop's own threads, on a small machine
        assert {sample.text for sample in samples} == {"error: tool 'hang' did not return within 0.1 s"}
        async with asyncio.timeout(20):
            await engine.prepare_weights(publisher.publish(1, {"w": torch.ones(3)}))
            await engine.commit_weights(1)
            await asyncio.to_thread(int)  # as the journal does it
        assert engine.version == 1
        with pytest.raises(TooManyHang, match="tools: 16 calls hang.*tool 'hang'.*its own time limit"):
            await episodes(1)
        release.set()
        while environment.environment._threads._num_hung:
            await asyncio.sleep(0.005)
        [sample] = await episodes(1)
        assert sample.text == "late"

    try:
        asyncio.run(main())
    finally:
        release.set()
        publisher.close()


def test_an_async_tool_is_awaited(ascii_tokenizer: Any) -> None:
    async def search(arguments: str) -> str:
        await asyncio.sleep(0)
        return f"found {arguments}"

    async def stuck(arguments: str) -> str:
        await asyncio.Event().wait()
        return ""

    environment = hosted(ToolUse({"search": search, "stuck": stuck}, 3, timeout_s=1.0))
    (sample,) = play(environment, ascii_tokenizer, ["<tool>search: 42</tool>", "<tool>stuck: 1</tool>", "{}"])
    assert "<result>found 42</result>" in ascii_tokenizer.decode(sample.input_ids)
    assert sample.text == "error: tool 'stuck' did not return within 1 s"


@pytest.mark.processes
def test_tools_in_processes_are_killed_when_they_take_too_long(
    ascii_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brought_tools.py").write_text(
        "import os, time\n"
        "def pid(text): return f'{text} {os.getpid()}'\n"
        "def hang(text): print(os.getpid(), file=open(text, 'w')); time.sleep(3600)\n"
        "def once(text):\n"
        "    if not os.path.exists(text): open(text, 'w').close(); os._exit(1)\n"
        "    return 'again'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tools = ["calculator", *(f"brought_tools:{name}" for name in ("pid", "hang", "once"))]
    options = {"tools": tools, "runs": "process", "timeout_s": 2.0, "retries": 1, "max_turns": 5}
    environment = build_environment(EnvironmentConfig(kind="tool_use", options=options))
    turns = [
        f"<tool>{call}</tool>"
        for call in ("calculator: 6*7", "pid: of", f"hang: {tmp_path}/pid", f"once: {tmp_path}/seen")
    ]

    async def main() -> Sample:
        engine = ScriptedEngine(actor_of(ascii_tokenizer, [*turns, "end"]), tokenizer=ascii_tokenizer)
        params, host = SamplingParams(n=1, max_new_tokens=2000), hosted(environment)
        [sample] = await host.run(Prompt("p", "q", "", {}), engine, ascii_tokenizer, params)
        await host.close()
        return sample

    results = ascii_tokenizer.decode(asyncio.run(main()).input_ids).split("<result>")[1:]
    first, second, third, fourth = (result.partition("</result>")[0] for result in results)
    assert (first, third, fourth) == ("42", "error: 'hang' did not return within 2 s", "again")
    for pid in (int(second.removeprefix("of ")), int((tmp_path / "pid").read_text())):
        assert pid != os.getpid() and not Path(f"/proc/{pid}").exists()


def test_a_turn_that_the_engine_refuses_fails_its_episode_alone(ascii_tokenizer: Any) -> None:
    script = actor_of(ascii_tokenizer, ["<tool>calculator: 2</tool>", "{}"])

    class Refusing(ScriptedEngine):
        async def generate(self, request_id: str, prompt_ids: Any, params: Any) -> Any:
            if request_id == "p.1/1":
                raise ValueError("request 'p.1/1': 300 tokens of prompt and 200 more exceed the context of 256")
            return await super().generate(request_id, prompt_ids, params)

    async def main() -> list[Sample]:
        engine = Refusing(script, tokenizer=ascii_tokenizer)
        environment, params = hosted(ToolUse({"calculator": calculator}, 2)), SamplingParams(n=3, max_new_tokens=200)
        return await environment.run(Prompt("p", "q", "", {}), engine, ascii_tokenizer, params)

    good, bad, other = asyncio.run(main())
    assert (good.text, other.text, good.error, other.error) == ("2", "2", "", "")
    assert bad.finish_reason == "error" and "exceed the context" in bad.error and len(bad.input_ids) > 1


def test_calls_are_found_at_the_end_only() -> None:
    assert find_call("<tool>a: 1</tool> and <tool>b: 2 </tool>\n") == ("b", "2")
    assert find_call("<tool>a: <tool>b: 2</tool>") == ("b", "2")
    assert find_call("<tool>a: 1</tool> so") is None
    assert find_call("a: 1</tool>") is None
    assert find_call("<tool>1+1</tool>") is None


@pytest.mark.long
def test_turns_of_an_episode_stay_with_their_engine_and_versions_move_on(ascii_tokenizer: Any, tmp_path: Path) -> None:
    async def main() -> None:
        publisher = Publisher(tmp_path)
        turns = ["<tool>calculator: 2+2</tool>", "{}"]
        engines = [
            ScriptedEngine(
                actor_of(ascii_tokenizer, turns), tokenizer=ascii_tokenizer, latency_s=0.5, receiver=receiver()
            )
            for _ in range(2)
        ]
        router = Router(timeout_s=5.0)
        for index, engine in enumerate(engines):
            router.add(f"e{index}", engine)
        update = publisher.publish(1, {"w": torch.ones(1)})
        await asyncio.gather(*(engine.prepare_weights(update) for engine in engines))
        params = SamplingParams(n=4, max_new_tokens=100)
        playing = asyncio.create_task(
            hosted(build_environment(EnvironmentConfig(kind="tool_use"))).run(
                Prompt("p", "2+2?", "4", {}), router, ascii_tokenizer, params
            )
        )
        while not any(request.endswith("/1") for engine in engines for request in engine._requests):
            await asyncio.sleep(0.001)
        reports = await asyncio.gather(*(engine.commit_weights(1, "keep") for engine in engines))
        samples = await playing
        assert sum(report.kept for report in reports) >= 1 and router.version == 1
        assert [engine.stats.rows for engine in engines] == [4, 4]
        for sample in samples:
            chosen = sample.versions[sample.response_mask == 1]
            assert sample.text == "4" and sample.version == 0 and chosen[-1] == 1 and (np.diff(chosen) >= 0).all()
        await router.close()
        publisher.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_real_model_plays(model_folder: str, tokenizer: Any) -> None:
    async def main() -> list[Sample]:
        engine = HfEngine(model_folder)
        environment = hosted(build_environment(EnvironmentConfig(kind="tool_use")))
        samples = await environment.run(Prompt("p", "12+3=", "15", {}), engine, tokenizer, SamplingParams(n=4, seed=1))
        await engine.close()
        return samples

    samples = asyncio.run(main())
    assert len({tuple(sample.input_ids) for sample in samples}) > 1, "samples share their random numbers"
    assert all(len(sample.input_ids) <= 5 + 16 for sample in samples)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*3", "36"),
        (" (1 + 2) ** 3 / 4 ", "6.75"),
        ("-7 // 2 % 5", "1"),
        ("0.1+0.2", "0.3"),
        ("2**100", str(2**100)),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "1+", "a", "'a'*3", "True", "f(1)", "[1]", "(-1)**0.5", "1" * 201, "1 if 1 else 2"]
)
def test_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError):
        calculator(expression)


def test_calculator_refuses_numbers_that_never_end() -> None:
    started = time.monotonic()
    for expression in ("9**9**9", "2**5000", "10**1000*10**1000", "9.0**9999"):
        with pytest.raises(OverflowError):
            calculator(expression)
    assert time.monotonic() - started < 1


def test_tools_by_name_and_by_path() -> None:
    tools = build_tools(["calculator", "textwrap:dedent"])
    assert tools["calculator"] is calculator and tools["dedent"]("  a") == "a"
    with pytest.raises(ValueError, match="got 'serch', expected one of calculator or an import path"):
        build_tools(["serch"])
    with pytest.raises(ValueError, match="'calculator' is given twice"):
        build_tools(["calculator", "calculator"])
    wrong = {"max_turns": 0, "timeout_s": 0, "runs": "fork", "retries": 2}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"environment.options.{name}: got {value!r}.*expected"):
            ToolUse({}, **{name: value})
