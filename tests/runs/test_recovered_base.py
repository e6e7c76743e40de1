"""Train workers that start again under running engines read the base of their adapter from an engine's memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.weight_sync_runs import model_folder
from headrace.tests.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS = 20
OPTIONS = (
    "warmup.corpus=none", "trainer.lora.rank=4", "trainer.lr=0.003", "trainer.dp=2", "rollout.num_engines=2",
    "run.checkpoint_every=4", f"algorithm.steps={STEPS}", "validation.every=0", "run.deterministic=true",
    "sync.recover=engine",
)  # fmt: skip
FIGURES = ("train/loss", "train/grad_norm", "train/approx_kl")


def replace_weights(model: Path) -> None:
    """Put a file with other values of all weights in the place of the model's, which engines may have mapped."""
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    for at in range(8 + int.from_bytes(data[:8], "little"), len(data), 4):
        data[at] ^= 1
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


@pytest.mark.timeout(400)
def test_workers_recover_the_base_from_an_engine(tmp_path: Path) -> None:
    """The folder, which has other weights by then, is not read, and repeated steps have the same figures as before."""
    model, folder = model_folder(tmp_path / "model", "untied"), tmp_path / "run"
    process = runs.start(folder, runs.shared_ray(), *OPTIONS, f"model.path={model}")
    runs.wait_for_step(folder, 6, process)
    wait_until(lambda: [*(folder / "checkpoints").glob("step_*/.metadata")], "a checkpoint is written")
    replace_weights(model)
    target = runs.actors(folder)["train worker 1"]
    assert target in psutil.Process().children(recursive=True)  # never a process that this test did not start
    os.kill(target.pid, signal.SIGKILL)
    output = runs.succeed(process)
    assert "the train workers alone are restarted" in output
    incidents = (folder / "incidents.txt").read_text().splitlines()
    for rank in range(2):
        [line] = [line for line in incidents if f"train worker {rank} read the base" in line]
        assert "MB from rollout 0's memory" in line and "folder" not in line, line
    lines = runs.metrics(folder)
    [at] = [index for index, line in enumerate(lines) if line.get("event") == "resumed"]
    done = {line["step"]: line for line in lines[:at] if "reward/mean" in line}
    again = {line["step"]: line for line in lines[at:] if "reward/mean" in line}
    assert again[STEPS]["run/restarts"] == 1 and (twice := done.keys() & again.keys())
    for step in twice:
        figures = [done[step][name] for name in FIGURES]
        # Two undisturbed runs with two engines differ in the last digits, too.
        assert [again[step][name] for name in FIGURES] == pytest.approx(figures, rel=1e-4, abs=1e-7)
