"""Tests that the examples with SmolLM2 can start as their page says, and that the page has the figures of the files."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from headrace.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "start" / "smollm2.md"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model in the place of SmolLM2."""
    folder = tmp_path_factory.mktemp("model")
    runpy.run_path(str(EXAMPLES / "agent" / "make_model.py"))["make_model"](str(folder))
    return folder


def enter_copy(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy an example into a folder, go there as a user does, and make its data."""
    shutil.copytree(EXAMPLES / example, folder, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", ["make_data.py"])
    runpy.run_path("make_data.py", run_name="__main__")


@pytest.mark.parametrize(
    ("example", "files"),
    [("smollm2-arithmetic", ["config.yaml", "distill.yaml"]), ("price-list", ["config.yaml", "tiny.yaml"])],
)
def test_the_files_fit_the_data_that_they_make(
    example: str, files: list[str], chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_copy(example, tmp_path, monkeypatch)
    importlib.invalidate_caches()
    shutil.copytree(chat_model, tmp_path / "smollm2-135m")
    shutil.copytree(chat_model, tmp_path / "runs" / "smollm2" / "model")
    longer = ["data.max_prompt_tokens=200"]  # The tiny model has a token for each byte.
    for file in files:
        given = [] if file == "tiny.yaml" else longer
        assert main(["train", file, "--dry-run", "--machine", "1x1x80", *given]) == 0


def test_the_page_has_the_figures_of_the_file() -> None:
    expected = json.loads((EXAMPLES / "smollm2-arithmetic" / "expected.json").read_text())
    for kind, mean in (("full", "held_out"), ("lora", "lora")):
        seeds = expected["seeds"][kind]
        for step, figure in expected[mean].items():
            assert figure == pytest.approx(sum(seed[step] for seed in seeds) / len(seeds), abs=6e-4)
    page = PAGE.read_text(encoding="utf-8")
    for label, curves in (("all weights, seeds 0, 1, 2", "full"), ("LoRA, seeds 0, 1, 2", "lora")):
        [row] = re.findall(rf"^\| {label} \|(.*)\|$", page, re.MULTILINE)
        steps = ("20", "40", "60", "100", "140", "200")
        wanted = [", ".join(f"{seed[step]:.3f}" for seed in expected["seeds"][curves]) for step in steps]
        assert [cell.strip() for cell in row.split("|")] == ["0.048", *wanted]
    for step, figure in expected["distill"].items():
        assert f"{figure:.3f}" in page or int(step) in (70, 90)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_smollm2_learns_as_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_copy("smollm2-arithmetic", tmp_path, monkeypatch)
    assert main(["fetch", "smollm2-135m", "--source", "registry"]) == 0
    assert main(["train", "config.yaml", "run.dir=run", "algorithm.steps=100"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = {str(row["step"]): row["val/reward"] for row in rows if "val/reward" in row}
    expected = json.loads((tmp_path / "expected.json").read_text())["held_out"]
    assert scores == pytest.approx({step: expected[step] for step in scores}, abs=0.06)
