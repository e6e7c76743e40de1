"""The driver's list of engines: left out, taken back, and none left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.trainers.cluster import starting_actors
from headrace.trainers.cluster.calls import DriverMeter
from headrace.trainers.cluster.engine_pool import Engine, EnginePool, NoEngineLeft
from headrace.trainers.cluster.handles import EngineHandle


def engines() -> EnginePool:
    handles = [EngineHandle(lambda: None, f"engine {n}", DriverMeter()) for n in range(2)]
    return EnginePool([Engine(handle, 1) for handle in handles], embedded=False)


def test_the_first_reason_stays_and_listeners_hear_each_change_once() -> None:
    found, heard = engines(), []
    found.on_change.append(lambda engine: heard.append((engine.name, engine.left_out)))
    first, second = found.active
    found.exclude(first, "too slow")
    found.exclude(first, "dead")
    assert found.active == [second] and found.named("engine 0").left_out == "too slow"
    found.readmit(first)
    found.readmit(first)
    assert found.active == [first, second]
    assert heard == [("engine 0", "too slow"), ("engine 0", "")]


def test_with_none_left_the_error_says_what_became_of_each() -> None:
    found = engines()
    for engine, reason in zip(found.engines, ("too slow", "died"), strict=True):
        found.exclude(engine, reason)
    with pytest.raises(NoEngineLeft, match="none of the 2 engines can get requests: engine 0: too slow; engine 1"):
        _ = found.active


class Recorder:
    """A rollout actor's handle that notes the calls it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(engine: Any, *_: object) -> None:
            names = [one.info.name for one in engine] if isinstance(engine, list) else engine.info.name
            self.calls.append((name, names))

        return call


def test_every_rollout_actor_is_introduced_to_the_engines_and_hears_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for wait in ("started", "gather_each"):
        monkeypatch.setattr(starting_actors, wait, lambda calls, stage, timeout_s: [])
    found = engines()
    rollouts: list[Any] = [Recorder(), Recorder()]
    found.engines[1].asleep = True
    starting_actors._introduce(found, rollouts, 1.0)
    found.exclude(found.engines[0], "dead")
    found.readmit(found.engines[0])
    for rollout in rollouts:
        assert rollout.calls == [
            ("set_engines", ["engine 0", "engine 1"]),
            ("suspend_engine", "engine 1"),
            ("remove_engine", "engine 0"),
            ("suspend_engine", "engine 0"),
            ("add_engine", "engine 0"),
        ]
