"""The driver's list of engines: left out, taken back, and none left."""

from __future__ import annotations

import pytest

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
    with pytest.raises(NoEngineLeft, match="no engine is left of 2: engine 0: too slow; engine 1: died"):
        _ = found.active
