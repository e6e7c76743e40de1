"""The scripted engine: what was written, when it was asked for, with partial output at an abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
import torch

from headrace.actors.engines.factory import EngineConfig, build_engine
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine, random_tokens


def countdown(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
    return list(range(10 + sample, 0, -1))


def test_follows_the_script_and_cuts_at_max_new_tokens() -> None:
    engine = ScriptedEngine(countdown, version=4)
    first, second = asyncio.run(engine.generate("a", [1], SamplingParams(n=2, max_new_tokens=10)))
    assert first.token_ids.tolist() == list(range(10, 0, -1)) and first.finish_reason == "stop"
    assert second.token_ids.tolist() == list(range(11, 1, -1)) and second.finish_reason == "length"
    assert first.version == 4 and (first.logprobs == -1.0).all()
    assert (engine.stats.rows, engine.stats.tokens) == (2, 20)


def test_random_tokens_are_the_same_every_time() -> None:
    script = random_tokens(50, seed=3)
    assert script("a", [1], 0) == script("a", [2], 0) != script("a", [1], 1)


def test_abort_returns_the_share_that_had_time_to_flow() -> None:
    async def run() -> None:
        engine = ScriptedEngine(countdown, latency_s=10.0)
        task = asyncio.create_task(engine.generate("a", [1], SamplingParams(n=3)))
        other = asyncio.create_task(engine.generate("b", [1], SamplingParams()))
        await asyncio.sleep(0.02)
        with pytest.raises(ValueError, match="already in flight"):
            await engine.generate("a", [1], SamplingParams())
        await engine.abort("a")
        partial = await task
        assert [c.finish_reason for c in partial] == ["abort"] * 3
        assert all(len(c.token_ids) < 10 for c in partial)
        assert not other.done()
        await engine.close()
        assert (await other)[0].finish_reason == "abort"
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate("c", [1], SamplingParams())

    asyncio.run(run())


def test_latencies_are_seeded_and_run_side_by_side() -> None:
    async def order(seed: int) -> list[str]:
        engine = ScriptedEngine(countdown, latency_s=0.02, latency_sigma=1.0, seed=seed)
        finished: list[str] = []

        async def one(name: str) -> None:
            await engine.generate(name, [1], SamplingParams())
            finished.append(name)

        await asyncio.gather(*(one(f"r{index}") for index in range(5)))
        return finished

    assert asyncio.run(order(1)) == asyncio.run(order(1))


def test_pause_waits_for_what_runs_and_holds_what_comes() -> None:
    async def run() -> None:
        engine = ScriptedEngine(countdown, latency_s=0.05)
        running = asyncio.create_task(engine.generate("a", [1], SamplingParams()))
        await asyncio.sleep(0)
        await engine.pause()
        assert running.done() or engine.stats.rows == 1
        held = asyncio.create_task(engine.generate("b", [1], SamplingParams()))
        await asyncio.sleep(0.1)
        assert not held.done()
        await engine.pause()  # a held request does not count as running
        await engine.load_weights(1, {"w": torch.ones(1)})
        await engine.resume()
        assert (await held)[0].version == 1

    started = time.monotonic()
    asyncio.run(asyncio.wait_for(run(), 10))
    assert time.monotonic() - started < 5


def test_versions_rise() -> None:
    engine = ScriptedEngine(countdown, version=2)
    with pytest.raises(ValueError, match="got version 2, expected one above the current 2"):
        asyncio.run(engine.load_weights(2, {}))


def test_factory(model_folder: str) -> None:
    engine = build_engine(EngineConfig("scripted", model_folder, seed=1))
    (completion,) = asyncio.run(engine.generate("a", [1], SamplingParams()))
    assert len(completion.token_ids) and completion.token_ids.max() < 42
    with pytest.raises(ValueError, match="rollout.script: module .* cannot be imported"):
        build_engine(EngineConfig("scripted", model_folder, script="no.such.module:script"))
    hf = build_engine(EngineConfig("hf", model_folder))
    assert hf.version == 0
    with pytest.raises(ValueError, match="got 'scriptd', expected one of hf, scripted; did you mean 'scripted'"):
        build_engine(EngineConfig("scriptd", model_folder))
    with pytest.raises(ValueError, match="model.dtype: got 'int8'"):
        build_engine(EngineConfig("hf", model_folder, dtype="int8"))
