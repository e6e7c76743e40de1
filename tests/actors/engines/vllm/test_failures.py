"""Tests of failures of the vllm engine: a load that breaks off, a dropped reception, a dead engine process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.actors.engines.protocol import EngineBroken, EngineDied, SamplingParams
from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, WeightTransferError
from headrace.tests.actors.engines.vllm.builder import CONTEXT, build
from headrace.tests.actors.engines.vllm.conftest import Subject
from headrace.tests.actors.weight_sync.weight_updates import ENGINE, Publisher

pytestmark = pytest.mark.vllm
PROMPT = [5, 6, 7, 13]
SHORT = SamplingParams(n=2, max_new_tokens=8)
LONG = SamplingParams(n=16, max_new_tokens=400)
"""Some of its samples run on for a hundred tokens and more, whatever the weights."""


class UnstagedSubject(Subject):
    """Its engine has no room for a second copy: weights arrive while they are committed."""

    build_options = {"receiver": ReceiverConfig(ENGINE, SyncConfig(staging="none", delta=True))}


@pytest.fixture(scope="module")
def unstaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = UnstagedSubject(tmp_path_factory.mktemp("vllm-unstaged"), "moe")
    yield made
    made.close()


def test_without_staging_weights_arrive_during_the_commit(unstaged: Subject) -> None:
    async def main() -> None:
        engine = unstaged.engine
        for _ in range(2):
            await engine.prepare_weights(unstaged.update())
            running = asyncio.create_task(engine.generate("kept", PROMPT, LONG))
            await asyncio.sleep(0.05)
            await engine.commit_weights(engine.version + 1, "keep")
            unstaged.expect_logprobs(PROMPT, await engine.generate("after", PROMPT, SHORT))
            for one in await running:
                assert set(one.versions.tolist()) <= {engine.version - 1, engine.version}

    unstaged.run(main())


@pytest.mark.parametrize(("loss", "again"), [("withdrawn", 2), ("incomplete", 1)])
def test_requests_of_an_engine_whose_load_broke_off_wait_until_a_whole_version_comes(
    unstaged: Subject, tmp_path: Path, loss: str, again: int
) -> None:
    async def main() -> None:
        engine, old = unstaged.engine, unstaged.engine.version
        publisher = Publisher(tmp_path, timeout_s=2.0)
        named = unstaged.weights()
        if loss == "incomplete":
            del named["model.norm.weight"]
        await engine.prepare_weights(publisher.publish(old + 1, named))
        if loss == "withdrawn":
            publisher.close()
        running = asyncio.create_task(engine.generate("running", PROMPT, LONG))
        await asyncio.sleep(0.02)
        with pytest.raises(WeightTransferError if loss == "withdrawn" else EngineBroken, match=f"version {old + 1}"):
            await engine.commit_weights(old + 1, "keep")
        waiting = asyncio.create_task(engine.generate("next", PROMPT, SHORT))
        newest = engine.tokens_of_newest()
        await asyncio.sleep(0.2)
        assert not running.done() and not waiting.done() and engine.tokens_of_newest() == newest
        assert engine.version == old
        publisher.close()
        update = unstaged.publisher.publish(old + again, unstaged.weights())
        await engine.prepare_weights(update)
        await engine.commit_weights(old + again)
        for completions in (await waiting, await engine.generate("healed", PROMPT, SHORT)):
            unstaged.expect_logprobs(PROMPT, completions)
            assert all((one.versions == old + again).all() for one in completions)
        kept = await running
        assert {one.finish_reason for one in kept} <= {"stop", "length"}
        assert set(np.concatenate([one.versions for one in kept]).tolist()) == {old, old + again}

    unstaged.run(main())


def test_a_cancelled_commit_goes_on_to_its_end_and_a_dropped_one_does_not_begin(unstaged: Subject) -> None:
    async def main() -> None:
        engine, old = unstaged.engine, unstaged.engine.version
        await engine.prepare_weights(unstaged.update())
        running = asyncio.create_task(engine.generate("running", PROMPT, LONG))
        await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.commit_weights(old + 1, "wait"), 0.01)
        assert all((one.versions == old).all() for one in await running)
        completions = await engine.generate("after", PROMPT, SHORT)
        unstaged.expect_logprobs(PROMPT, completions)
        assert engine.version == old + 1 and all((one.versions == old + 1).all() for one in completions)

        await engine.prepare_weights(unstaged.publisher.publish(old + 2, unstaged.weights()))
        running = asyncio.create_task(engine.generate("running", PROMPT, LONG))
        await asyncio.sleep(0.02)
        commit = asyncio.create_task(engine.commit_weights(old + 2, "wait"))
        await asyncio.sleep(0.01)
        await engine.drop_weights(old + 2)
        with pytest.raises(ValueError, match=f"got version {old + 2} to commit, expected the prepared one"):
            await commit
        await running
        assert all((one.versions == old + 1).all() for one in await engine.generate("on", PROMPT, SHORT))

    unstaged.run(main())


def test_sleeping_engines_take_weights_but_no_requests(unstaged: Subject) -> None:
    async def main() -> None:
        engine, old = unstaged.engine, unstaged.engine.version
        await engine.sleep()
        await engine.sleep(2)
        with pytest.raises(RuntimeError, match="asleep: wake it first"):
            await engine.generate("x", PROMPT, SHORT)
        await engine.prepare_weights(unstaged.update())
        await engine.commit_weights(old + 1)
        await engine.wake()
        await engine.wake()
        unstaged.expect_logprobs(PROMPT, await engine.generate("x", PROMPT, SHORT))
        await engine.sleep(2)
        assert (await engine.memory()).host_bytes > 0
        await engine.wake()
        with pytest.raises(EngineBroken, match="dropped the weights; commit a version"):
            await engine.generate("y", PROMPT, SHORT)
        await engine.prepare_weights(unstaged.update())
        await engine.commit_weights(old + 2)
        unstaged.expect_logprobs(PROMPT, await engine.generate("y", PROMPT, SHORT))

    unstaged.run(main())


def test_an_engine_without_receiver_takes_no_weights_and_one_that_dies_says_so(
    tmp_path: Path, unstaged: Subject
) -> None:
    publisher = Publisher(tmp_path)
    log = str(tmp_path / "engines" / "engine-0.log")

    async def main() -> None:
        engine = build(
            unstaged.model_folder,
            receiver=None,
            log=log,
            max_model_len=500,
            kv_cache_bytes=None,
            options={"max_num_batched_tokens": 640, "block_size": 32},
        )
        try:
            assert engine.pids and all(psutil.pid_exists(pid) for pid in engine.pids)
            config = engine._process.llm.vllm_config
            assert config.scheduler_config.max_num_batched_tokens == 640 and config.cache_config.block_size == 32
            assert config.cache_config.kv_cache_memory_bytes == 256 << 20 and config.model_config.max_model_len == 500
            with pytest.raises(ValueError, match="4 prompt tokens . 497 new tokens exceed the model's context of 500"):
                await engine.generate("long", PROMPT, SamplingParams(max_new_tokens=497))
            with pytest.raises(ValueError, match="built without a receiver"):
                await engine.prepare_weights(publisher.publish(1, unstaged.weights()))
            running = asyncio.create_task(engine.generate("running", PROMPT, LONG))
            await asyncio.sleep(0.05)
            os.kill(engine.pids[0], signal.SIGKILL)
            killed = "'running': vLLM's engine process died .pid .*: it was ended by SIGKILL .its output is in .*-0.log"
            with pytest.raises(EngineDied, match=killed):
                await running
            with pytest.raises(EngineDied):
                await engine.pause()
        finally:
            await engine.close()
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate("late", PROMPT, SHORT)
        assert not any(psutil.pid_exists(pid) for pid in engine.pids)

    asyncio.run(asyncio.wait_for(main(), 120))
    publisher.close()


def test_an_engine_whose_process_is_killed_while_nothing_runs_is_found_at_once(
    tmp_path: Path, unstaged: Subject
) -> None:
    publisher = Publisher(tmp_path)

    async def main() -> None:
        engine = build(unstaged.model_folder)
        try:
            update = publisher.publish(1, unstaged.weights())
            await engine.prepare_weights(update)
            await engine.pause()
            held = asyncio.create_task(engine.generate("held", PROMPT, SHORT))
            await asyncio.sleep(0.05)
            assert not engine.died
            os.kill(engine.pids[0], signal.SIGKILL)
            async with asyncio.timeout(10):
                with pytest.raises(EngineDied, match="'held': vLLM's engine process died"):
                    await held
            assert "died" in engine.died
            for call in (
                lambda: engine.generate("late", PROMPT, SHORT),
                lambda: engine.prepare_weights(update),
                lambda: engine.commit_weights(1),
                lambda: engine.drop_weights(1),
                lambda: engine.reset_prefix_cache(),
            ):
                async with asyncio.timeout(5):
                    with pytest.raises(EngineDied, match="vLLM's engine process died"):
                        await call()
        finally:
            await engine.close()
        assert not any(psutil.pid_exists(pid) for pid in engine.pids)

    asyncio.run(asyncio.wait_for(main(), 120))
    publisher.close()


# ---------------------------------------------------------------- the words of vLLM's processes


def test_what_cannot_start_is_refused_before_a_process_does(unstaged: Subject) -> None:
    for given, sentence in (
        ({"kv_cache_bytes": 1 << 18}, "rollout.kv_cache: got 0 MiB, expected auto or at least 1 MiB"),
        (
            {"max_model_len": CONTEXT + 1},
            f"rollout.max_model_len: .* is greater than the derived max_model_len .*{CONTEXT}",
        ),
        ({"options": {"block_sice": 16}}, "rollout.vllm.block_sice: .* did you mean block_size?"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build(unstaged.model_folder, **given)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves its sockets to the collector
def test_an_engine_process_that_does_not_start_is_told_with_its_own_words(tmp_path: Path, unstaged: Subject) -> None:
    """vLLM itself says only that the core's initialization failed."""
    log = tmp_path / "engine-0.log"
    with pytest.raises(
        RuntimeError, match="did not start: ValueError: .*KV cache|did not start: ValueError: .*cache blocks"
    ):
        build(unstaged.model_folder, log=str(log), options={"num_gpu_blocks_override": 1})
    assert "EngineCore failed to start" in log.read_text()


@pytest.mark.slow
def test_an_engine_process_that_raises_is_told_with_its_own_words(tmp_path: Path, unstaged: Subject) -> None:
    log = tmp_path / "engine-0.log"
    scheduler = "headrace.tests.actors.engines.vllm.breaking_scheduler.BreakingScheduler"

    async def main() -> None:
        engine = build(unstaged.model_folder, log=str(log), options={"scheduler_cls": scheduler})
        try:
            with pytest.raises(EngineDied, match=f"LookupError: broken by a test .its output is in {log}"):
                await engine.generate("broken", PROMPT, SHORT)
            assert "LookupError: broken by a test" in engine.died
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 120))
    assert "Traceback" in log.read_text()


@pytest.mark.slow
def test_of_two_workers_the_killed_one_is_named(tmp_path: Path, unstaged: Subject) -> None:
    async def main() -> None:
        engine = build(unstaged.model_folder, tp=2, receiver=None, log=str(tmp_path / "engine-0.log"))
        try:
            running = asyncio.create_task(engine.generate("running", PROMPT, LONG))
            await asyncio.sleep(0.05)
            [worker] = [pid for pid in engine.pids if "Worker_TP1" in psutil.Process(pid).name()]
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(EngineDied, match="Worker proc .* died unexpectedly"):
                await running
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 200))
