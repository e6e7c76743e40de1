"""The timeline: which spans are kept, and that viewers can draw them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.protocols import Span
from headrace.trainers.trace import JITTER_S, Tracer, trace_events


def complete(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def crossing(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of spans of one lane that neither nest nor stay apart."""
    found = []
    drawn = complete(events)
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            if (a["pid"], a["tid"]) != (b["pid"], b["tid"]):
                continue
            first, second = sorted((a, b), key=lambda event: (event["ts"], -event["dur"]))
            end = first["ts"] + first["dur"]
            if second["ts"] < end - 0.2 and second["ts"] + second["dur"] > end + 0.2:
                found.append((first["name"], second["name"]))
    return found


def test_only_the_chosen_step_is_kept(tmp_path: Path) -> None:
    tracer = Tracer(2)
    for step in (1, 2, 3):
        tracer.begin_step(step)
        with tracer.span(f"rollout {step}") as span:
            time.sleep(0.002)
        assert 0.002 <= span.dur_s < 1  # timed in every step
        now = time.time()
        tracer.add("train worker 0", [Span(f"train {step}", now, 0.5), Span("stale", now - 60, 0.5)])
    assert tracer.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in complete(document["traceEvents"])] == ["rollout 2", "train 2"]
    processes = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert list(processes.values()) == ["driver", "train worker 0"]
    assert document["metadata"] == {"step": 2}


@pytest.mark.parametrize("step", [0, 5])
def test_a_step_never_reached_leaves_no_file(tmp_path: Path, step: int) -> None:
    tracer = Tracer(step)
    tracer.begin_step(0)
    tracer.begin_step(1)
    with tracer.span("rollout"):
        pass
    assert not tracer.write(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


def test_a_span_that_raises_is_timed_and_kept(tmp_path: Path) -> None:
    tracer = Tracer(1)
    tracer.begin_step(1)
    with pytest.raises(RuntimeError), tracer.span("train"):
        raise RuntimeError
    tracer.write(tmp_path / "trace.json")
    assert '"train"' in (tmp_path / "trace.json").read_text()


def test_times_count_from_the_first_span_in_microseconds() -> None:
    events = trace_events({"driver": [Span("b", 100.5, 0.25)], "worker": [Span("a", 100.0, 1.0)]})
    assert [(event["name"], event["ts"], event["dur"]) for event in complete(events)] == [
        ("b", 500000.0, 250000.0),
        ("a", 0.0, 1000000.0),
    ]


def test_nested_spans_share_a_lane_and_crossing_ones_do_not() -> None:
    spans = [
        Span("step", 0.0, 10.0),
        Span("rollout", 0.0, 4.0),
        Span("train", 4.0, 3.0),
        Span("episode 1", 20.0, 3.0),
        Span("episode 2", 21.0, 3.0),
        Span("episode 3", 23.5, 1.0),
    ]
    events = trace_events({"p": spans})
    lanes = {event["name"]: event["tid"] for event in complete(events)}
    assert lanes == {"step": 1, "rollout": 1, "train": 1, "episode 1": 1, "episode 2": 2, "episode 3": 1}
    assert crossing(events) == []


def test_clock_jitter_is_trimmed_and_not_given_a_lane() -> None:
    late = JITTER_S / 2
    events = trace_events({"p": [Span("step", 0.0, 2.0), Span("a", 0.0, 1.0 + late), Span("b", 1.0, 1.0 + late)]})
    assert {event["tid"] for event in complete(events)} == {1}
    assert crossing(events) == []


def test_random_spans_never_cross_in_a_lane() -> None:
    import random

    source = random.Random(3)
    spans = [Span(str(i), source.uniform(0, 5), source.uniform(0, 2)) for i in range(60)]
    events = trace_events({"p": spans})
    assert len(complete(events)) == 60
    assert crossing(events) == []


def test_a_span_outside_the_kept_step_costs_microseconds() -> None:
    tracer = Tracer(0)
    start = time.perf_counter()
    for _ in range(2000):
        with tracer.span("x"):
            pass
    assert (time.perf_counter() - start) / 2000 < 50e-6
