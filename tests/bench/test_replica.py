"""Tests the bytes, digests and ratios that the replica benchmark reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.replica import (
    WAYS,
    ReplicaOptions,
    ReplicaResult,
    WayResult,
    check_digests,
    replica_table,
    run_replica,
    summarise,
)


@pytest.mark.processes
@pytest.mark.usefixtures("own_ray")
def test_a_small_run_counts_what_it_moves(tmp_path: Path) -> None:
    options = ReplicaOptions(tmp_path, sizes=(2,), store="shm", num_rows=48, repeats=2)
    results = run_replica(options, lambda line: None)
    assert [(result.size, result.way) for result in results] == [(2, way) for way in WAYS]
    assert replica_table(results).row_count == 3
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 1.0 < summary["replica.2.broadcast_bytes_over_valid"] < 1.01
    assert summary["replica.2.padded_bytes_over_valid"] > 2
    assert summary["replica.2.store_bytes_over_valid"] == 1
    assert summary["replica.2.independent_store_bytes_over_valid"] == 2
    assert summary["replica.2.leader_vs_independent"] > 0 and summary["conditions"]["store"] == "shm"
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["way"] for line in lines] == list(WAYS) and all(len(line["times_ms"]) == 2 for line in lines)


def test_ratios_over_one_mean_that_the_leader_is_faster() -> None:
    seconds = {"leader": 0.1, "independent": 0.3, "padded": 0.2}
    results = [ReplicaResult(4, way, (seconds[way],) * 3, 1000, 1000, 1005) for way in WAYS]
    summary = summarise(results)
    assert summary["replica.4.leader_vs_independent"] == pytest.approx(3)
    assert summary["replica.4.leader_vs_padded"] == pytest.approx(2)
    assert summary["replica.4.broadcast_bytes_over_valid"] == pytest.approx(1.005)


def test_other_bytes_are_an_error() -> None:
    right = {way: WayResult((), 0, 0, "aa") for way in WAYS}
    check_digests([right, right])
    with pytest.raises(RuntimeError, match="padded: rank 1 got rows of digest bb, expected aa"):
        check_digests([right, {**right, "padded": WayResult((), 0, 0, "bb")}])
