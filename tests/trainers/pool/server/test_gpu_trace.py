"""Tests the trace of a pool: lanes from events, the timeline, and the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.table import Table

from headrace.trainers.errors import UserError
from headrace.trainers.pool.server.gpu_trace import Segment, pool_tables, pool_trace, write_perfetto
from headrace.trainers.pool.state.status import PoolEvent


def event(t: float, gpu: int, tenant: str, role: str, what: str, seconds: float | None = None) -> PoolEvent:
    """Return an event; without `seconds`, that key is absent."""
    told = {"t": t, "gpu": gpu, "tenant": tenant, "role": role, "event": what}
    return PoolEvent(**told if seconds is None else told | {"seconds": seconds})  # pyright: ignore[reportArgumentType]


def events() -> list[PoolEvent]:
    """Return the events of two GPUs: `a` generates on both, and then `b` trains on the first, after 3 s of waiting."""
    return [
        event(0.0, 0, "a", "rollout", "grant"), event(0.0, 1, "a", "rollout", "grant"),
        event(1.0, 0, "a", "rollout", "wake", 1.0), event(3.0, 0, "a", "rollout", "sync", 2.0),
        event(40.0, 0, "a", "rollout", "shrink", 0.0), event(41.0, 0, "a", "rollout", "drain", 1.0),
        event(42.0, 0, "a", "rollout", "sleep", 1.0), event(42.0, 0, "a", "rollout", "release"),
        event(43.0, 0, "b", "train", "grant", 3.0), event(44.0, 0, "b", "train", "onload", 1.0),
        event(90.0, 0, "b", "train", "offload", 2.0), event(90.0, 0, "b", "train", "release"),
        event(100.0, 1, "a", "rollout", "shrink", 0.0),
    ]  # fmt: skip


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


def test_the_timeline_has_a_track_per_gpu_with_holders_and_the_stages_inside_them(tmp_path: Path) -> None:
    write_perfetto(pool_trace(events()), tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {one["tid"]: one["args"]["name"] for one in written if one["name"] == "thread_name"}
    slices = [(tracks[one["tid"]], one["name"], one["ts"], one["dur"]) for one in written if one["ph"] == "X"]
    assert list(tracks.values()) == ["GPU 0", "GPU 1"]
    assert ("GPU 0", "a rollout", 0, 42_000_000) in slices and ("GPU 1", "a rollout", 0, 100_000_000) in slices
    assert ("GPU 0", "drain", 40_000_000, 1_000_000) in slices  # of a, before its release at 42 s
    assert ("GPU 0", "offload", 88_000_000, 2_000_000) in slices  # of b, before its release at 90 s
    assert len(slices) == 3 + 7 + 1


def test_the_tables_have_shares_waits_and_stages() -> None:
    gpus, waits, tenants, stages = map(cells, pool_tables(pool_trace(events())))
    assert gpus == [["0", "89.0%", "11.0%", "8.0%", "4"], ["1", "100.0%", "0.0%", "0.0%", "1"]]
    assert waits == [["b", "train", "1", "3.0 s", "3.0 s", "3.0 s"]]
    assert tenants == [["a", "0", "142", "75%"], ["b", "47", "0", "25%"]]
    assert ["drain", "1", "1.0 s", "1.0 s"] in stages and ["offload", "1", "2.0 s", "2.0 s"] in stages


def cells(table: Table) -> list[list[str]]:
    """Return the rows of a table."""
    return [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_no_events_are_a_mistake() -> None:
    with pytest.raises(UserError, match="has no events"):
        pool_trace([])
