"""Tests of the hf engine shared by several runs: each has its own adapter and versions, and holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.adapters.spec import AdapterSlots
from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import EngineBroken, SamplingParams
from headrace.actors.engines.shared.hf_seat import HfSeat
from headrace.tests.actors.engines.hf.adapter_updates import RANK, Named, Trainer, adapter, merged
from headrace.tests.actors.engines.hf.hf_steps import Steps, forward_logprobs
from headrace.tests.actors.weight_sync.weight_updates import receiver
from headrace.tests.waiting import until

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(n=2, max_new_tokens=12, seed=3)


@dataclass
class Tenant:
    """One run that shares the engine."""

    seat: Any
    trainer: Trainer
    folder: str

    async def serve(self, version: int, seed: int) -> Named:
        named = adapter(self.folder, seed)
        await self.trainer.serve(self.seat, version, named)
        return named

    async def expect(self, version: int, named: Named) -> None:
        """The seat answers with this adapter, and a token is marked with this version."""
        reference = merged(self.folder, named)
        for one in await self.seat.generate("same id", PROMPT, PARAMS):
            assert set(one.versions.tolist()) == {version}
            np.testing.assert_allclose(one.logprobs, forward_logprobs(reference, PROMPT, one.token_ids, 1.0), atol=1e-5)


def share(
    test: Callable[[HfEngine, Tenant, Tenant], Coroutine[Any, Any, None]], folder: str, tmp_path: Path, **options: Any
) -> None:
    engine = HfEngine(folder, adapters=AdapterSlots(RANK, 4))
    if options.pop("endless", False):
        engine._stop_ids = np.array([], dtype=np.int64)
    with asyncio.Runner() as runner:
        tenants = [
            Tenant(HfSeat(engine, name, receiver(), 0), Trainer(tmp_path / name, folder), folder) for name in ("a", "b")
        ]
        runner.run(test(engine, *tenants))
        runner.run(engine.close())
    for tenant in tenants:
        tenant.trainer.publisher.close()


def test_each_run_samples_with_its_own_adapter_and_counts_its_own_versions(model_folder: str, tmp_path: Path) -> None:
    async def main(engine: HfEngine, a: Tenant, b: Tenant) -> None:
        base = await engine.generate("same id", PROMPT, PARAMS)
        of_a = await a.serve(3, 1)
        of_b = await b.serve(1, 2)
        await asyncio.gather(a.expect(3, of_a), b.expect(1, of_b), a.seat.memory())
        of_b = await b.serve(2, 4)
        await asyncio.gather(b.expect(2, of_b), a.expect(3, of_a))
        assert (a.seat.version, b.seat.version, engine.version) == (3, 2, 0)
        again = await a.seat.generate("same id", PROMPT, replace(PARAMS, adapter="base"))
        assert [one.logprobs.tobytes() for one in again] == [one.logprobs.tobytes() for one in base]
        assert a.seat.stats.rows == 2 * PARAMS.n and b.seat.stats.rows == 2 * PARAMS.n

    share(main, model_folder, tmp_path)


def test_pause_commit_and_end_of_one_run_stop_no_request_of_another(model_folder: str, tmp_path: Path) -> None:
    async def main(engine: HfEngine, a: Tenant, b: Tenant) -> None:
        of_a, of_b = await a.serve(1, 1), await b.serve(1, 2)
        steps = Steps(engine)
        running = asyncio.create_task(b.seat.generate("running", PROMPT, PARAMS))
        steps.allow(3)
        await until(lambda: steps.begun == 4)
        waiting = asyncio.create_task(a.seat.generate("waiting", PROMPT, PARAMS))
        await asyncio.sleep(0)
        await a.seat.pause("keep")  # No step is allowed: these calls wait for none.
        changed = adapter(model_folder, 3)
        await a.seat.prepare_weights(a.trainer.publish(2, changed))
        await a.seat.commit_weights(2, "keep")
        steps.allow(1000)
        assert {version for one in await running for version in one.versions.tolist()} == {1}
        assert not waiting.done()
        assert await a.seat.verify_weights(a.trainer.publisher.digests(2)) == len(changed)
        await a.seat.resume()
        assert {version for one in await waiting for version in one.versions.tolist()} == {2}
        await asyncio.gather(a.expect(2, changed), b.expect(1, of_b))
        await a.seat.close()
        with pytest.raises(RuntimeError, match="request 'late': the engine is closed"):
            await a.seat.generate("late", PROMPT, PARAMS)
        await b.expect(1, of_b)
        assert of_a.keys() == changed.keys()

    share(main, model_folder, tmp_path, endless=True)


def test_a_damaged_adapter_holds_up_its_own_run_only(model_folder: str, tmp_path: Path) -> None:
    async def main(_: HfEngine, a: Tenant, b: Tenant) -> None:
        of_b = await b.serve(1, 2)
        named = adapter(model_folder, 1)
        await a.seat.prepare_weights(a.trainer.publish(1, named))
        await a.seat.commit_weights(1, "keep")
        with torch.no_grad():
            next(iter(a.seat.adapter.pairs.values()))[1][0, 0] += 1.0
        with pytest.raises(EngineBroken, match="has digest"):
            await a.seat.verify_weights(a.trainer.publisher.digests(1))
        waiting = asyncio.create_task(a.seat.generate("waiting", PROMPT, PARAMS))
        await b.expect(1, of_b)
        assert not waiting.done()
        of_a = await a.serve(2, 3)
        assert {version for one in await waiting for version in one.versions.tolist()} == {2}
        await a.expect(2, of_a)

    share(main, model_folder, tmp_path)


def test_a_verification_waits_for_one_step_of_another_run(model_folder: str, tmp_path: Path) -> None:
    """A batch of another run can last for longer than a sync may."""

    async def main(engine: HfEngine, a: Tenant, b: Tenant) -> None:
        named, _ = adapter(model_folder, 1), await b.serve(1, 2)
        await a.seat.prepare_weights(a.trainer.publish(1, named))
        await a.seat.commit_weights(1, "keep")
        steps = Steps(engine)
        running = asyncio.create_task(b.seat.generate("running", PROMPT, PARAMS))
        steps.allow(3)
        await until(lambda: steps.begun == 4)
        verified = asyncio.create_task(a.seat.verify_weights(a.trainer.publisher.digests(1)))
        await asyncio.sleep(0)
        steps.allow(3)  # The step of the other run, and two passes that compare the adapter with the base.
        assert await asyncio.wait_for(verified, 30.0) == len(named)
        assert not running.done()
        steps.allow(1000)
        assert [len(one.token_ids) for one in await running] == [PARAMS.max_new_tokens] * PARAMS.n

    share(main, model_folder, tmp_path, endless=True)


def test_a_run_whose_requests_are_held_makes_no_progress_with_those_of_another(
    model_folder: str, tmp_path: Path
) -> None:
    async def main(engine: HfEngine, a: Tenant, b: Tenant) -> None:
        await a.serve(1, 1)
        await a.seat.pause("keep")
        held = asyncio.create_task(a.seat.generate("held", PROMPT, PARAMS))
        steps = Steps(engine)
        running = asyncio.create_task(b.seat.generate("running", PROMPT, PARAMS))
        steps.allow(3)
        await until(lambda: steps.begun == 4)
        before = a.seat.progress, b.seat.progress
        steps.allow(3)
        await until(lambda: steps.begun == 7)
        assert a.seat.progress == before[0] and b.seat.progress > before[1]
        steps.allow(1000)
        await a.seat.resume()
        await asyncio.gather(held, running)

    share(main, model_folder, tmp_path, endless=True)


def test_what_one_run_must_not_do_is_refused(model_folder: str, tmp_path: Path) -> None:
    async def main(_: HfEngine, a: Tenant, b: Tenant) -> None:
        update = replace(a.trainer.publish(1, adapter(model_folder, 1)), adapter=None)
        with pytest.raises(ValueError, match="expected an adapter, because other runs share the engine"):
            await a.seat.prepare_weights(update)
        with pytest.raises(RuntimeError, match="shared with other runs, and does not sleep"):
            await b.seat.sleep()

    share(main, model_folder, tmp_path)
    with pytest.raises(ValueError, match="the engine has no room for any"):
        HfSeat(HfEngine(model_folder), "a", None, 0)
