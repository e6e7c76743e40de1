"""Tests of engine actors under Ray, and of `RemoteEngine`, which calls them from another process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from headrace.actors.engine_actor import (
    _SHIPPED,
    CONCURRENCY,
    EngineActor,
    EngineHost,
    EngineSetup,
    GenerateCall,
    GenerateReply,
    RemoteEngine,
)
from headrace.actors.engines.config import EngineKeys, ModelConfig, ScriptedConfig
from headrace.actors.engines.factory import EngineConfig, build_engine
from headrace.actors.engines.protocol import Completion, EngineDied, EngineStats, GenerationEngine, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine, random_tokens
from headrace.actors.process.remote_methods import decode_result, encode_arguments, submit
from headrace.codecs import messages
from headrace.codecs.blobs import Blob, blob_field
from headrace.codecs.schema import Field, Kind
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver, scaled

pytestmark = pytest.mark.usefixtures("ray_session")

PROMPT = [5, 6, 7, 13]


def slow_script(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
    return [3 + sample % 30] * 20


SLOW_SCRIPT = "headrace.tests.actors.test_engine_actor:slow_script"


def start(config: EngineConfig, name: str = "engine 0", kind: type[EngineActor] = EngineActor) -> Any:
    remote: Any = ray.remote(kind)
    actor = remote.options(num_cpus=0, max_concurrency=CONCURRENCY)
    handle = actor.remote(EngineSetup(name, 1, config))
    ray.get(handle.build.remote(), timeout=120)
    return handle


@pytest.fixture(scope="module")
def slow(model_folder: str) -> Iterator[Any]:
    """An actor whose requests take a minute; one for the module, as a process takes seconds to start."""
    scripted, slow = EngineKeys(engine="scripted"), ScriptedConfig(latency_s=60.0)
    handle = start(EngineConfig(scripted, ModelConfig(path=model_folder), slow, script=SLOW_SCRIPT), "engine 7")
    yield handle
    ray.kill(handle)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def in_flight(handle: Any, count: int) -> None:
    """Until the actor has so many requests."""
    while len(await handle.running.remote()) != count:
        pass


async def driver_call(handle: Any, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of the actor or of its engine, as the driver's handles do."""
    return decode_result(method, await submit(handle, method, encode_arguments(arguments)))


def plain(completions: list[Completion]) -> list[tuple]:
    return [
        (one.token_ids.tolist(), one.logprobs.tolist(), one.versions.tolist(), one.finish_reason) for one in completions
    ]


def test_completions_as_a_message() -> None:
    completions = [
        Completion(
            np.arange(length, dtype=np.int32), -np.ones(length, np.float32), reason, np.full(length, 3, dtype=np.int32)
        )
        for length, reason in [(4, "stop"), (0, "abort"), (7, "length")]
    ]
    encoded = messages.encode(GenerateReply.of(completions, 3, EngineStats(rows=3)))
    reply = messages.decode(encoded, GenerateReply)
    assert plain(reply.completions()) == plain(completions)
    assert (reply.version, reply.stats.rows) == (3, 3) and reply.completions()[1].token_ids.dtype == np.int32


def test_replies_say_how_many_samples_are_in_flight_for_all_callers() -> None:
    class Slow(ScriptedEngine):
        async def generate(
            self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
        ) -> list[Completion]:
            if request_id == "slow":
                await ended.wait()
            return await super().generate(request_id, prompt_ids, params)

    async def main() -> None:
        actor = EngineActor(EngineSetup("engine 0", 1, EngineConfig(EngineKeys(engine="scripted"), ModelConfig())))
        actor._hosted = Slow(random_tokens(10))
        slow = asyncio.create_task(actor.generate(GenerateCall("slow", prompt, SamplingParams(n=4))))
        await asyncio.sleep(0)
        quick = await actor.generate(GenerateCall("quick", prompt, SamplingParams()))
        assert quick is not None and quick.stats.in_flight == 4
        ended.set()
        last = await slow
        assert last is not None and last.stats.in_flight == 0 and (await actor.stats()).rows == 5

    ended, prompt = asyncio.Event(), np.array(PROMPT, np.int32)
    run(main)


def test_a_remote_engine_is_as_the_engine_itself(model_folder: str, tmp_path: Path) -> None:
    config = EngineConfig(EngineKeys(), ModelConfig(path=model_folder), seed=4, receiver=receiver())
    handle = start(config)

    async def main() -> None:
        here, publisher = build_engine(config), Publisher(tmp_path)
        remote = await RemoteEngine("engine 0", handle).connect()
        assert (remote.version, await driver_call(handle, EngineHost.num_workers)) == (0, 1)
        params = SamplingParams(n=4, max_new_tokens=12)
        assert plain(await remote.generate("a", PROMPT, params)) == plain(await here.generate("a", PROMPT, params))
        assert (remote.stats.rows, remote.stats.tokens) == (here.stats.rows, here.stats.tokens)
        update = publisher.publish(1, scaled(model_folder, 1.3))
        await here.prepare_weights(update)
        assert await here.commit_weights(1, "keep") and here.version == 1
        assert await driver_call(handle, GenerationEngine.prepare_weights, update) == "staged"
        report = await driver_call(handle, GenerationEngine.commit_weights, 1, "keep", "recompute")
        assert report.version == await driver_call(handle, EngineHost.version) == 1
        assert plain(await remote.generate("a", PROMPT, params)) == plain(await here.generate("a", PROMPT, params))
        with pytest.raises(ValueError, match="the prompt has no tokens"):
            await remote.generate("b", [], params)
        assert remote.version == 1
        assert await driver_call(handle, GenerationEngine.prepare_weights, update) == "staged", "it is served already"
        with pytest.raises(ValueError, match="got version 0, expected the current 1 or a later one"):
            await driver_call(handle, GenerationEngine.prepare_weights, replace(update, version=0))
        await driver_call(handle, GenerationEngine.pause, "wait")
        held = asyncio.create_task(remote.generate("held", PROMPT, params))
        await in_flight(handle, 1)
        assert not held.done()
        await driver_call(handle, GenerationEngine.resume)
        assert len(await held) == 4
        await driver_call(handle, GenerationEngine.sleep, 1)
        with pytest.raises(RuntimeError, match="asleep"):
            await remote.generate("b", PROMPT, params)
        await driver_call(handle, GenerationEngine.wake)
        await remote.close()
        await here.close()
        publisher.close()

    run(main)
    ray.get(handle.close.remote(), timeout=30)

    async def late() -> None:
        remote = await RemoteEngine("engine 0", handle).connect()
        with pytest.raises(RuntimeError, match="closed"):
            await remote.generate("late", PROMPT, SamplingParams())

    run(late)
    ray.kill(handle)


class Showing(EngineActor):
    """An actor whose engine answers with what it sees: the bytes of the first part of each picture."""

    def _build(self) -> ScriptedEngine:
        class Seeing(ScriptedEngine):
            async def generate(
                self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
            ) -> list[Completion]:
                seen = [part for one in params.pictures for part in one.batch.ragged("pixels").values.view(torch.uint8)]
                ids, zeros = np.array([int(one) for one in seen], np.int32), np.zeros(len(seen), np.float32)
                return [Completion(ids, zeros, " ".join(one.name for one in params.pictures), np.zeros_like(ids))]

        return Seeing(slow_script)


def test_pictures_reach_an_engine_in_another_process_unchanged() -> None:
    parts = [Field("pixels", Kind.RAGGED, torch.bfloat16, ndim=2), Field("count", Kind.PER_SAMPLE, torch.int32)]
    field = blob_field("images", parts)
    blobs = [
        Blob(field, {"pixels": torch.randn(rows, 3).bfloat16(), "count": torch.tensor(rows)}) for rows in (2, 50_000)
    ]
    handle = start(EngineConfig(EngineKeys(engine="scripted"), ModelConfig()), kind=Showing)

    async def main() -> None:
        remote = await RemoteEngine("engine 0", handle).connect()
        for pictures in (blobs, blobs[1:], []):
            [seen] = await remote.generate("a", PROMPT, SamplingParams(pictures=tuple(pictures)))
            wanted = [one.batch.ragged("pixels").values.view(torch.uint8) for one in pictures]
            assert seen.token_ids.tolist() == torch.cat([torch.empty(0), *wanted]).tolist()
            assert seen.finish_reason == " ".join(one.name for one in pictures)
        assert len(_SHIPPED) == 2, "a picture is sent once"
        await remote.close()

    run(main)
    blobs.clear()
    gc.collect()
    assert not len(_SHIPPED)
    ray.kill(handle)


def test_aborted_and_cancelled_calls_end_over_there(slow: Any) -> None:
    async def main() -> None:
        remote = await RemoteEngine("engine 7", slow).connect()
        params = SamplingParams(n=2, max_new_tokens=20)
        # More requests than Ray's default concurrency: pause and abort must not queue behind them.
        calls = {f"r{i}": asyncio.create_task(remote.generate(f"r{i}", PROMPT, params)) for i in range(1200)}
        await in_flight(slow, 1200)
        await remote.abort("r7")
        assert [one.finish_reason for one in await calls.pop("r7")] == ["abort"] * 2
        cancelled = calls.pop("r8")
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        again = asyncio.create_task(remote.generate("r8", PROMPT, params))  # its id is free at once
        await in_flight(slow, 1199)
        assert not again.done()
        with pytest.raises(ValueError, match="'r9' is already in flight"):
            await remote.generate("r9", PROMPT, params)
        await driver_call(slow, GenerationEngine.pause, "abort")
        for completions in await asyncio.gather(again, *calls.values()):
            assert [one.finish_reason for one in completions] == ["abort"] * 2
        await driver_call(slow, GenerationEngine.resume)
        await remote.close()

    run(main)


def test_a_silent_actor_counts_as_dead_within_the_bound(slow: Any) -> None:
    async def main() -> None:
        remote = RemoteEngine("engine 7", slow, health_every_s=0.1, health_timeout_s=3.0)
        await remote.connect()
        call = asyncio.create_task(remote.generate("r", PROMPT, SamplingParams()))
        await in_flight(slow, 1)
        pid = (await slow.info.remote()).pid
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(EngineDied, match="engine 'engine 7' is dead: it did not answer a health check"):
                await call
            assert time.monotonic() - started < 15
        finally:
            os.kill(pid, signal.SIGCONT)
        await driver_call(slow, GenerationEngine.pause, "abort")
        await driver_call(slow, GenerationEngine.resume)

    run(main)


def test_calls_of_a_dead_actor_raise(slow: Any) -> None:
    """The last one: it kills the actor."""

    async def main() -> None:
        remote = await RemoteEngine("engine 7", slow).connect()
        calls = [asyncio.create_task(remote.generate(f"r{i}", PROMPT, SamplingParams())) for i in range(3)]
        await in_flight(slow, 3)
        os.kill((await slow.info.remote()).pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(EngineDied, match="engine 'engine 7' is dead: "):
                await call
        with pytest.raises(EngineDied, match="engine 'engine 7' is dead: "):
            await remote.abort("r0")

    run(main)
