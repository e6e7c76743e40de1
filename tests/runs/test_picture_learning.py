"""The example with pictures runs on two train ranks, and learns to count what it sees, which a blind run does not."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs

pytestmark = pytest.mark.processes
EXAMPLE = runs.ROOT / "examples" / "count-squares"


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, *options: str) -> None:
    """Copy the example into a folder, and make its model and its data there. steps: those of the model's warm-up."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", ["make_pictures.py", *options])
    runpy.run_path("make_pictures.py", run_name="__main__")
    runpy.run_path("make_model.py")["make_model"]("model", steps)


def train(folder: Path, *overrides: str, command: str = "train") -> list[dict[str, float]]:
    """Train the example, and return its metrics."""
    given = ["model.path=model", f"run.dir={folder / 'run'}", "logging.tensorboard=false", *overrides]
    run = runs.start_command(["headrace.cli", command, "config.yaml", *given], folder)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    return runs.metrics(folder / "run")


@pytest.mark.parametrize(
    "mesh",
    [("trainer.dp=2",), pytest.param(("trainer.tp=2", "trainer.freeze=[vision]"), marks=pytest.mark.slow)],
    ids=["dp2", "frozen-tp2"],
)
def test_engine_and_trainer_see_the_same(
    mesh: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks train a few steps.

    With dp 2 one of them can have a microbatch without rows; with tp 2 and a frozen tower one gets no pixels.
    """
    prepare(tmp_path, monkeypatch, 2)
    small = ("algorithm.prompts_per_step=4", "algorithm.group_size=2", "algorithm.steps=2", "validation.every=0")
    metrics = train(tmp_path, *small, *mesh, "trainer.patches_per_microbatch=16", runs.shared_ray())
    mismatch = [line["logprob/mismatch_max"] for line in metrics if "logprob/mismatch_max" in line]
    assert len(mismatch) == 2 and max(mismatch) < 1e-4
    prepared = [line for line in metrics if "pictures/processed" in line]
    assert sum(line["pictures/processed"] for line in prepared) == 8, "once, though both steps have two rows of each"
    assert all(line["pictures/bytes"] > 0 and line["time/pictures_s"] > 0 for line in prepared)
    assert (tmp_path / "run" / "model" / "preprocessor_config.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_count_what_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rises = {}
    for kind in ("seeing", "blind", "lora"):
        prepare(tmp_path / kind, monkeypatch, 300, *(["--blind"] if kind == "blind" else []))
        adapter = ["trainer.lora.rank=16", "trainer.lora.lr_factor=4"] if kind == "lora" else []
        lines = train(tmp_path / kind, "run.seed=1", "validation.every=60", *adapter)
        first, last = [line["val/exact_match"] for line in lines if "val/exact_match" in line]
        error = math.sqrt((first * (1 - first) + last * (1 - last)) / 200)
        rises[kind] = (last - first) / error
    assert min(rises["seeing"], rises["lora"]) > 3 > rises["blind"], rises


@pytest.mark.slow
def test_a_supervised_run_learns_what_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch, 300)
    for name in ("train", "held_out"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        told = [{"messages": [*line["messages"], {"role": "assistant", "content": line["answer"]}]} for line in lines]
        (tmp_path / f"told_{name}.jsonl").write_text("\n".join(map(json.dumps, told)))
    files = ("sft.train=told_train.jsonl", "sft.validation=told_held_out.jsonl", "sft.max_tokens=24")
    size = ("algorithm.steps=60", "algorithm.prompts_per_step=32", "validation.every=60")
    lines = train(tmp_path, *files, *size, command="sft")
    first, last = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert last < 0.5 < math.log(4) / 2 < first + 0.1, "a guess among four numbers and their end has log(4) / 2"
