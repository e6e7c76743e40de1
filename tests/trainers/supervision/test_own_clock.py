"""Tests the clock of judges: time in which the process did not run does not count."""

from __future__ import annotations

import pytest

from headrace.trainers.supervision import own_clock
from headrace.trainers.supervision.own_clock import OwnClock


def test_a_pause_counts_little_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(own_clock.time, "monotonic", lambda: now_s[0])
    clock = OwnClock(7.0, most_s=2.0)
    now_s[0] += 1.5
    assert clock.now_s() == 8.5 and not clock.was_away()
    now_s[0] += 3600.0
    assert clock.now_s() == 10.5
    now_s[0] += 1.0
    assert clock.now_s() == 11.5 and clock.was_away() and not clock.was_away()
    clock.turn_back(9.0)
    now_s[0] += 1.0
    assert clock.now_s() == 10.0
