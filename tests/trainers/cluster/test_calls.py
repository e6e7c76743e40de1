"""Slow is not stuck: a wait lasts as long as actors make progress, and ends when they do not answer or stand still."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayActorError

from headrace.testing import PENDING, FakeCluster
from headrace.trainers.cluster import calls
from headrace.trainers.cluster.calls import ActorFailed, ProgressWatch, gather, gather_slow


class Clock:
    """Time that passes by a second at every wait for a call."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, ended = Clock(), calls.ended

    def wait(calls: Any, stage: str, timeout_s: float) -> Any:
        clock.now += timeout_s
        return ended(calls, stage, 0.0)

    monkeypatch.setattr(calls, "ended", wait)
    monkeypatch.setattr(calls.time, "monotonic", clock.monotonic)
    return clock


def test_a_save_may_take_as_long_as_its_worker_gets_on(clock: Clock) -> None:
    """Ten times as long as a worker may be silent, and as long as everything may stand still."""

    def answer(method: str) -> Any:
        return int(clock.now) if method == "progress" else None if clock.now > 1000 else PENDING

    looks: list[float] = []
    worker = FakeCluster().trainer(answer)
    found = gather_slow(
        [worker.save("/nowhere")], [worker], "checkpoint", silence_s=20, stall_s=100,
        on_look=lambda: looks.append(clock.now),
    )  # fmt: skip
    assert found == [None] and clock.now > 1000
    assert max(later - earlier for earlier, later in zip(looks, looks[1:], strict=False)) <= 2, "the watchdog hears it"


def test_bytes_on_the_disk_are_progress(clock: Clock) -> None:
    """The workers' threads that run calls wait for the one that writes."""

    def answer(method: str) -> Any:
        return 7 if method == "progress" else None if clock.now > 1000 else PENDING

    worker = FakeCluster().trainer(answer)
    found = gather_slow(
        [worker.wait_saved()], [worker], "checkpoint", silence_s=20.0, stall_s=100.0,
        num_bytes=lambda: int(clock.now / 50),
    )  # fmt: skip
    assert found == [None]


def test_nothing_written_and_nothing_computed_is_stuck(clock: Clock) -> None:
    worker = FakeCluster().trainer(lambda method: 7 if method == "progress" else PENDING)
    with pytest.raises(
        ActorFailed, match="checkpoint: train worker 0 .* wrote and computed nothing for 100 s"
    ) as failed:
        gather_slow([worker.wait_saved()], [worker], "checkpoint", silence_s=20, stall_s=100)
    assert 100 <= clock.now <= 110 and failed.value.cause is None and not failed.value.died


def test_a_worker_that_does_not_answer_is_stuck_sooner_and_named(clock: Clock) -> None:
    slow = FakeCluster().trainer(lambda method: int(clock.now) if method == "progress" else PENDING)
    hung = FakeCluster().trainer(lambda method: PENDING, 1)
    with pytest.raises(ActorFailed, match="no answer to progress queries within 20 s from train worker 1 "):
        gather_slow([slow.save("/a"), hung.save("/a")], [slow, hung], "checkpoint", silence_s=20, stall_s=100)
    assert 20 <= clock.now <= 25


def test_still_and_silent_are_told_apart(clock: Clock) -> None:
    figure: list[Any] = [1]
    engine = FakeCluster().engine(lambda method: figure[0])
    watch = ProgressWatch([engine])
    for _ in range(5):
        clock.now += 2
        watch.look()
    assert watch.still_s(engine) > 5 and watch.silent_s(engine) == 0
    figure[0] = 2
    clock.now += 2
    assert watch.look()[0] and watch.still_s(engine) == 0
    figure[0] = PENDING
    clock.now += 2
    watch.look()
    for _ in range(15):
        clock.now += 2
        watch.look()
    assert watch.silent_s(engine) > 30
    clock.now += 1000
    assert watch.silent_s(engine) < 40, "nothing was asked meanwhile: this process was stopped"


def test_a_driver_that_was_stopped_does_not_find_its_actors_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for an hour in its wait; the answer comes with the next look."""
    clock, waits = Clock(), list[float]()
    monkeypatch.setattr(calls.time, "monotonic", clock.monotonic)
    worker = FakeCluster().trainer(lambda method: 7 if len(waits) > 1 else PENDING)
    ended = calls.ended

    def wait(asked: Any, stage: str, timeout_s: float) -> Any:
        waits.append(timeout_s)
        clock.now += timeout_s if waits[1:] else 3600
        return ended(asked, stage, 0.0)

    monkeypatch.setattr(calls, "ended", wait)
    assert gather([worker.progress()], "health", 60.0) == [7]
    waits.clear()
    clock.now = 0.0
    with pytest.raises(ActorFailed, match="no answer within 60 s"):
        gather([FakeCluster().trainer(lambda method: PENDING).progress()], "health", 60.0)
    assert sum(waits) == 60.0


def test_calls_of_an_actor_that_was_ended_tell_why_and_not_that_it_was() -> None:
    cluster = FakeCluster()
    worker = cluster.trainer(lambda method: RayActorError())
    first = worker.progress()
    worker.kill("was stuck in badenv.py:9 (play) for 15 s, and was ended")
    with pytest.raises(ActorFailed, match=r"train worker 0 .*was stuck in badenv.py:9 \(play\) for") as told:
        gather([first], "rollout", 1.0)
    assert told.value.died and "on request" not in str(told.value)
    worker.restart()
    with pytest.raises(ActorFailed, match="died; the call progress was in flight"):
        gather([worker.progress()], "rollout", 1.0)
