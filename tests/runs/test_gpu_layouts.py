"""Whole runs on one and two GPUs, in the layouts that Ray's own packing broke, train and serve new weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_end_to_end import steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

VLLM = ("rollout.engine=vllm", "rollout.tp=2")
SHAPES = {
    "one GPU for both": (1, "colocated", ("resources.layout=colocated",)),
    "two pairs": (2, "colocated", ("rollout.num_engines=2", "trainer.dp=2")),
    "one engine beside two ranks": (2, "colocated", ("trainer.dp=2",)),
    "an engine of two beside two ranks": (2, "colocated", (*VLLM, "trainer.dp=2")),
    "an engine of two beside a trainer of two": (2, "colocated", (*VLLM, "trainer.tp=2")),
    "apart, by a map": (2, "separate", ("resources.trainer_gpus=[1]", "resources.rollout_gpus=[0]")),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_in_this_layout_trains(tmp_path: Path, shape: str) -> None:
    gpus, layout, overrides = SHAPES[shape]
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    if "rollout.engine=vllm" in overrides and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    run_dir = tmp_path / "run"
    output = runs.succeed(runs.start(run_dir, "algorithm.steps=3", "validation.every=0", *overrides), 500)
    [note] = [line["note"] for line in runs.metrics(run_dir) if line.get("event") == "placement"]
    assert note.startswith(f"GPUs: {layout}, ") and f"GPUs: {layout}, " in output
    steps = steps_of(run_dir)
    assert len(steps) == 3 and all(line["train/grad_norm"] > 0 for line in steps)
    assert all(line["sync/engines"] == (2 if shape == "two pairs" else 1) for line in steps)
