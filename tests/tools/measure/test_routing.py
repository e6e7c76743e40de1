"""Tests of the simulated router: what the policies gain, and that engines of the simulation count right."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from headrace.tools.measure.routing import (
    BLOCK,
    EngineFigures,
    Episode,
    Trace,
    Turn,
    random_trace,
    shown_trace,
    simulate,
    speedups,
)


def test_one_engine_takes_as_long_as_its_figures_say() -> None:
    figures = EngineFigures(prefill_tokens_per_s=1000.0, step_s=0.01, row_s=0.001)
    episode = Episode(0, 10 * BLOCK, (Turn(0, 101, 0.0), Turn(BLOCK, 1, 2.0)))
    one = simulate(Trace((episode,), 1, 1, figures=figures), "least_loaded")
    again = 10 * BLOCK + 101 + BLOCK - 11 * BLOCK  # Whole blocks of the first turn are cached.
    expected = (0.01 + 0.64) + 100 * 0.011 + 2.0 + (0.01 + again / 1000)
    assert one.seconds == pytest.approx(expected) and one.computed == 10 * BLOCK + again
    assert one.tokens_per_s == pytest.approx(102 / expected) and one.idle_share == pytest.approx(2.0 / expected)


@pytest.mark.parametrize("num_engines", [2, 4])
def test_skewed_episodes_of_several_turns_gain_from_cached_prefixes(num_engines: int) -> None:
    whole = shown_trace(num_engines)
    found, sessions, stateless = speedups(whole)
    assert sessions >= 1.3 and stateless >= 1.3
    assert found["prefix"].computed <= 0.7 * found["least_loaded"].computed


def test_without_a_shared_prefix_or_with_one_engine_nothing_is_lost() -> None:
    for trace in (random_trace(10), random_trace(15), shown_trace(1)):
        assert speedups(replace(trace, episodes=trace.episodes[:64]))[1:] == (1.0, 1.0)


@pytest.mark.slow
def test_fifty_random_traces_lose_nothing() -> None:
    gains = {seed: speedups(random_trace(seed))[1] for seed in range(50)}
    assert min(gains.values()) >= 0.995, min(gains.items(), key=lambda one: one[1])
    assert statistics.geometric_mean(gains.values()) >= 1.1
