"""Tests of the vllm engine shared by several runs: each has its own adapter and versions, and holds up no other."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.adapters.spec import AdapterSlots
from headrace.actors.engines.protocol import EngineBroken, SamplingParams
from headrace.actors.engines.shared.seats import open_seat
from headrace.tests.actors.engines.vllm.test_adapters import (
    LONG_PROMPT,
    PROMPT,
    RANK,
    SHORT,
    Adapted,
    Tensors,
    damage,
    numbers,
)
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver

pytestmark = [pytest.mark.vllm, pytest.mark.processes]
LONG = SamplingParams(max_new_tokens=450, temperature=0.0)


class Shared(Adapted):
    build_options = {"adapters": AdapterSlots(RANK, 4)}

    def tenant(self, name: str, folder: Path) -> Adapted:
        """A run that shares the engine: its `engine` is the run's seat."""
        made: Any = copy.copy(self)
        made.engine = open_seat("vllm", self.engine, name, receiver(), 0)
        made.publisher = Publisher(folder / name)
        return made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # The tests call functions in the worker.
        made = Shared(tmp_path_factory.mktemp("vllm-seats"), "untied")
        yield made
        made.close()


async def serve(tenant: Adapted, version: int, seed: int) -> Tensors:
    named = tenant.adapter(seed)
    await tenant.commit(named, version=version)
    assert await tenant.engine.verify_weights(tenant.digests(version, named)) == len(named)
    return named


async def expect(tenant: Adapted, version: int, named: Tensors) -> None:
    for prompt in (PROMPT, LONG_PROMPT):  # The other run has the same prompts in the prefix cache.
        tenant.expect(prompt, await tenant.engine.generate("same id", prompt, SHORT), named, version)


def test_runs_sample_with_their_own_adapters_in_the_same_steps(shared: Shared, tmp_path: Path) -> None:
    async def main() -> None:
        a, b = shared.tenant("a", tmp_path), shared.tenant("b", tmp_path)
        base = await shared.engine.generate("same id", PROMPT, SHORT)
        before = await a.engine.generate("same id", PROMPT, SHORT)
        assert [one.logprobs.tobytes() for one in base] == [one.logprobs.tobytes() for one in before]
        of_a, of_b = await serve(a, 3, 1), await serve(b, 1, 2)
        await asyncio.gather(expect(a, 3, of_a), expect(b, 1, of_b))
        of_b = await serve(b, 2, 4)
        await asyncio.gather(expect(a, 3, of_a), expect(b, 2, of_b))
        assert (a.engine.version, b.engine.version, shared.engine.version) == (3, 2, 0)
        again = await a.engine.generate("same id", PROMPT, replace(SHORT, adapter="base"))
        assert [one.logprobs.tobytes() for one in base] == [one.logprobs.tobytes() for one in again]
        assert (a.engine.stats.rows, b.engine.stats.rows) == (12, 8)
        for tenant in (a, b):
            await tenant.engine.close()
        assert await shared.engine.call_workers(numbers) == [[]]

    shared.run(main())


def test_pause_commit_and_end_of_one_run_stop_no_request_of_another(shared: Shared, tmp_path: Path) -> None:
    async def main() -> None:
        a, b = shared.tenant("a", tmp_path), shared.tenant("b", tmp_path)
        await serve(a, 1, 1)
        of_b = await serve(b, 1, 2)
        running = asyncio.create_task(b.engine.generate("running", PROMPT, LONG))
        while not shared.engine.tokens_of_newest() or shared.engine.tokens_of_newest()[0][1] < 1:
            await asyncio.sleep(0.002)
        await a.engine.pause("keep")
        waiting = asyncio.create_task(a.engine.generate("waiting", PROMPT, SHORT))
        begun, of_a = b.engine.progress, await serve(a, 2, 3)
        assert b.engine.progress > begun and not running.done() and not waiting.done()
        await a.engine.resume()
        a.expect(PROMPT, await waiting, of_a, 2)
        cut = asyncio.create_task(a.engine.generate("cut", PROMPT, LONG))
        while a.engine.process.versions.count(["a/cut#0"]) < 2:
            await asyncio.sleep(0.002)
        await a.engine.close()
        [short] = await cut
        assert 0 < len(short.token_ids) < 450 and short.finish_reason == "abort"
        b.expect(PROMPT, await running, of_b, 1)
        with pytest.raises(RuntimeError, match="request 'late': the engine is closed"):
            await a.engine.generate("late", PROMPT, SHORT)
        await expect(b, 1, of_b)
        await b.engine.close()

    shared.run(main())


def test_a_run_makes_progress_with_the_tokens_of_others_only_while_it_waits_behind_them(
    shared: Shared, tmp_path: Path
) -> None:
    async def moves(tenant: Adapted) -> bool:
        before = tenant.engine.progress
        assert shared.engine.tokens_of_newest(), "the other run generates"
        tokens = shared.engine.process.versions.num_tokens
        while shared.engine.process.versions.num_tokens < tokens + 3:
            await asyncio.sleep(0.002)
        return tenant.engine.progress != before

    async def main() -> None:
        a, b = shared.tenant("a", tmp_path), shared.tenant("b", tmp_path)
        await serve(b, 1, 2)
        running = asyncio.create_task(b.engine.generate("running", PROMPT, LONG))
        while not shared.engine.tokens_of_newest() or shared.engine.tokens_of_newest()[0][1] < 1:
            await asyncio.sleep(0.002)
        assert not await moves(a) and await moves(b)
        async with a.engine._control:  # As during a commit or a comparison.
            assert await moves(a)
        await b.engine.close()
        await running
        await a.engine.close()

    shared.run(main())


def test_a_damaged_slot_holds_up_its_own_run_only(shared: Shared, tmp_path: Path) -> None:
    async def main() -> None:
        a, b = shared.tenant("a", tmp_path), shared.tenant("b", tmp_path)
        of_b = await serve(b, 1, 2)
        named = a.adapter(21)
        await a.commit(named, version=1)
        await shared.engine.call_workers(damage)
        with pytest.raises(EngineBroken, match="adapter of version 1: the slot of .* differs"):
            await a.engine.verify_weights(a.digests(1, named))
        waiting = asyncio.create_task(a.engine.generate("waiting", PROMPT, SHORT))
        await expect(b, 1, of_b)
        assert not waiting.done()
        of_a = await serve(a, 2, 3)
        a.expect(PROMPT, await waiting, of_a, 2)
        for tenant in (a, b):
            await tenant.engine.close()

    shared.run(main())


def test_a_run_cannot_replace_the_base_or_put_the_engine_to_sleep(shared: Shared, tmp_path: Path) -> None:
    async def main() -> None:
        a = shared.tenant("a", tmp_path)
        with pytest.raises(ValueError, match="expected an adapter, because other runs share the engine"):
            await a.engine.prepare_weights(a.publisher.announce(1, a.weights()))
        with pytest.raises(RuntimeError, match="shared with other runs, and does not sleep"):
            await a.engine.sleep()
        await a.engine.close()

    shared.run(main())
