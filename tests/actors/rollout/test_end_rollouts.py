"""Rollout calls that are ended early: they return what is finished, and nothing of the rest is put."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.tests.actors.rollout.test_rollout import PARTITION, FakeClient, right_then_wrong, worker
from headrace.tests.waiting import until


@pytest.mark.long
def test_what_is_finished_is_put_and_reported(tokenizer: Any) -> None:
    async def main() -> None:
        client = FakeClient()
        engine = ScriptedEngine(right_then_wrong(tokenizer), latency_s=1.0, latency_sigma=3.0)
        rollouts = worker(engine, tokenizer, client)
        call = asyncio.create_task(rollouts.rollout(range(24), PARTITION, SamplingParams(n=2)))
        await until(lambda: client.puts)
        rollouts.end_rollouts()
        report = await call
        keys = [key for put, _, _ in client.puts for key in put]
        assert report.rows == len(keys) == len(set(keys)) and 0 < report.rows < 48
        assert report.failed == 0
        rollouts.end_rollouts()  # nothing is under way
        again = await rollouts.rollout(range(100, 101), PARTITION, SamplingParams(n=2, max_new_tokens=1))
        assert again.rows == 2
        await rollouts.close()

    asyncio.run(main())


def test_a_call_that_has_just_begun_is_ended_too(tokenizer: Any) -> None:
    async def main() -> None:
        client = FakeClient()
        rollouts = worker(ScriptedEngine(right_then_wrong(tokenizer), latency_s=60.0), tokenizer, client)
        call = asyncio.create_task(rollouts.rollout(range(3), PARTITION, SamplingParams(n=2)))
        await asyncio.sleep(0)
        rollouts.end_rollouts()
        report = await call
        assert report.rows == 0 and not client.puts
        await rollouts.close()

    asyncio.run(main())
