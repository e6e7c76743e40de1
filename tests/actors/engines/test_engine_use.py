"""Tests of the figures about engines in the reports of rollout actors."""

from __future__ import annotations

import asyncio

import pytest

from headrace.actors.engines.engine_use import EngineMeter, EngineUse, added_uses, engine_metrics
from headrace.actors.engines.protocol import EngineStats
from headrace.actors.engines.router import Router
from headrace.actors.engines.scripted import ScriptedEngine, random_tokens


def test_a_meter_reports_what_engines_did_since_the_last_report() -> None:
    async def main() -> None:
        router, engine = Router(timeout_s=1.0), ScriptedEngine(random_tokens(10))
        router.add("e0", engine)
        engine.stats.prompt_tokens = 1000
        meter = EngineMeter("rollout 0", router)
        engine.stats.busy_s, engine.stats.prompt_tokens, engine.stats.cached_tokens = 2.0, 1300, 60
        used = meter.take()["e0"]
        assert (used.busy_s, used.prompt_tokens, used.cached_tokens) == (2.0, 300, 60) and used.seconds > 0
        assert meter.take()["e0"].prompt_tokens == 0
        engine.stats = EngineStats(busy_s=0.5, prompt_tokens=70)  # The engine was replaced.
        assert meter.take()["e0"].prompt_tokens == 70
        alone = EngineMeter("rollout 0", engine)
        engine.stats.prompt_tokens += 5
        assert {name: use.prompt_tokens for name, use in alone.take().items()} == {"rollout 0": 5}

    asyncio.run(main())


def test_reports_are_added_by_engine_and_give_shares() -> None:
    first = {"e0": EngineUse(10.0, 9.0, 100, 50), "e1": EngineUse(10.0, 2.0, 100, 10)}
    added = added_uses([first, {"e0": EngineUse(10.0, 9.0, 200, 40)}])
    assert added == {"e0": EngineUse(20.0, 18.0, 300, 90), "e1": EngineUse(10.0, 2.0, 100, 10)}
    assert engine_metrics(added) == {
        "engine/idle_share": pytest.approx(0.45),
        "engine/idle_share_max": pytest.approx(0.8),
        "engine/prefix_hit_share": pytest.approx(0.25),
    }
    assert engine_metrics({"e0": EngineUse(10.0, 20.0)}) == {"engine/idle_share": 0.0, "engine/idle_share_max": 0.0}
    assert engine_metrics({}) == {}
    drafted = {"e0": EngineUse(drafts=40, accepted_tokens=30), "e1": EngineUse(drafts=10, accepted_tokens=5)}
    assert engine_metrics(drafted) == {"engine/accepted_tokens": pytest.approx(0.7)}
