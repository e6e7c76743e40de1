"""Tests the simulation against results worked out by hand or row by row and against rules for all figures."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainers.config.config import Config
from headrace.trainers.simulation.config import SimulationConfig
from headrace.trainers.simulation.scenario import MODES, Mode, Scenario, build_scenario
from headrace.trainers.simulation.simulate import SimulatedEngine, SimulatedRun, simulate

PLAIN = replace(
    build_scenario(Config(), SimulationConfig(), {}), steps=8, prompts_per_step=4, group_size=2, num_engines=1,
    engine_rows=8, sampler=dict.fromkeys(MODES, "in_order"), in_flight="keep", response_tokens=100.0,
    response_sigma=0.0, prompt_tokens=0.0, max_response_tokens=1e9, decode_s=0.1, train_token_s=0.0,
    logprob_token_s=0.0, train_step_s=7.0, chunk_groups=1, controller_s=0.0, sync_s=2.0, pause_s=0.0, call_s=0.0,
    put_bytes=0.0, got_bytes=0.0, directory_put_s=0.0, directory_claim_s=0.0, directory_row_s=0.0,
)  # fmt: skip
"""A scenario in which generating a step takes 10 s, training 7 s and the sync 2 s."""


def scenario(**changes: Any) -> Scenario:
    """Return the plain scenario with changes; `sampler` applies to all modes."""
    if "sampler" in changes:
        changes["sampler"] = dict.fromkeys(MODES, changes["sampler"])
    return replace(PLAIN, **changes)


GENERATE, TRAIN, SYNC = 10.0, 7.0, 2.0
"""Seconds of a step of the plain scenario."""


def step_s(case: Scenario, mode: Mode) -> float:
    """Return the seconds of the last step, when the run has settled."""
    return simulate(case, mode).steps[-1].seconds


def test_sync_takes_generation_and_training_and_sync() -> None:
    run = simulate(scenario(), "sync")
    assert [step.seconds for step in run.steps] == pytest.approx([GENERATE + TRAIN + SYNC] * 8)
    assert [step.trainer_busy_s for step in run.steps] == pytest.approx([TRAIN] * 8)
    assert [step.engines_busy_s for step in run.steps] == pytest.approx([GENERATE] * 8)
    assert run.started == run.trained == 32


@pytest.mark.parametrize("train", [7.0, 12.0])
def test_async_takes_the_longer_of_generation_and_the_trainer(train: float) -> None:
    case = scenario(train_step_s=train)
    assert step_s(case, "async") == pytest.approx(max(GENERATE, train + SYNC))


def test_with_room_for_two_steps_async_overlaps_generations() -> None:
    """Batch k + 1 begins when version k is served. A step therefore takes (generation + trainer) / 2, but at least the
    trainer's time."""
    case = scenario(num_engines=2, train_step_s=3.0)
    run = simulate(case, "async")
    assert (run.steps[-1].end_s - run.steps[-3].end_s) / 2 == pytest.approx((GENERATE + 3.0 + SYNC) / 2)


def test_engines_that_pause_in_a_sync_lose_that_time() -> None:
    assert step_s(scenario(pause_s=SYNC), "async") == pytest.approx(GENERATE + SYNC)


def test_waiting_for_running_requests_puts_the_sync_behind_them() -> None:
    assert step_s(scenario(in_flight="wait"), "async") == pytest.approx(max(GENERATE, TRAIN) + SYNC)


def test_rows_beyond_an_engines_room_come_in_waves() -> None:
    assert step_s(scenario(engine_rows=4), "sync") == pytest.approx(2 * GENERATE + TRAIN + SYNC)
    assert step_s(scenario(engine_rows=4, num_engines=2), "sync") == pytest.approx(GENERATE + TRAIN + SYNC)


def test_each_row_of_a_batch_slows_the_others() -> None:
    slower = scenario(decode_row_s=0.01)
    assert step_s(slower, "sync") == pytest.approx(100 * (0.1 + 8 * 0.01) + TRAIN + SYNC)


def test_data_plane_and_tokens_cost_what_they_should() -> None:
    case = scenario(
        call_s=0.5, put_bytes=2.0, got_bytes=3.0, gib_per_s=100 / 2**30, train_token_s=0.01, logprob_token_s=0.005,
        train_row_s=0.1, chunk_s=0.25, plan_s=0.125, prompt_tokens=50.0, request_s=1.5, controller_s=0.75,
    )  # fmt: skip
    group, rows = 2 * 150.0, 8
    put = 1.5 + 0.5 + 4 * group * 2.0 / 100  # Groups that end at the same time are put together.
    read = 0.125 + 2 * 0.5 + 4 * group * 3.0 / 100
    train = 0.25 + rows * 0.1 + 4 * group * 0.015 + TRAIN
    step = simulate(case, "sync").steps[-1]
    assert step.seconds == pytest.approx(GENERATE + put + read + train + 0.75 + SYNC)
    assert step.trainer_busy_s == pytest.approx(train)


@pytest.mark.parametrize("sampler", ["in_order", "ready_first"])
def test_streaming_hides_training_under_the_tail(sampler: str) -> None:
    """The trainer works whenever groups are ready. A step ends at the maximum over k of (time of the k-th ready group +
    training of it and all later ones)."""
    case = scenario(
        sampler=sampler, response_sigma=1.0, prompt_share=1.0, train_step_s=0.5, train_token_s=0.02, steps=5,
    )  # fmt: skip
    lengths = case.draw_lengths(20)
    run = simulate(case, "streaming")
    for number, step in enumerate(run.steps):
        of_step = lengths[4 * number : 4 * number + 4]
        ready, cost = of_step.max(axis=1) * case.decode_s, of_step.sum(axis=1) * case.train_token_s
        if sampler == "in_order":
            ready = np.maximum.accumulate(ready)
        order = np.argsort(ready)
        left = np.cumsum(cost[order][::-1])[::-1]
        assert step.seconds == pytest.approx((ready[order] + left).max() + 0.5 + SYNC)
    sync = simulate(case, "sync").steps
    assert sum(step.seconds for step in run.steps) < sum(step.seconds for step in sync)


def test_what_overtakes_saves_time_and_what_is_overtaken_may_become_too_old() -> None:
    case = scenario(
        response_sigma=1.0, prompt_share=1.0, train_row_s=2.0, train_step_s=0.0, steps=40, prompts_per_step=8,
        engine_rows=32,
    )  # fmt: skip
    seconds, dropped = {}, {}
    for sampler in ("in_order", "windowed", "ready_first", "oldest_version_first"):
        named = replace(case, sampler=dict.fromkeys(MODES, sampler), window=4)
        run = simulate(named, "async")
        seconds[sampler], dropped[sampler] = run.steps[-1].end_s, run.dropped
    assert seconds["ready_first"] < seconds["windowed"] < seconds["in_order"]
    assert dropped["in_order"] == 0 < dropped["ready_first"]
    assert dropped["oldest_version_first"] <= dropped["ready_first"]


def test_streaming_waits_for_whole_chunks() -> None:
    case = scenario(
        sampler="ready_first", response_sigma=1.0, prompt_share=1.0, chunk_groups=3, train_row_s=1.0, steps=1,
    )  # fmt: skip
    ready = np.sort(case.draw_lengths(4).max(axis=1) * case.decode_s)
    first = ready[2] + 6.0
    assert step_s(case, "streaming") == pytest.approx(max(first, ready[3]) + 2.0 + TRAIN + SYNC)


CASES = st.fixed_dictionaries(
    {
        "prompts_per_step": st.integers(1, 6), "group_size": st.integers(1, 4), "num_engines": st.integers(1, 3),
        "engine_rows": st.integers(4, 12),
        "sampler": st.sampled_from(["in_order", "windowed", "ready_first", "oldest_version_first"]),
        "window": st.integers(1, 5), "in_flight": st.sampled_from(["keep", "wait", "abort"]),
        "response_sigma": st.sampled_from([0.0, 0.7, 1.5]), "prompt_share": st.sampled_from([0.0, 1.0]),
        "decode_row_s": st.sampled_from([0.0, 0.02]), "chunk_groups": st.integers(1, 8),
        "train_row_s": st.floats(0, 5), "request_s": st.floats(0, 5), "sync_s": st.just(3.0),
        "pause_s": st.sampled_from([0.0, 1.0, 3.0]), "call_s": st.sampled_from([0.0, 0.01]),
        "seed": st.integers(0, 1000),
    }
)  # fmt: skip


@settings(max_examples=60)
@given(changes=CASES, ahead=st.integers(1, 3), streaming_ahead=st.integers(0, 2))
def test_whatever_the_figures_groups_are_conserved_and_staleness_is_bounded(
    changes: dict, ahead: int, streaming_ahead: int
) -> None:
    case = scenario(
        **changes,
        steps=6,
        staleness={"sync": 0, "async": ahead, "streaming": streaming_ahead, "async_streaming": ahead},
    )
    for mode in MODES:
        run = simulate(case, mode)
        assert run.trained == 6 * case.prompts_per_step
        assert run.started == run.trained + run.dropped + run.ready + run.in_flight
        assert max(step.staleness_max for step in run.steps) <= case.staleness[mode]
        assert run.dropped == 0 or case.sampler[mode] != "in_order"
        assert min(run.depth_ready) >= 0 and min(run.depth_in_flight) >= 0
        allowed = (case.staleness[mode] + 1) * case.prompts_per_step
        if case.sampler[mode] != "in_order":  # others begin in the place of groups that are too old and still decode
            allowed += run.dropped + run.in_flight
        assert max(np.add(run.depth_ready, run.depth_in_flight)) <= allowed
        assert sum(step.seconds for step in run.steps) == pytest.approx(run.steps[-1].end_s)
        assert all(step.trainer_busy_s <= step.seconds + 1e-9 for step in run.steps)
        bound = case.num_engines * run.steps[-1].end_s
        assert sum(step.engines_busy_s for step in run.steps) <= bound + 1e-6


@settings(max_examples=20)
@given(changes=CASES)
def test_the_same_seed_is_the_same_run_and_strict_streaming_is_no_slower_than_sync(changes: dict) -> None:
    case = scenario(**changes)
    runs: list[SimulatedRun] = [simulate(case, "streaming"), simulate(case, "streaming")]
    assert runs[0] == runs[1]
    if case.call_s == 0:
        assert runs[0].steps[-1].end_s <= simulate(case, "sync").steps[-1].end_s + 1e-6
    other = replace(case, seed=case.seed + 1, response_sigma=1.0)
    assert simulate(other, "sync").steps != runs[0].steps


def test_a_cluster_of_thousands_takes_seconds() -> None:
    """The case is a tenth of a run of 100 steps with engines on 2048 GPUs and 32768 rows per step."""
    case = scenario(
        steps=10, prompts_per_step=2048, group_size=16, num_engines=256, engine_rows=192, response_sigma=1.0,
        response_tokens=2000.0, decode_row_s=1e-4, train_row_s=1e-3, max_response_tokens=30_000.0,
    )  # fmt: skip
    started = time.perf_counter()
    run = simulate(case, "async")
    assert run.trained == 20_480
    assert time.perf_counter() - started < 20.0, "about a second here"


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
