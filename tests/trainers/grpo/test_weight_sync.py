"""Weight sync as the driver leads it: direct engines that fail, a trainer that dies, requests that run for long."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.actors.adapters.spec import AdapterSpec
from headrace.actors.engines.protocol import CommitReport, KeysAndValues, PauseMode
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.weight_sync.transports.ipc import IpcSender
from headrace.actors.weight_sync.transports.protocol import WeightTransferError
from headrace.codecs.weights.parameter_digests import ParameterDigests
from headrace.tests.trainers.grpo.sync_world import WEIGHTS, DirectEngine, World, world
from headrace.trainers.cluster.calls import ActorFailed
from headrace.trainers.cluster.engine_pool import NoEngineLeft
from headrace.trainers.grpo import weight_sync
from headrace.trainers.grpo.gpu_turns import BothResident
from headrace.trainers.grpo.rollout_pool import RolloutPool
from headrace.trainers.grpo.weight_sync import WeightSync


def test_a_direct_update_that_fails_in_the_middle_is_tried_once_more() -> None:
    with world([DirectEngine, DirectEngine]) as it:
        it.hosted[0].damage = 1
        report = it.sync.sync(1)
        assert (report.engines, report.left_out) == (2, 0)
        it.expect(1, 1.0)


class Changing(DirectEngine):
    """Its memory changes after a load, as many times as `changes` says."""

    changes = 0

    async def commit_weights(
        self, version: int, in_flight: PauseMode = "wait", kv: KeysAndValues = "recompute"
    ) -> CommitReport:
        report = await super().commit_weights(version, in_flight, kv)
        if self.changes:
            self.changes -= 1
            self.loaded["v"][7] += 1
        return report


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_an_engine_whose_weights_differ_loads_them_again(in_flight: str) -> None:
    with world([Changing, ScriptedEngine], verify="full", in_flight=in_flight) as it:
        it.hosted[0].changes = 1
        report = it.sync.sync(1)
        assert (report.engines, report.left_out, report.verified) == (2, 0, 2 * len(WEIGHTS))
        it.expect(1, 1.0)
        assert len(it.request(0, "a").result(10)[0].token_ids) == 20, "it was resumed"


def test_an_engine_whose_weights_differ_twice_is_left_out() -> None:
    with world([Changing, ScriptedEngine], verify="sample") as it:
        it.hosted[0].changes = 2
        report = it.sync.sync(1)
        assert (report.engines, report.left_out, report.verified) == (1, 1, len(WEIGHTS))
        first = it.pool.engines[0]
        assert first.broken and "engine 0: weights of version 1: 'v' has digest" in first.left_out
        waiting = it.request(0, "a")
        assert it.sync.sync(2).verified == 2 * len(WEIGHTS)
        it.expect(2, 1.0)
        assert set(waiting.result(10)[0].versions.tolist()) == {2}


def test_nothing_is_compared_unless_asked_for() -> None:
    with world([Changing]) as it:
        it.hosted[0].changes = 1
        assert it.sync.sync(1).verified == 0


class Adapting(ScriptedEngine):
    """It keeps the modes of its pauses and commits, and its memory changes after the first load."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modes: list[tuple[str, ...]] = []

    async def pause(self, mode: PauseMode = "wait") -> None:
        self.modes.append((mode,))
        await super().pause(mode)

    async def commit_weights(
        self, version: int, in_flight: PauseMode = "wait", kv: KeysAndValues = "recompute"
    ) -> CommitReport:
        damages = not any(len(mode) == 2 for mode in self.modes)
        self.modes.append((in_flight, kv))
        report = await super().commit_weights(version, in_flight, kv)
        if damages:
            self.loaded = {**self.loaded, "v": self.loaded["v"] + 1}
        return report


@pytest.mark.parametrize(("in_flight", "of_commit"), [("wait", "keep"), ("keep", "keep"), ("abort", "abort")])
def test_an_adapter_is_always_compared_and_no_request_is_waited_for(in_flight: str, of_commit: str) -> None:
    """Engines are frozen until the new version of an adapter is compared, and keep the requests in flight."""
    adapter = AdapterSpec(rank=4, alpha=8.0, base="0" * 32)
    with world([Adapting], of_adapter=adapter, in_flight=in_flight, verify="off") as it:
        report = it.sync.sync(1)
        assert (report.engines, report.left_out, report.verified) == (1, 0, len(WEIGHTS))
        it.expect(1, 1.0)
        modes = it.hosted[0].modes
        assert [mode for mode in modes if len(mode) == 2] == [(of_commit, "keep")] * 2, "the damaged one came again"
        assert ("wait",) not in modes


def test_an_adapter_that_was_not_compared_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of the trainer do not come. The version that is verified later answers what waited."""
    adapter = AdapterSpec(rank=4, alpha=8.0, base="0" * 32)
    with world([ScriptedEngine], of_adapter=adapter) as it:
        it.sync.sync(1)

        def lost(version: int) -> ParameterDigests:
            raise RuntimeError(f"no digests of version {version}")

        with monkeypatch.context() as patch:
            patch.setattr(it.trainer, "weight_digests", lost)
            with pytest.raises(ActorFailed, match="no digests of version 2"):
                it.sync.sync(2)
        assert it.pool.engines[0].broken
        waiting = it.request(0, "a")
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        it.sync.sync(3)
        assert set(waiting.result(10)[0].versions.tolist()) == {3}


def test_weights_damaged_in_the_cache_are_found_when_an_engine_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums of buckets are those of the bytes in the cache, the digests those of the trainer's weights."""
    monkeypatch.setattr(IpcSender, "lasting", False)  # as between GPUs: the publisher then keeps a cache
    with world([ScriptedEngine], cache=True, verify="full", staging="full") as it:
        it.trainer.cache_weights(1)
        sync = WeightSync(it.config, [it._worker], it.pool, lasting=False, in_cache=1)
        [engine], cache = it.pool.engines, it.trainer._publisher._cache
        assert cache is not None
        with cache.reading(1) as cached:
            cached.memory[5] ^= 1
        with pytest.raises(ActorFailed, match="engine 0: weights of version 1: 'w' has digest"):
            sync.catch_up(engine)
        assert engine.broken
        with cache.reading(1) as cached:
            cached.memory[5] ^= 1
        sync.catch_up(engine)
        it.expect(1, 1.0)
        assert sync.sync(1).verified == len(WEIGHTS), "counted in the next report"


def test_an_engine_that_fails_twice_is_left_out_and_the_others_have_the_version() -> None:
    with world([DirectEngine, DirectEngine, ScriptedEngine]) as it:
        it.hosted[0].damage = 2
        report = it.sync.sync(1)
        assert (report.engines, report.left_out) == (2, 1)
        first, *others = it.pool.engines
        assert "damaged" in first.left_out and first.broken and [engine.version for engine in others] == [1, 1]
        it.trainer.scale = 2.0
        assert it.sync.sync(2).engines == 3, "it answers, and takes part again"
        it.expect(2, 2.0)


def test_no_engine_goes_back_to_an_older_version() -> None:
    """As after a restart, in which the trainer continues from a checkpoint and the engines live on."""
    with world([DirectEngine, ScriptedEngine]) as it:
        it.sync.sync(3, it.pool.engines[:1])
        it.restart_trainer()
        it.trainer.scale = 2.0
        assert it.sync.sync(2).engines == 2, "a later version counts as served"
        assert [engine.version for engine in it.pool.engines] == [hosted.version for hosted in it.hosted] == [3, 2]
        torch.testing.assert_close(it.hosted[0].loaded["v"], WEIGHTS["v"])


def test_engines_that_only_joined_are_not_lost_with_one_that_cannot_join() -> None:
    with world([DirectEngine, DirectEngine]) as it:

        async def refuse(update: Any) -> Any:
            raise WeightTransferError("no way to the sender")

        it.hosted[0].prepare_weights = refuse
        report = it.sync.sync(1)
        assert (report.engines, report.left_out) == (1, 1)
        assert it.pool.engines[1].version == it.hosted[1].version == 1
        assert "no way to the sender" in it.pool.engines[0].left_out


def test_who_is_blamed_for_a_lost_broadcast_is_left_out_alone() -> None:
    with world([DirectEngine, DirectEngine]) as it:
        send, culprit = it.trainer.send_weights, it.pool.engines[1].name

        def broken(update: Any) -> Any:
            send(update)
            if any(group.engine == culprit for group in update.receivers):
                error = WeightTransferError(f"weights: {culprit} is lost")
                error.engines = (culprit,)
                raise error

        it.trainer.send_weights = broken
        for hosted in it.hosted:
            hosted.damage = 1  # a broadcast that one receiver loses is lost to all
        it.hosted[1].damage = 2
        assert it.sync.sync(1).engines == 1
        first, second = it.pool.engines
        assert first.version == 1 and not first.broken and not first.left_out
        assert second.left_out and second.broken


@pytest.mark.parametrize("in_flight", ["keep", "wait"])
def test_a_trainer_that_dies_in_a_direct_update_leaves_engines_whose_requests_wait_for_the_next_version(
    in_flight: str,
) -> None:
    with world([DirectEngine, DirectEngine], latency_s=0.4, in_flight=in_flight) as it:
        it.sync.sync(1)
        it.trainer.on_weight = lambda name: _die_at(it, name)
        running = it.request(0, "running")
        with pytest.raises(ActorFailed) as failure:
            it.sync.sync(2)
        assert failure.value.died
        assert [engine.broken for engine in it.pool.engines] == [True, True]
        late = it.request(1, "late")
        it.restart_trainer()
        it.trainer.scale = 3.0
        assert not late.done() and (in_flight == "wait" or not running.done())
        pool = RolloutPool(
            SimpleNamespace(engines=it.pool, rollouts=[]),  # pyright: ignore[reportArgumentType]
            BothResident(it.sync),
            _Stages(),  # pyright: ignore[reportArgumentType]
            5.0,
        )
        pool.sync_broken(1)
        it.expect(1, 3.0)
        for answer in (running, late):
            [completion] = answer.result(10)
            assert completion.finish_reason == "stop" and set(completion.versions.tolist()) == {1}


class _Stuck(ScriptedEngine):
    """An engine that makes no token."""

    @property
    def progress(self) -> int:
        return 0


class _Stages:
    def timed(self, *args: Any) -> Any:
        return threading.Lock()


def _die_at(it: World, name: str) -> None:
    """End the trainer's process while the engines load."""
    if name == "v":
        deadline = time.monotonic() + 10.0
        while not all(hosted.partial for hosted in it.hosted):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        it._worker.kill()
        it.trainer._publisher._sender.close()
        raise SystemExit


# ---------------------------------------------------------------- requests that run for long


@pytest.mark.long
@pytest.mark.parametrize("kind", [ScriptedEngine, DirectEngine])
def test_wait_waits_for_requests_as_long_as_they_get_on(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(weight_sync, "MARGIN_S", 0.2)
    with world([kind], latency_s=2.5, timeout_s=0.4, in_flight="wait") as it:
        running = it.request(0, "long")
        report = it.sync.sync(1)
        assert running.done() and report.engines == 1 and report.pause_s > 1.0
        it.expect(1, 1.0)


@pytest.mark.long
def test_an_engine_whose_requests_stand_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "MARGIN_S", 0.2)
    monkeypatch.setattr(weight_sync, "HEALTH_S", 0.5)
    with world([_Stuck, ScriptedEngine], latency_s=60.0, timeout_s=0.4, in_flight="wait") as it:
        it.request(0, "stuck")
        started = time.monotonic()
        report = it.sync.sync(1)
        assert (report.engines, report.left_out) == (1, 1) and time.monotonic() - started < 30
        assert "no progress" in it.pool.engines[0].left_out


# ---------------------------------------------------------------- who died


def test_an_engine_that_died_within_a_living_actor_is_dead() -> None:
    with world([ScriptedEngine, ScriptedEngine]) as it:
        it.hosted[0].died = "its process is gone"
        it.pool.exclude(it.pool.engines[0], "a router found it dead")
        assert it.sync.sync(1).engines == 1
        assert it.pool.engines[0].dead and not it.pool.engines[1].dead
        it.hosted[1].died = "its process is gone, too"
        with pytest.raises(NoEngineLeft):
            it.pool.exclude(it.pool.engines[1], "died")
            it.sync.sync(2)
        assert it.pool.engines[1].dead
