"""Tests the simulated engine against one that computes row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainers.simulation.simulate import SimulatedEngine

CHANGES = st.lists(
    st.tuples(st.sampled_from(["join", "join", "pause"]), st.floats(0, 5), st.integers(0, 2**31)),
    min_size=1,
    max_size=8,
)


def plainly(changes: list[tuple[str, float, np.ndarray | float]], decode_s: float, row_s: float) -> tuple[list, float]:
    """Compute row by row (when each group ends, seconds in which rows decoded). Changes are (kind, time, lengths or
    pause)."""
    now, stands_until, busy = 0.0, 0.0, 0.0
    left: list[list[float]] = []
    ends: list[float] = []
    for kind, at, what in [*changes, ("end", float("inf"), 0.0)]:
        while now < at and any(left):
            start = max(now, stands_until)
            if start >= at:
                break
            running = [tokens for group in left for tokens in group]
            token_s = decode_s + row_s * len(running)
            until = min(at, start + min(running) * token_s)
            busy += until - start
            done = (until - start) / token_s
            for number, group in enumerate(left):
                if group:
                    left[number] = [tokens - done for tokens in group if tokens - done > 1e-9]
                    if not left[number]:
                        ends[number] = until
            now = until
        now = at
        if kind == "join":
            left += [list(group) for group in np.asarray(what)]
            ends += [float("nan")] * len(np.asarray(what))
        elif kind == "pause":
            stands_until = max(now, stands_until) + float(what)  # type: ignore[arg-type]
    return ends, busy


@settings(max_examples=80)
@given(changes=CHANGES, row_s=st.sampled_from([0.0, 0.05]))
def test_groups_end_when_they_do_row_by_row(changes: list[tuple[str, float, int]], row_s: float) -> None:
    engine = SimulatedEngine(1000, 0.1, row_s)
    now, begun, story, ends = 0.0, 0, [], {}

    def until(time: float) -> None:
        while engine.next_end() <= time:
            at = engine.next_end()
            ends.update(dict.fromkeys(engine.take_ended(at), at))

    for kind, later, seed in changes:
        now += later
        until(now)
        if kind == "join":
            lengths = np.random.default_rng(seed).uniform(1, 40, (1 + seed % 3, 3))
            engine.join(now, range(begun, begun + len(lengths)), lengths)
            begun += len(lengths)
            story.append((kind, now, lengths))
        else:
            engine.pause(now, seed % 4)
            story.append((kind, now, float(seed % 4)))
    until(1e9)
    expected, busy = plainly(story, 0.1, row_s)
    assert [ends[number] for number in range(begun)] == pytest.approx(expected, abs=1e-6)
    assert engine.busy_s(1e9) == pytest.approx(busy, abs=1e-6)


def test_room_comes_when_rows_end() -> None:
    engine = SimulatedEngine(4, 1.0, 0.0)
    engine.join(0.0, [0], np.array([[5.0, 2.0, 3.0]]))
    assert (engine.room_at(0.0, 1), engine.room_at(0.0, 2), engine.room_at(0.0, 3)) == (0.0, 2.0, 3.0)
    assert (engine.running(1.9), engine.running(2.0), engine.running(5.0)) == (3, 2, 0)
    assert engine.next_end() == 5.0 and engine.take_ended(4.9) == [] and engine.take_ended(5.0) == [0]
