"""Many episodes at once that wait, fail, hang and speak over HTTP: each is answered once or counted as failed."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("renderers")

from headrace.tests.actors.environments import episode_storm


@pytest.mark.long
def test_every_episode_is_answered_once_or_counted_as_failed() -> None:
    storm = asyncio.run(episode_storm.blow(1.0, 40))
    assert sum(storm.outcomes.values()) == storm.began
    assert storm.outcomes["fine"] and storm.outcomes["OSError"] and storm.outcomes["TimeoutError"], storm.outcomes
    assert set(storm.outcomes) <= {"fine", "OSError", "TimeoutError", "APITimeoutError"}, storm.outcomes
    assert (storm.sessions_left, storm.calls_left, storm.episodes_left) == (0, 0, 0)
