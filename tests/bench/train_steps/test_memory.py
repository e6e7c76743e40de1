"""Estimated peaks of GPU memory against measured ones: those of the documentation, and new ones on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.models import SHAPES
from headrace.bench.train_steps.benchmark import MEMORY, misjudged
from headrace.cli import main
from headrace.cli.outcome import DONE
from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.cluster.gpu_memory import ModelSize, estimated_peak

GIB = 1 << 30
COMPILED: dict[str, Any] = {"compile": True}
LEAN: dict[str, Any] = {"compile": True, "recompute": "full"}
MEASURED: list[tuple[str, float, float, dict[str, Any]]] = [
    ("135m", 0.1345e9, 19.8, {**COMPILED, "tokens_per_microbatch": 32768}),
    ("135m", 0.1345e9, 17.8, {**COMPILED, "tokens_per_microbatch": 32768, "lora": {"rank": 16}}),
    ("0.6b", 0.596e9, 43.8, {}),
    ("0.6b", 0.596e9, 32.4, COMPILED),
    ("0.6b", 0.596e9, 35.4, {**COMPILED, "backend": "megatron"}),
    ("0.6b", 0.596e9, 41.0, {"backend": "megatron"}),
    ("0.6b", 0.596e9, 38.0, {"backend": "megatron", "dp": 2}),
    ("0.6b", 0.596e9, 22.0, {"backend": "megatron", "tp": 2}),
    ("0.6b", 0.596e9, 36.0, {"backend": "megatron", "pp": 2}),
    ("0.6b", 0.596e9, 12.2, LEAN),
    ("0.6b", 0.596e9, 15.3, {**LEAN, "tokens_per_microbatch": 65536}),
    ("4b", 4.022e9, 119.9, {**LEAN, "recompute_layers": 10}),
    ("4b", 4.022e9, 77.5, LEAN),
    ("4b", 4.022e9, 73.9, {**LEAN, "backend": "megatron"}),
    ("1.7b", 1.721e9, 34.3, {"recompute": "full"}),
    ("4b", 4.022e9, 13.4, {**LEAN, "lora": {"rank": 16}}),
]
"""Shapes, parameters, measured peaks of a train worker in GiB, and keys of the trainer. The peaks are those of
docs/benchmarks.md and docs/start/smollm2.md."""


@pytest.mark.parametrize(("size", "params", "peak", "keys"), MEASURED)
def test_the_estimate_is_near_the_measured_peak(size: str, params: float, peak: float, keys: dict[str, Any]) -> None:
    trainer = TrainerConfig(mixed_precision=True, **{"tokens_per_microbatch": 16384, **keys})
    estimated = estimated_peak(trainer, ModelSize(int(params), SHAPES[size].options())) / GIB
    assert misjudged(estimated, peak) == [], f"{estimated:.1f} GiB"
    assert estimated > 0.9 * peak, "an estimate that is too low lets a run die"


def test_a_bad_estimate_is_told() -> None:
    assert "is 10.0 GiB, expected within 1.3x of the estimate of 14.0 GiB" in misjudged(14.0, 10.0)[0]
    assert misjudged(7.0, 10.0) and not misjudged(10.0, 10.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("work", "keys"),
    [
        ("train-135m", ("trainer.compile=true",)),
        ("train-0.6b", ()),
        ("train-0.6b", ("trainer.compile=true",)),
        ("train-1.7b", ("trainer.recompute=full",)),
    ],
)
def test_a_train_step_takes_the_estimated_memory(work: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["bench", "gpu", "--work", work, "--steps", "3", "--baseline", "none", "--out", str(out), *keys]
    assert main(command) == DONE
    summary = json.loads((out / "summary.json").read_text())
    ratio = summary[f"gpu.{work}.estimate_over_peak"]
    print(f"{work} {' '.join(keys)}: peak {summary[f'gpu.{work}.peak_gib']:.1f} GiB, estimate {ratio:.2f} of it")
    assert 1 / MEMORY <= ratio <= MEMORY
