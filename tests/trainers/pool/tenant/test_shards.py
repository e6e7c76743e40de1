"""Tests shards: the order in which engines fall asleep and wake, and that what fails sleeps on with its GPU free."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.process.own_process import ActorInfo
from headrace.actors.weight_sync.transports.ipc import IpcSender
from headrace.actors.weight_sync.transports.protocol import WeightTransferError
from headrace.dataplane.owned_folder import pid_space, process_start
from headrace.tests.trainers.grpo.sync_world import DirectEngine, World, world
from headrace.trainers.cluster.calls import ActorFailed
from headrace.trainers.grpo import gpu_turns
from headrace.trainers.grpo.weight_sync import WeightSync
from headrace.trainers.pool.state.commands import Order, Outcome
from headrace.trainers.pool.state.plan import TenantMap
from headrace.trainers.pool.state.status import StageNote
from headrace.trainers.pool.tenant import shards
from headrace.trainers.pool.tenant.shards import Shards

RESIDUAL = 1 << 20


class Lent:
    """A world whose engines are the shards of a pool; `events` are the calls of engines, in their order."""

    def __init__(self, it: World, monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
        self.it, self.notes, self.engine_bytes = it, list[StageNote](), [0] * len(it.hosted)
        self.events = it.spy(monkeypatch, self.engine_bytes, "pause", "sleep", "commit_weights", "wake", "resume")
        monkeypatch.setattr(shards, "end_far_processes", lambda far, timeout_s: [])  # all engines live in this process
        self.sync = WeightSync(it.config, [it._worker], it.pool, lasting=False, in_cache=None)
        actors: Any = SimpleNamespace(engines=it.pool, workers=[it._worker], rollouts=[])
        own = TenantMap("a", 1.0, (0,), tuple((gpu,) for gpu in range(len(it.hosted))))
        for engine in it.pool.engines:
            engine.asleep = engine.broken = True
        self.shards = Shards(
            actors, self.sync, own, self.notes.extend, sleep_level=2, residual_bytes=RESIDUAL, timeout_s=timeout_s,
            cut=True,
        )  # fmt: skip
        self._orders = 0

    def order(self, kind: Any, *numbers: int) -> Outcome:
        """Carry out an order; returns its outcome."""
        self.events.clear()
        self._orders += 1
        return self.shards.carry_out(Order(self._orders, "a", kind, numbers, 0.0))


@contextmanager
def lent(
    monkeypatch: pytest.MonkeyPatch, kinds: Sequence[type[ScriptedEngine]], timeout_s: float = 5.0
) -> Iterator[Lent]:
    monkeypatch.setattr(IpcSender, "lasting", False)  # as in a run with a pool, the publisher keeps the versions
    with world(kinds, cache=True) as it:
        yield Lent(it, monkeypatch, timeout_s)


@pytest.mark.parametrize("kind", [ScriptedEngine, DirectEngine])
def test_an_engine_gets_the_newest_version_before_it_wakes(
    monkeypatch: pytest.MonkeyPatch, kind: type[ScriptedEngine]
) -> None:
    with lent(monkeypatch, [kind, kind]) as it:
        it.it.trainer.scale = 3.0
        it.sync.keep(3)
        assert it.order("expand", 0, 1) == Outcome("a", 1, (0, 1), {})
        told = [event for event in it.events if event.startswith(("commit", "wake"))]
        assert told == ["commit_weights 0", "commit_weights 1", "wake 0", "wake 1"]
        it.it.expect(3, 3.0)
        assert it.order("shrink", 1) == Outcome("a", 2, (1,), {})
        assert it.events == ["pause 1", "sleep 1"]
        it.it.trainer.scale = 4.0
        report = it.sync.sync(4)
        assert (report.engines, report.left_out) == (1, 0), "the other one sleeps by order"
        assert it.order("expand", 1).done == (1,)
        it.it.expect(4, 4.0)
        assert it.it.trainer.gathers == 2, "the host's memory serves those that wake"
        assert it.order("expand", 1).done == (1,), "an order that is repeated is done already"
        assert it.events == []
        kinds = [note.event for note in it.notes]
        assert kinds[:2] == ["sync", "wake"] and kinds[2:5] == ["drain", "sleep", "memory"]
        assert it.notes[2].gpus == (1,) and it.shards.count.resizes == 5


def test_a_version_that_does_not_come_whole_leaves_the_shard_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    with lent(monkeypatch, [ScriptedEngine]) as it:
        it.sync.keep(1)

        def broken(*_: Any) -> Any:
            raise WeightTransferError("a cable was pulled")

        monkeypatch.setattr(it.it.trainer, "send_cached", broken)
        monkeypatch.setattr(it.it.trainer, "open_cached", broken)
        outcome = it.order("expand", 0)
        [engine] = it.it.pool.engines
        assert outcome.done == () and "a cable was pulled" in outcome.failed[0]
        assert engine.asleep and engine.broken and not engine.dead and "wake 0" not in it.events
        assert it.events[-1] == "sleep 0"


def test_a_shard_that_finds_the_train_worker_dead_sleeps_on_and_tells_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "VERSION_S", 0.1)
    with lent(monkeypatch, [ScriptedEngine, ScriptedEngine]) as it:
        it.sync.keep(1)
        it.shards.check()
        it.it._worker.kill()
        outcome = it.order("expand", 0, 1)
        assert outcome.done == () and outcome.unready == (0, 1), "neither has failed"
        assert all("no version is kept since the train workers died" in why for why in outcome.failed.values())
        assert it.sync.kept is None, "no retry before another one is kept"
        with pytest.raises(ActorFailed, match="died") as raised:
            it.shards.check()
        assert raised.value.died
        it.shards.check()  # it is reported once
        assert all(engine.asleep and not engine.dead for engine in it.it.pool.engines)


def test_a_dead_train_worker_that_was_replaced_meanwhile_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "VERSION_S", 0.1)
    with lent(monkeypatch, [ScriptedEngine]) as it:
        it.sync.keep(1)
        it.it._worker.kill()
        assert it.order("expand", 0).unready == (0,)
        dead = it.it._worker.info
        monkeypatch.setattr(it.it._worker, "info", ActorInfo(dead.name, dead.pid + 1, dead.host))
        it.shards.check()


def test_a_shard_that_keeps_its_memory_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turns, "FALL_S", 0.1)
    with lent(monkeypatch, [ScriptedEngine, ScriptedEngine]) as it:
        it.sync.keep(1)
        it.order("expand", 0, 1)
        it.engine_bytes[1] = RESIDUAL + 1
        outcome = it.order("shrink", 0, 1)
        assert outcome.done == (0,) and "resources.residual_mib" in outcome.failed[1]
        first, second = it.it.pool.engines
        assert not first.dead and second.dead and second.asleep and it.it.pool.all_asleep


def test_a_shard_waits_for_a_version_while_the_train_workers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with lent(monkeypatch, [ScriptedEngine]) as it:

        def restart() -> None:
            with it.shards.kept():
                it.sync.keep(5)

        thread = threading.Timer(0.3, restart)
        thread.start()
        assert it.sync.kept is None
        assert it.order("expand", 0).done == (0,)
        thread.join()
        assert it.it.pool.engines[0].version == 5


def test_a_shard_without_any_version_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "VERSION_S", 0.1)
    with lent(monkeypatch, [ScriptedEngine]) as it:
        outcome = it.order("expand", 0)
        assert "no version is kept" in outcome.failed[0] and outcome.unready == (0,)


def test_seconds_asleep_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with lent(monkeypatch, [ScriptedEngine, ScriptedEngine]) as it:
        it.sync.keep(1)
        it.order("expand", 0, 1)
        assert it.shards.take_asleep_s() > 0
        assert it.shards.take_asleep_s() == 0, "both are awake"
        it.order("shrink", 0)
        assert 0 < it.shards.take_asleep_s() < 5


def test_an_engine_of_another_host_that_is_not_seen_dead_gives_no_gpu_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is not acknowledged: the run ends with this error, and the pool ends its processes."""
    ended: list[Any] = []
    monkeypatch.setattr(gpu_turns, "FALL_S", 0.1)
    with lent(monkeypatch, [ScriptedEngine]) as it:
        monkeypatch.setattr(shards, "end_far_processes", lambda far, timeout_s: far if not ended else [])
        it.sync.keep(1)
        it.order("expand", 0)
        [engine] = it.it.pool.engines
        monkeypatch.setattr(engine.handle, "info", ActorInfo("engine 0", 7, "far", space="elsewhere", start=1))
        it.engine_bytes[0] = RESIDUAL + 1
        with pytest.raises(ActorFailed, match=r"engine 0 \(pid 7 on far\) does not end, so its GPUs are not free"):
            it.order("shrink", 0)
        ended.append(True)
        engine.asleep = False
        assert 0 in it.order("shrink", 0).failed


@pytest.mark.processes
def test_what_an_engine_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's memory is that of vLLM's own process, which outlives the actor that has started it."""
    nested = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", nested]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as actor,
        lent(monkeypatch, [ScriptedEngine, ScriptedEngine]) as it,
    ):
        assert actor.stdout is not None
        child = psutil.Process(int(actor.stdout.readline()))
        info = ActorInfo("engine 0", actor.pid, "a name", space=pid_space(), start=process_start(actor.pid))
        handle: Any = SimpleNamespace(kill=actor.kill, info=info)
        engine: Any = SimpleNamespace(handle=handle, name="engine 0", dead=False, asleep=False, broken=False)
        it.shards._end(engine, "it keeps its memory")
        assert engine.dead and (not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
