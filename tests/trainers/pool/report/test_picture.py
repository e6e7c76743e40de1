"""Tests the picture of a pool: lanes from events, their figures, and the page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from headrace.trainers.errors import UserError
from headrace.trainers.pool.report.calls import PoolEvent
from headrace.trainers.pool.report.lanes import Segment, pool_trace
from headrace.trainers.pool.report.picture import pool_report


def event(t: float, gpu: int, tenant: str, role: str, what: str, seconds: float | None = None) -> PoolEvent:
    """Return an event; without `seconds`, that key is absent."""
    told = {"t": t, "gpu": gpu, "tenant": tenant, "role": role, "event": what}
    return PoolEvent(**told if seconds is None else told | {"seconds": seconds})  # pyright: ignore[reportArgumentType]


def events() -> list[PoolEvent]:
    """Return the events of two GPUs: `a` generates on both, and then `b` trains on the first, after 3 s of waiting."""
    return [
        event(0.0, 0, "a", "rollout", "grant"),
        event(0.0, 1, "a", "rollout", "grant"),
        event(1.0, 0, "a", "rollout", "wake", 1.0),
        event(3.0, 0, "a", "rollout", "sync", 2.0),
        event(40.0, 0, "a", "rollout", "shrink", 0.0),
        event(41.0, 0, "a", "rollout", "drain", 1.0),
        event(42.0, 0, "a", "rollout", "sleep", 1.0),
        event(42.0, 0, "a", "rollout", "release"),
        event(43.0, 0, "b", "train", "grant", 3.0),
        event(44.0, 0, "b", "train", "onload", 1.0),
        event(90.0, 0, "b", "train", "offload", 2.0),
        event(90.0, 0, "b", "train", "release"),
        event(100.0, 1, "a", "rollout", "shrink", 0.0),
    ]


def test_lanes_say_who_had_each_gpu_when() -> None:
    trace = pool_trace(reversed(events()))
    first, second = trace.lanes
    assert first.segments == [Segment(0.0, 42.0, "a", "rollout"), Segment(43.0, 90.0, "b", "train")]
    assert second.segments == [Segment(0.0, 100.0, "a", "rollout")]  # never released: held until the last event
    assert (first.held_s(), first.held_s("a"), first.held_s("b", "train"), first.held_s("b", "rollout")) == (
        89,
        42,
        47,
        0,
    )
    assert trace.tenants == ("a", "b")


def test_stages_that_follow_each_other_are_one_switch() -> None:
    first, second = pool_trace(events()).lanes
    assert [[stage for stage, _ in switch.stages] for switch in first.switches] == [
        ["wake", "sync"],
        ["shrink", "drain", "sleep"],
        ["onload"],
        ["offload"],
    ]
    assert first.switch_s == 8.0
    assert second.switch_s == 0.0


def test_a_wait_counts_once_for_all_gpus_of_a_grant() -> None:
    wide = [event(5.0, gpu, "c", "train", "grant", 2.5) for gpu in range(4)]
    assert pool_trace([*events(), *wide]).waits_s == {("b", "train"): [3.0], ("c", "train"): [2.5]}


def test_a_lost_release_does_not_put_two_holders_on_a_gpu() -> None:
    [lane] = pool_trace([event(0, 0, "a", "rollout", "grant"), event(5, 0, "b", "train", "grant")]).lanes
    assert lane.segments == [Segment(0, 5, "a", "rollout"), Segment(5, 5, "b", "train")]


def test_the_page_shows_lanes_shares_and_tooltips() -> None:
    text = pool_report(events(), "Pool <1>")
    assert "<title>Pool &lt;1&gt; - headrace</title>" in text
    assert "2 GPUs, 2 tenants, 100 s" in text
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    words = ["".join(element.itertext()) for drawing in drawings for element in drawing.iter() if len(element) == 0]
    assert {"GPU 0", "GPU 1", "81%", "100%", "0 s"} <= set(words)  # (89 - 8) s of 100 s
    assert any("b: train\n43.00 s to 90.00 s (47.0 s)" in word for word in words)
    assert any("drain 1.0 s\nsleep 1.0 s" in word for word in words)
    lanes = next(drawing for drawing in drawings if drawing.get("aria-label") == "lanes")
    kinds = [part.get("class") for part in lanes.iter() if part.tag.endswith("rect")]
    assert [kinds.count(kind) for kind in ("idle", "rollout", "train", "switch")] == [2, 2, 1, 5]
    assert "<td>b</td><td>train</td><td>1</td><td>3.0 s</td>" in text
    assert "http://" not in text.replace("http://www.w3.org/", "") and "https://" not in text


def test_names_of_tenants_are_escaped() -> None:
    text = pool_report([event(0, 0, "<b>", "rollout", "grant"), event(9, 0, "<b>", "rollout", "release")])
    assert "<b>: rollout" not in text and "&lt;b&gt;: rollout" in text


def test_a_long_run_gets_wider_lanes() -> None:
    many = [event(float(t), 0, "a", "rollout", what) for t in range(0, 4000, 2) for what in ("grant", "release")]
    widths = [int(width) for width in re.findall(r'aria-label="lanes" width="(\d+)"', pool_report(many))]
    assert widths == [16_000]


def test_no_events_are_a_mistake() -> None:
    with pytest.raises(UserError, match="has no events"):
        pool_report([])
