"""Tests of the scripted engine: its script, its latencies, and the versions of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.config import EngineKeys, ModelConfig
from headrace.actors.engines.factory import EngineConfig, build_engine
from headrace.actors.engines.protocol import CutOff, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine, random_tokens, request_latency
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver


def countdown(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
    return list(range(10 + sample, 0, -1))


def test_follows_the_script_and_cuts_at_max_new_tokens() -> None:
    engine = ScriptedEngine(countdown, version=4)
    first, second = asyncio.run(engine.generate("a", [1], SamplingParams(n=2, max_new_tokens=10)))
    assert first.token_ids.tolist() == list(range(10, 0, -1)) and first.finish_reason == "stop"
    assert second.token_ids.tolist() == list(range(11, 1, -1)) and second.finish_reason == "length"
    assert (first.versions == 4).all() and (first.logprobs == -1.0).all()
    assert (engine.stats.rows, engine.stats.tokens) == (2, 20)


def test_random_tokens_are_the_same_every_time() -> None:
    script = random_tokens(50, seed=3)
    assert script("a", [1], 0) == script("a", [2], 0) != script("a", [1], 1)
    lengths = sorted(len(random_tokens(50, median=100)(f"r{number}", [1], 0)) for number in range(200))
    assert 80 < lengths[100] < 125


@pytest.mark.parametrize(
    ("done", "longest", "tokens", "latency_s"), [(4, 50, 6, 6.0), (0, 50, 10, 10.0), (4, 4, 6, 5.0)]
)
def test_a_sample_that_was_cut_off_gets_the_rest_of_its_response_and_its_time(
    done: int, longest: int, tokens: int, latency_s: float
) -> None:
    """A response has ten tokens in ten seconds; the last case asks for only eight tokens of it."""
    engine = ScriptedEngine(countdown, latency_s=10.0)
    whole = list(countdown("a", [1], 0))
    params = SamplingParams(max_new_tokens=longest, continues=CutOff("a", 0, done))
    assert engine._responses("a.0/again1", [1, *whole[:done]], params) == ([whole[done:]], latency_s)
    assert len(whole[done:]) == tokens


def test_latencies_are_seeded_and_run_side_by_side() -> None:
    # With so wide a distribution the quickest of nine requests takes milliseconds and the slowest takes minutes.
    names = [f"r{index}" for index in range(9)]
    latencies = {name: request_latency(name, 1, 0.5, 6.0) for name in names}
    assert latencies == {name: request_latency(name, 1, 0.5, 6.0) for name in names}
    assert latencies != {name: request_latency(name, 2, 0.5, 6.0) for name in names}
    slow, *_, quick = sorted(names, key=lambda name: -latencies[name])
    assert latencies[quick] < 0.1 and latencies[slow] > 300.0

    async def main() -> None:
        engine = ScriptedEngine(countdown, latency_s=0.5, latency_sigma=6.0, seed=1)
        waiting = asyncio.create_task(engine.generate(slow, [1], SamplingParams()))
        await asyncio.sleep(0)
        [done] = await engine.generate(quick, [1], SamplingParams())
        assert done.finish_reason == "stop" and not waiting.done()
        await engine.abort(slow)
        assert (await waiting)[0].finish_reason == "abort"
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.long
def test_tokens_that_flowed_before_a_commit_carry_the_old_version(tmp_path: Path) -> None:
    def forty(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        return [7] * (40 if sample == 0 else 20)

    async def main() -> None:
        engine = ScriptedEngine(forty, latency_s=2.0, receiver=receiver())
        publisher = Publisher(tmp_path)
        await engine.prepare_weights(publisher.publish(1, {"w": torch.ones(3)}))
        early = asyncio.create_task(engine.generate("early", [1], SamplingParams(n=2, max_new_tokens=99)))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(engine.generate("late", [1], SamplingParams(n=2, max_new_tokens=99)))
        await asyncio.sleep(0.1)
        report = await engine.commit_weights(1, "keep")
        assert (report.kept, report.aborted) == (2, 0) and engine.loaded["w"].tolist() == [1, 1, 1]
        shares = []
        for long, short in (await early, await late):
            assert [len(long.token_ids), len(short.token_ids)] == [40, 20]
            for completion in (long, short):
                assert (np.diff(completion.versions) >= 0).all() and completion.finish_reason == "stop"
            old = [int((completion.versions == 0).sum()) for completion in (long, short)]
            assert old[1] == old[0] // 2, "tokens of all samples flow evenly over the latency"
            shares.append(old[0])
        assert 1 <= shares[1] < shares[0] < 40
        await engine.close()
        publisher.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_time_stands_still_while_frozen() -> None:
    async def main() -> None:
        engine = ScriptedEngine(countdown, latency_s=0.1)
        running = asyncio.create_task(engine.generate("a", [1], SamplingParams(max_new_tokens=99)))
        await asyncio.sleep(0)
        await engine.pause("keep")
        await asyncio.sleep(0.15)
        await engine.abort("a")
        (partial,) = await running
        assert partial.finish_reason == "abort" and len(partial.token_ids) == 0, "tokens flowed while frozen"
        await engine.resume()
        assert len((await engine.generate("a", [1], SamplingParams(max_new_tokens=99)))[0].token_ids) == 10

    asyncio.run(asyncio.wait_for(main(), 30))


def test_stops_of_the_request(tokenizer: Any) -> None:
    def digits(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        return tokenizer("0123456789")["input_ids"]

    async def main() -> None:
        engine = ScriptedEngine(digits, tokenizer=tokenizer)
        four = tokenizer("4")["input_ids"][0]
        for params, length in [
            (SamplingParams(stop=("45",)), 6),
            (SamplingParams(stop=("89", "23")), 4),
            (SamplingParams(stop_token_ids=(four,)), 5),
            (SamplingParams(stop_token_ids=(four,), stop=("78",)), 5),
        ]:
            (completion,) = await engine.generate("a", [1], params)
            assert (len(completion.token_ids), completion.finish_reason) == (length, "stop")
        (cut,) = await engine.generate("a", [1], SamplingParams(stop=("45",), max_new_tokens=5))
        assert (len(cut.token_ids), cut.finish_reason) == (5, "length")
        with pytest.raises(ValueError, match="expected none, because the model has no tokenizer"):
            await ScriptedEngine(digits).generate("a", [1], SamplingParams(stop=("4",)))

    asyncio.run(main())


def test_factory(model_folder: str) -> None:
    scripted, model = EngineKeys(engine="scripted"), ModelConfig(path=model_folder)
    engine = build_engine(EngineConfig(scripted, model, seed=1))
    (completion,) = asyncio.run(engine.generate("a", [1], SamplingParams()))
    assert len(completion.token_ids) and completion.token_ids.max() < 42
    with pytest.raises(ValueError, match="rollout.script: module .* cannot be imported"):
        build_engine(EngineConfig(scripted, model, script="no.such.module:script"))
    hf = build_engine(EngineConfig(EngineKeys(), model))
    assert hf.version == 0
    with pytest.raises(ValueError, match="rollout.engine: got 'scriptd'"):
        build_engine(EngineConfig(EngineKeys.model_construct(engine="scriptd"), model))
