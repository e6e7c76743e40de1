"""Completions that a weight commit cuts off continue where they were, and keep the versions of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.turns import generate_whole
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver

PROMPT = [5, 6]


def counting(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
    """1, 2, 3, ... up to 40."""
    assert list(prompt_ids) == PROMPT, "without the tokens that it continues from"
    return list(range(1, 41))


@pytest.mark.long
def test_a_cut_completion_goes_on_under_the_new_version(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ScriptedEngine(counting, latency_s=1.0, receiver=receiver())
        publisher = Publisher(tmp_path)
        await engine.prepare_weights(publisher.publish(1, {"w": torch.ones(3)}))
        params = SamplingParams(n=3, max_new_tokens=50)
        running = asyncio.create_task(generate_whole(engine, None, "a", PROMPT, params))
        await asyncio.sleep(0.3)
        report = await engine.commit_weights(1, "abort")
        assert report.aborted == 1
        await asyncio.sleep(0.2)
        await engine.pause("abort")  # cut once more
        await engine.resume()
        for completion in await running:
            assert completion.token_ids.tolist() == list(range(1, 41)) and completion.finish_reason == "stop"
            assert len(completion.logprobs) == len(completion.versions) == 40
            assert completion.versions[0] == 0 and completion.versions[-1] == 1
            assert (np.diff(completion.versions) >= 0).all()
        publisher.close()
        await engine.close()

    asyncio.run(main())


@pytest.mark.long
def test_the_length_is_bounded_over_all_pieces() -> None:
    async def main() -> None:
        engine = ScriptedEngine(counting, latency_s=1.0)
        running = asyncio.create_task(generate_whole(engine, None, "a", PROMPT, SamplingParams(n=1, max_new_tokens=30)))
        await asyncio.sleep(0.3)
        await engine.pause("abort")
        await engine.resume()
        [completion] = await running
        assert completion.token_ids.tolist() == list(range(1, 31)) and completion.finish_reason == "length"
        await engine.close()

    asyncio.run(main())


@pytest.mark.long
def test_a_stop_text_that_the_cut_went_through_is_found(tokenizer: Any) -> None:
    answer = tokenizer("12+34=46 and on", add_special_tokens=False)["input_ids"]

    def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        return answer

    async def main(cut_s: float) -> None:
        engine = ScriptedEngine(script, latency_s=1.0, tokenizer=tokenizer)
        params = SamplingParams(n=1, max_new_tokens=30, stop=("+34=",))
        running = asyncio.create_task(generate_whole(engine, tokenizer, "a", PROMPT, params))
        await asyncio.sleep(cut_s)
        await engine.pause("abort")
        await engine.resume()
        [completion] = await running
        assert completion.token_ids.tolist() == answer[:6] and completion.finish_reason == "stop"
        await engine.close()

    for cut_s in (0.2, 0.5, 0.7):
        asyncio.run(main(cut_s))


def test_a_closed_engine_is_an_error() -> None:
    async def main() -> None:
        engine = ScriptedEngine(counting, latency_s=30.0)
        running = asyncio.create_task(generate_whole(engine, None, "a", PROMPT, SamplingParams(n=2)))
        await asyncio.sleep(0.02)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await running

    asyncio.run(main())
