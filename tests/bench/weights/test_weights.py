"""The weight benchmark in small: every transport, verified, with the summary that others read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.weights.benchmark import WeightOptions, run_weights, weights_table

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_ray")]


@pytest.mark.parametrize(
    "kind", ["collective", "store", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ipc", "disk"))]
)
def test_a_transport_is_measured_and_verified(tmp_path: Path, kind: str) -> None:
    options = WeightOptions(tmp_path, (kind,), sizes=("tiny",), engines=(2,), buckets_mib=(1,), repeats=2)
    results, skipped = run_weights(options, lambda line: None)
    assert not skipped and len(results) == 1
    assert len(results[0].seconds) == 2 and results[0].limit_s > 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for key in ("seconds", "gib_per_s", "vs_limit", "peak_extra_mib", "commit_seconds"):
        assert summary[f"weights.{kind}.tiny.{key}"] >= 0
    assert summary["conditions"]["repeats"] == 2
    assert not list(Path("/dev/shm").glob("headrace-bench-weights-*")) and weights_table(results).row_count == 1


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    options = WeightOptions(tmp_path, ("ipc",), sizes=("8B",), engines=(64,), buckets_mib=(64,))
    results, skipped = run_weights(options, lambda line: None)
    assert not results
    [(label, why)] = skipped.items()
    assert label.startswith("ipc 8B, 64 engine(s)") and "MiB are free" in why
