"""Tests which spans the timeline keeps, and that viewers can draw them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.protocols import Span
from headrace.tests.trainers.observe.trace_events import complete, crossing, lanes, names
from headrace.trainers.observe.trace import JITTER_S, Tracer, trace_events


def drawn(*spans: Span) -> list[dict[str, Any]]:
    """Return the events of one process whose spans came in one report."""
    return trace_events({"p": [spans]})


def run_steps(tracer: Tracer, steps: Sequence[int]) -> None:
    for step in steps:
        tracer.begin_step(step)
        with tracer.span(f"rollout {step}") as span:
            time.sleep(0.002)
        assert 0.002 <= span.dur_s < 1  # timed in every step
        now = time.time()
        tracer.add("train worker 0", [Span(f"train {step}", now, 0.0), Span("stale", now - 60, 0.5)])


def test_only_the_window_is_kept_and_written_as_soon_as_it_is_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(2, 2, path)
    run_steps(tracer, (1, 2, 3))
    assert not path.exists()
    run_steps(tracer, (4, 5))
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    assert [event["name"] for event in complete(events)] == ["step 2", "step 3", "rollout 2", "rollout 3",
                                                             "train 2", "train 3"]  # fmt: skip
    assert list(names(events, "process").values()) == ["driver", "train worker 0"]
    assert document["metadata"] == {"step": 2, "num_steps": 2}
    assert tracer.write() and json.loads(path.read_text()) == document
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("step", [0, 5])
def test_a_step_never_reached_leaves_no_file(tmp_path: Path, step: int) -> None:
    tracer = Tracer(step, 1, tmp_path / "trace.json")
    tracer.begin_step(0)
    tracer.begin_step(1)
    with tracer.span("rollout"):
        pass
    assert not tracer.write()
    assert not (tmp_path / "trace.json").exists()


def test_spans_that_reach_into_the_window_are_kept_whenever_they_are_told_of(tmp_path: Path) -> None:
    tracer = Tracer(2, 1)
    tracer.begin_step(1)
    began = time.time()
    tracer.begin_step(2)
    inside = time.time()
    tracer.add("rollout 0", [Span("generate 0-3", began - 5, 5.0 + 1e-3 + inside - began)])
    tracer.begin_step(3)
    behind = time.time() + 1e-3
    # A rollout that began in the window ends long after it, and is reported then; the put after it is of later steps.
    tracer.add("rollout 0", [Span("generate 4-7", inside, 60.0), Span("put", behind + 60, 0.1)])
    tracer.add("rollout 0", [Span("generate 8-11", behind, 1.0)])
    tracer.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert lanes(events) == {"step 2": "steps", "generate 0-3": "generation 1", "generate 4-7": "generation 2"}
    generated = {event["name"]: event["dur"] for event in complete(events)}
    assert generated["generate 4-7"] == pytest.approx(60e6) and generated["generate 0-3"] > 5e6


def test_processes_tell_one_step_longer_of_what_they_did_in_the_window() -> None:
    tracer = Tracer(2, 2)
    told, awaited = [], []
    for step in range(1, 7):
        tracer.begin_step(step)
        told.append(tracer.recording)
        awaited.append(tracer.awaited)
    assert told == [False, True, True, True, False, False]
    assert awaited == [True, True, True, False, False, False], "a rollout may reach into the window from before it"
    assert not Tracer(0).awaited


def test_a_run_that_goes_back_to_a_checkpoint_before_the_window_traces_it_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(2, 2, path)
    run_steps(tracer, (1, 2))
    time.sleep(0.001)
    run_steps(tracer, (1, 2, 3, 4))
    shown = [event["name"] for event in complete(json.loads(path.read_text())["traceEvents"])]
    assert [name for name in shown if name.startswith("step")] == ["step 2", "step 3"]
    assert shown.count("rollout 2") == 1


def test_a_span_that_raises_is_timed_and_kept(tmp_path: Path) -> None:
    tracer = Tracer(1)
    tracer.begin_step(1)
    with pytest.raises(RuntimeError), tracer.span("train"):
        raise RuntimeError
    tracer.write(tmp_path / "trace.json")
    assert '"train"' in (tmp_path / "trace.json").read_text()


def test_times_count_from_the_first_span_in_microseconds() -> None:
    events = trace_events({"driver": [[Span("b", 100.5, 0.25)]], "worker": [[Span("a", 100.0, 1.0)]]})
    assert [(event["name"], event["ts"], event["dur"]) for event in complete(events)] == [
        ("b", 500000, 250000),
        ("a", 0, 1000000),
    ]


def test_each_kind_of_work_has_its_lane() -> None:
    events = drawn(
        Span("generate 0-7", 0.0, 3.0), Span("first group", 0.0, 1.0), Span("tail", 2.0, 1.0), Span("reward", 1.0, 0.1),
        Span("put", 1.1, 0.1), Span("read 0", 3.0, 0.5), Span("wait 0", 3.2, 0.3), Span("forward backward", 3.1, 2.0),
        Span("send weights", 5.1, 1.0), Span("rollout", 0.0, 3.0),
    )  # fmt: skip
    assert lanes(events) == {
        "generate 0-7": "generation", "first group": "generation", "tail": "generation", "reward": "reward",
        "put": "put", "read 0": "get", "wait 0": "wait for rows", "forward backward": "compute",
        "send weights": "sync", "rollout": "stages",
    }  # fmt: skip
    assert crossing(events) == []
    assert {event["name"]: event["cat"] for event in complete(events)}["tail"] == "generation"


def test_nested_spans_share_a_lane_and_crossing_ones_do_not() -> None:
    events = drawn(
        Span("train", 0.0, 10.0),
        Span("rollout", 0.0, 4.0),
        Span("plan", 4.0, 3.0),
        Span("episode 1", 20.0, 3.0),
        Span("episode 2", 21.0, 3.0),
        Span("episode 3", 23.5, 1.0),
    )
    assert lanes(events) == {"train": "stages 1", "rollout": "stages 1", "plan": "stages 1", "episode 1": "stages 1",
                             "episode 2": "stages 2", "episode 3": "stages 1"}  # fmt: skip
    assert crossing(events) == []


def test_a_rollout_call_keeps_its_parts_and_takes_in_no_other() -> None:
    calls = [
        [Span("generate 0-7", 0.0, 10.0), Span("first group", 0.0, 1.0), Span("tail", 8.0, 2.0)],
        # The second call's time, and that of its parts, lies within the first's.
        [Span("generate 8-15", 2.0, 7.0), Span("first group", 2.0, 1.0), Span("tail", 8.5, 0.5)],
        [Span("generate 16", 10.0, 1.0)],
    ]
    events = trace_events({"rollout 0": calls})
    lane = names(events, "thread")
    drawn = [(event["name"], lane[event["pid"], event["tid"]]) for event in complete(events)]
    assert sorted(drawn) == [
        ("first group", "generation 1"), ("first group", "generation 2"), ("generate 0-7", "generation 1"),
        ("generate 16", "generation 1"), ("generate 8-15", "generation 2"), ("tail", "generation 1"),
        ("tail", "generation 2"),
    ]  # fmt: skip
    assert crossing(events) == []


def test_clock_jitter_is_trimmed_and_not_given_a_lane() -> None:
    late = JITTER_S / 2
    events = drawn(Span("step", 0.0, 2.0), Span("a", 0.0, 1.0 + late), Span("b", 1.0, 1.0 + late))
    assert {event["tid"] for event in complete(events) if event["name"] != "step"} == {2}
    assert crossing(events) == []


def test_random_spans_never_cross_in_a_lane() -> None:
    source = random.Random(3)
    kinds = ("generate", "put", "read", "forward", "rollout")
    spans = [Span(f"{source.choice(kinds)} {i}", source.uniform(0, 5), source.uniform(0, 2)) for i in range(150)]
    events = drawn(*spans)
    assert len(complete(events)) == 150 and crossing(events) == []
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete(events))


def test_a_span_outside_the_kept_step_costs_microseconds() -> None:
    tracer = Tracer(0)
    start = time.thread_time()  # of this thread only, as other processes may have the cores
    for _ in range(2000):
        with tracer.span("x"):
            pass
    assert (time.thread_time() - start) / 2000 < 50e-6


def test_a_timeline_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(1, 1, tmp_path / "removed" / "trace.json")
    for step in (1, 2, 3):
        tracer.begin_step(step)
    assert "the timeline is not written: [Errno 2]" in caplog.text
