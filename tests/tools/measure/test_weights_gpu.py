"""`tools/measure/weights_gpu.py`: its shapes and summary, and its code in processes without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.actors.weight_sync.plan.packing import pack, unpack
from headrace.tools.measure.weights_gpu import (
    CASES,
    COLOCATED,
    Layout,
    bytes_of,
    main,
    part_of,
    plan_of,
    shapes_of,
    summarise,
    weights_table,
)


@pytest.mark.parametrize("layout", [Layout("tiny-moe"), *(replace(one, size="tiny-moe") for one in COLOCATED)])
def test_the_plan_makes_the_parts_that_engines_have(layout: Layout) -> None:
    num, shapes = 2, shapes_of("tiny-moe", 1)
    whole = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    plan = plan_of(layout, shapes, num, 1 << 16)
    parts = [{name: part_of(layout.engine, name, one, num, rank) for name, one in whole.items()} for rank in range(num)]
    taken = [{name: torch.zeros_like(one) for name, one in part.items()} for part in parts]
    for rank in range(num):
        rows = {name: part_of(layout.trainers, name, one, num, rank) for name, one in whole.items()}
        for bucket in plan.sending(rank):
            payload = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            pack(bucket, rows, payload)
            [same] = [one for one in plan.taking(bucket.receiver) if one.number == bucket.number]
            unpack(same, payload, taken[bucket.receiver])
    assert all(torch.equal(taken[rank][name], one) for rank in range(num) for name, one in parts[rank].items())


def test_the_largest_size_is_that_of_the_model() -> None:
    assert bytes_of(shapes_of("30b-a3b", 48)) == pytest.approx(61.1e9, rel=0.001)
    assert bytes_of(shapes_of("4b", 36)) == pytest.approx(8.04e9, rel=0.001)


def test_the_summary_compares_the_plan_with_the_wire_and_with_one_sender() -> None:
    seconds: dict[str, list[float]] = dict(zip(CASES, ([1.0, 1.0, 5.0], [2.0, 1.0, 2.0], [4.0, 4.0, 4.0]), strict=True))
    found = summarise("gpu4", seconds, 10**9)
    assert found["weights.plan.gpu4.vs_wire"] == 0.5 and found["weights.plan.gpu4.vs_one"] == 2.0
    assert found["weights.plan.gpu4.seconds"] == 2.0 and found["weights.plan.gpu4.gb_per_s"] == 0.5
    assert weights_table("gpu4", seconds, 10**9).row_count == 3
    without = {case: seconds[case] for case in CASES[1:]}
    assert "weights.plan.x.vs_wire" not in summarise("x", without, 1) and weights_table("x", without, 1).row_count == 2


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_code_runs_over_gloo(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--size", "tiny-moe", "--bucket-mib", "1", "--repeats", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["weights.plan.cpu4.vs_wire"] > 0 and summary["weights.plan.cpu4.vs_one"] > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_and_workers_of_the_same_gpus_are_compared_with_one_stream(tmp_path: Path) -> None:
    arguments = ["--colocated", "--gpus", "2", "--device", "cpu", "--size", "tiny-moe", "--bucket-mib", "1"]
    assert main([*arguments, "--repeats", "1", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for name in ("dp", "fsdp", "ep"):
        assert summary[f"weights.plan.cpu2.colocated.tiny-moe-{name}.vs_one"] > 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    [parts] = [line["seconds"] for line in lines if line["name"].endswith("ep") and "parts" in line["case"]][-1:]
    assert 0 < parts[0]["buckets"] < parts[0]["all"]
