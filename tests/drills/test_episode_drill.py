"""500 episodes at once for five minutes, with random waits, errors, time-outs and agents: nothing is lost or left."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("renderers")

from headrace.tests.actors.environments import episode_storm

SECONDS, AT_ONCE = 300.0, 500


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_five_minutes_of_episodes_lose_none_and_leave_memory_flat() -> None:
    storm = asyncio.run(episode_storm.blow(SECONDS, AT_ONCE))
    assert sum(storm.outcomes.values()) == storm.began > 2 * AT_ONCE, storm.outcomes
    assert (storm.sessions_left, storm.calls_left, storm.episodes_left) == (0, 0, 0)
    half = len(storm.memory) // 2
    early, late = max(storm.memory[half // 2 : half]), max(storm.memory[half:])
    assert late < early + (32 << 20), (early >> 20, late >> 20)
