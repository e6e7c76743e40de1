"""Tests the workload with pictures of the transfer benchmark, in a small run with threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from headrace.bench.transfer import picture_rounds
from headrace.bench.transfer.benchmark import TransferOptions, _ray, run_transfer
from headrace.bench.transfer.picture_rounds import picture_summary
from headrace.bench.transfer.pictures import QUEUE_KEYS, QUEUE_ROWS, RAW, RAY, UNSHARED, OwnEndpoint
from headrace.bench.transfer.processes import ProcessLost
from headrace.bench.transfer.report import failures, tables, write_report
from headrace.bench.transfer.results import Result
from headrace.tests.waiting import wait_until

pytestmark = pytest.mark.processes


def small(out: Path) -> TransferOptions:
    return TransferOptions(out, ("local", "shm"), ("vlm",), quick=True, in_process=True, share=0.5)


def test_each_picture_is_put_once_and_every_step_has_times(tmp_path: Path) -> None:
    options = small(tmp_path)
    report = run_transfer(options, lambda line: None)
    assert failures(report) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 1 <= summary["vlm.put_bytes_over_once"] < 1.02
    times = {f"vlm.{op}.{kind}.vs_unshared" for op in ("put", "get", "step") for kind in ("local", "shm")}
    assert times <= set(summary) and all(summary[name] > 0 for name in times)
    stored = {one.contender: one.wire_bytes for one in report.results if one.op == "put"}
    assert stored["shm" + UNSHARED] > 6 * stored["shm"]
    assert len(tables(report)) == 1 and "a picture of 1024 x 1024" in write_report(report, options, "it").read_text()


def test_a_damaged_picture_fails_its_case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = OwnEndpoint.get

    def damaged(self: OwnEndpoint, *arguments: Any) -> Any:
        ids, pixels = get(self, *arguments)
        if self._shared:
            pixels[0].view(torch.int16)[0] += 1
        return ids, pixels

    monkeypatch.setattr(OwnEndpoint, "get", damaged)
    monkeypatch.setattr(picture_rounds, "TOGETHER_BYTES", 0)  # As for more pictures than fit into memory for all.
    report = run_transfer(small(tmp_path), lambda line: None)
    assert [line.split(":")[0] for line in failures(report)] == ["vlm, local", "vlm, shm"]
    assert "differ from those that were put" in failures(report)[0]
    assert {one.contender for one in report.results if one.seconds} == {"local" + UNSHARED, "shm" + UNSHARED, *RAW}


def test_transferqueue_counts_with_its_quicker_way() -> None:
    seconds = {"shm": 1.0, QUEUE_KEYS: 3.0, QUEUE_ROWS: 2.0, RAY: 4.0}
    results = [Result("vlm", "put", name, 5, (took,), wire_bytes=10) for name, took in seconds.items()]
    expected = {"vlm.put.shm.vs_transferqueue": 2.0, "vlm.put.shm.vs_ray": 4.0, "vlm.put_bytes_over_once": 2.0}
    assert picture_summary(results, ("shm",)) == expected


def test_a_process_that_is_lost_fails_its_case_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = OwnEndpoint.put

    def lost(self: OwnEndpoint, *arguments: Any) -> Any:
        if not self._shared:
            raise ProcessLost("a benchmark process did not answer within 120 s")
        return put(self, *arguments)

    monkeypatch.setattr(OwnEndpoint, "put", lost)
    report = run_transfer(replace(small(tmp_path), stores=("shm",)), lambda line: None)
    assert [line.split(":")[0] for line in failures(report)] == [f"vlm, shm{UNSHARED}"]
    assert {one.contender for one in report.results if one.seconds} == {"shm", *RAW}


@pytest.mark.usefixtures("own_ray")
def test_a_full_object_store_is_told() -> None:
    with _ray(False, 100):
        assert picture_rounds._spilled() == ""
        objects = [ray.put(np.full(20 << 20, number, np.uint8)) for number in range(8)]
        wait_until(lambda: "moved objects to the disk: Spilled " in picture_rounds._spilled())
        assert len(objects) == 8
