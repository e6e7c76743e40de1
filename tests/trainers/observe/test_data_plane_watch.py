"""Tests the driver's sums over all processes' calls, and the metrics of what is in the data plane."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from headrace.dataplane.status import DataPlaneStatus
from headrace.dataplane.traffic import ClientStats, Traffic
from headrace.trainers.observe.data_plane_watch import DataPlaneWatch

STATUS = DataPlaneStatus({"train": 64}, 64, {"ids": 64}, 2, 32, 1.5, 4, 1000, 200, 5000, 300, 3, 1, 0, "shm", 1000)


class FakeClient:
    """A stand-in for the driver's client, with its own counters and a directory whose answer never changes."""

    def __init__(self) -> None:
        self.stats = ClientStats()
        self.state = STATUS

    def status(self, *, timeout_s: float | None = None) -> DataPlaneStatus:
        self.stats.count_directory(140)
        self.stats.count_call("status", 1e-4)
        return self.state


def watch_of(client: Any) -> DataPlaneWatch:
    return DataPlaneWatch(client)


def report(op: str, calls: list[tuple[float, int]]) -> bytes:
    traffic = Traffic()
    for seconds, nbytes in calls:
        traffic.of(op).count(seconds, nbytes)
    return traffic.to_bytes()


def test_a_step_has_the_calls_of_all_processes() -> None:
    client = FakeClient()
    watch = watch_of(client)
    client.stats.count_call("claim", 0.02)
    client.stats.count_directory(1000)
    watch.add(report("put", [(1e-3, 400), (1e-3, 600)]))
    watch.add(report("get", [(4e-3, 300)]))
    watch.add(report("get", [(8e-3, 100)]))
    figures, directory_bytes = watch.end_step(8)
    assert directory_bytes == 1140
    assert (figures["dataplane/calls"], figures["dataplane/bytes_put"], figures["dataplane/bytes_got"]) == (
        6,
        1000,
        400,
    )
    assert (figures["dataplane/get/calls"], figures["dataplane/get/bytes"]) == (2, 400)
    assert figures["dataplane/get/p50_ms"] == pytest.approx(4, rel=0.19)
    assert figures["dataplane/get/p99_ms"] == pytest.approx(8, rel=0.19)
    assert figures["dataplane/get/seconds"] == pytest.approx(12e-3, rel=1e-6)
    assert math.isnan(figures["dataplane/get/gb_per_s"]) and math.isnan(figures["dataplane/get/fixed_us"])
    assert "dataplane/claim/bytes" not in figures and figures["dataplane/claim/calls"] == 1
    standing = {"rows": 64, "bytes_used": 1000, "bytes_reserved": 200, "leased_rows": 32, "oldest_lease_s": 1.5}
    standing["bytes_unfreed"] = 0
    for name, value in (standing | {"waiting_claims": 3, "waiting_puts": 1}).items():
        assert figures[f"dataplane/{name}"] == value


def test_rows_that_are_lost_are_known_after_the_step() -> None:
    client = FakeClient()
    watch = watch_of(client)
    client.state = replace(STATUS, lost_rows=3)
    watch.end_step(8)
    assert watch.lost_rows == 3


def test_the_next_step_starts_at_nothing_and_the_line_goes_on() -> None:
    client = FakeClient()
    watch = watch_of(client)
    sizes = [100_000 * (1 + number) for number in range(8)]
    for size in sizes:
        watch.add(report("get", [(5e-4 + size / 1e9, size)]))
    assert watch.end_step(8)[0]["dataplane/get/calls"] == 8
    for size in sizes:
        watch.add(report("get", [(5e-4 + size / 1e9, size)]))
    figures, directory_bytes = watch.end_step(8)
    assert (figures["dataplane/get/calls"], directory_bytes) == (8, 140)
    assert figures["dataplane/get/gb_per_s"] == pytest.approx(1.0, rel=1e-4)
    assert figures["dataplane/get/fixed_us"] == pytest.approx(500, rel=1e-3)
    assert watch.total().of("get").calls == 16
    figures, _ = watch.end_step(8)
    assert "dataplane/get/calls" not in figures and figures["dataplane/calls"] == 1


def test_ready_groups_are_those_whose_rows_nobody_holds() -> None:
    client = FakeClient()
    watch = watch_of(client)
    fields = {"input_ids": 64, "response_mask": 64, "rollout_logprobs": 64, "prev_logprobs": 16}
    for leased, stale, groups in ((0, 0, 8), (16, 0, 6), (16, 8, 5), (64, 0, 0)):
        client.state = replace(STATUS, ready=fields, leased_rows=leased, stale_rows=stale)
        assert watch.end_step(8)[0]["queue/groups_ready"] == groups
    client.state = replace(STATUS, ready={}, leased_rows=0)
    assert watch.end_step(8)[0]["queue/groups_ready"] == 0


def test_the_totals_are_a_copy_and_the_status_is_asked_for_anew() -> None:
    client = FakeClient()
    watch = watch_of(client)
    watch.add(report("put", [(1e-3, 400)]))
    watch.total().of("put").count(1.0, 1)
    assert watch.total().of("put").calls == 1
    client.state = replace(STATUS, rows=7)
    assert watch.status(1.0).rows == 7


def test_a_report_that_is_none_is_refused_and_changes_nothing() -> None:
    watch = watch_of(FakeClient())
    with pytest.raises(ValueError, match="message"):
        watch.add(b"nonsense")
    assert watch.total().ops == {}
