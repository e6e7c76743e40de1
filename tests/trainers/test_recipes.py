"""Tests that every recipe of `examples/` is planned with its model's shape, and that its scaled-down form trains."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from headrace import load_config
from headrace.cli import main
from headrace.cli.outcome import DONE, MISTAKE
from headrace.tests import forks
from headrace.tests.runs.cli_runs import environment, shared_ray
from headrace.trainers.errors import UserError
from headrace.trainers.observe.metrics import read_metrics
from headrace.trainers.recipes import EXAMPLES, find_recipe, recipes, write_offline

NAMES = list(recipes())


def test_every_recipe_has_a_page_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe"]) == DONE
    listed = capsys.readouterr().out
    assert len(NAMES) >= 4
    for name, recipe in recipes().items():
        page = (recipe.folder / "README.md").read_text()
        assert f"headrace train examples/{name}/config.yaml" in page and "## What was run" in page
        assert f"{name} " in listed and recipe.file.summary in listed
    assert main(["recipe", "moe-30b-a3b"]) == DONE
    assert "--nodes 4 --gpus-per-node 8 run.dir=" in capsys.readouterr().out
    assert main(["recipe", "gsm"]) == MISTAKE
    assert "recipe: got 'gsm', expected one of" in capsys.readouterr().err


def test_a_configuration_is_copied_to_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--out` alone copies the quickstart's file, or all files of a recipe; it writes into no folder with files."""
    assert main(["recipe", "quickstart", "--out", str(tmp_path / "first")]) == DONE
    copy = tmp_path / "first" / "config.yaml"
    assert capsys.readouterr().out == f"command: cd {copy.parent} && headrace train config.yaml\n"
    assert copy.read_bytes() == (EXAMPLES / "quickstart.yaml").read_bytes()
    assert main(["recipe", "reasoning-gym", "--out", str(tmp_path / "second")]) == DONE
    assert (tmp_path / "second" / "make_model.py").exists()
    assert main(["recipe", "own-environment", "--out", str(tmp_path / "third")]) == DONE
    assert f"cd {tmp_path / 'third'} && headrace train run.yaml" in capsys.readouterr().out
    assert (tmp_path / "third" / "three_strings.py").exists()
    assert main(["recipe", "quickstart", "--out", str(tmp_path / "first")]) == MISTAKE
    assert "is not empty, expected a new folder" in capsys.readouterr().err
    assert main(["recipe", "quickstart", "--out", str(copy)]) == MISTAKE
    assert "config.yaml is a file, expected a folder or a new name" in capsys.readouterr().err
    assert main(["recipe", "quickstart", "--offline"]) == MISTAKE
    assert "recipe: got 'quickstart', expected one of dapo-math-4b" in capsys.readouterr().err


def test_the_gallery_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    names = [path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")]
    assert len(names) >= 10 and not [name for name in names if f"]({name}" not in page]
    for name, recipe in recipes().items():
        [line] = [line for line in page.splitlines() if f"]({name}/README.md)" in line]
        assert "(*recipe*)" in line and f"headrace train examples/{name}/config.yaml" in line
        assert line.count("(*recipe*)") == 1 and recipe.config.exists()
    assert page.count("(*recipe*)") == len(NAMES)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_flat_example_is_planned(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = 8 if path.stem == "gpu-30b-a3b" else 1
    machine = ["--machine", f"1x{gpus}x80"] if path.stem.startswith("gpu-") else []
    code = main(["train", str(path), "--dry-run", *machine, f"run.dir={tmp_path / 'run'}"])
    planned = capsys.readouterr()
    assert code == DONE and "plan of a step" in planned.out, planned.err


@pytest.fixture
def extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans find math-verify, which they do not use, and one task of reasoning-gym, if it is not installed."""
    found = importlib.util.find_spec
    known = ("math_verify", "reasoning_gym")
    if found("reasoning_gym") is None:
        task = {"question": "1 + 1 =", "answer": "2", "metadata": {}}
        library = SimpleNamespace(
            factory=SimpleNamespace(DATASETS=["chain_sum"]), create_dataset=lambda *_, **__: defaultdict(lambda: task)
        )
        monkeypatch.setitem(sys.modules, "reasoning_gym", library)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in known else found(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_planned_for_its_machine_without_a_network(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], extras: None
) -> None:
    recipe, folder = find_recipe(name), tmp_path / "copy"
    assert main(["recipe", name, "--offline", "--out", str(folder)]) == DONE
    told = capsys.readouterr().out
    for key in [*recipe.file.rows, *(["model.path"] if recipe.file.model else [])]:
        assert f"{key}: " in told and "is replaced by" in told
    original, copy = (yaml.safe_load(path.read_text()) for path in (recipe.config, folder / "config.yaml"))
    assert {key: value for key, value in copy["algorithm"].items()} == original["algorithm"], "nothing else changes"
    machine = ["--machine", recipe.file.machine] if recipe.file.machine else []
    code = main(["train", str(folder / "config.yaml"), "--dry-run", *machine, f"run.dir={tmp_path / 'run'}"])
    planned = capsys.readouterr()
    assert code == DONE, planned.err
    if recipe.file.machine:
        hosts, gpus, _ = map(int, recipe.file.machine.split("x"))
        assert f"({hosts * gpus} of {hosts * gpus} used)" in planned.out
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="is not empty, expected a new folder"):
        write_offline(recipe, folder, small=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_scaled_down_form_of_a_recipe_is_a_configuration(name: str, tmp_path: Path) -> None:
    recipe, folder = find_recipe(name), tmp_path / "copy"
    write_offline(recipe, folder, small=True)
    config = load_config(folder / "config.yaml")
    assert (config.rollout.engine, config.trainer.backend, config.trainer.topology.world) == ("hf", "fsdp", 1)
    model = json.loads((folder / "model" / "config.json").read_text())
    assert model["model_type"] == recipe.file.model["model_type"] and model["hidden_size"] == 64
    assert (folder / "model" / "model.safetensors").exists()
    for source in (config.data.train, *(one.data.source for one in config.evaluation.values())):
        assert source.startswith(("task:", "reasoning-gym:")) or Path(source).is_relative_to(folder), (
            "nothing is fetched"
        )


def test_a_machine_is_for_dry_runs_only(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(find_recipe("tool-use").config)
    assert main(["train", path, "--machine", "1x1x80"]) == MISTAKE
    assert "--machine: got a machine without --dry-run" in capsys.readouterr().err
    for wrong in ("8x80", "1x0x80", "1xax80"):
        assert main(["train", path, "--dry-run", "--machine", wrong]) == MISTAKE
        assert "expected HOSTSxGPUSxGIB" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_scaled_down_form_of_a_recipe_trains(name: str, tmp_path: Path, ray_session: None) -> None:
    recipe, folder = find_recipe(name), tmp_path / "copy"
    if "math_verify" in recipe.config.read_text():
        pytest.importorskip("math_verify", reason="needs the extra `math`")
    if "reasoning-gym:" in recipe.config.read_text():
        pytest.importorskip("reasoning_gym", reason="needs the extra `reasoning-gym`")
    told = write_offline(recipe, folder, small=True)
    assert any("2 steps of" in line for line in told)
    run_dir = tmp_path / "run"
    arguments = ["headrace.cli", "train", str(folder / "config.yaml"), f"run.dir={run_dir}", shared_ray()]
    code, output = forks.run(arguments, tmp_path, environment(), 280)
    assert code == 0, output
    records, _ = read_metrics(run_dir / "metrics.jsonl")
    trained = [record for record in records if record.get("train/sequences")]
    config = load_config(folder / "config.yaml")
    assert trained and records[-1]["step"] == config.algorithm.steps == 2
    assert all(record["rollout/failed_rows"] == 0 for record in trained), json.dumps(trained)
    for set_name in config.evaluation:
        assert f"eval/{set_name}/avg@{config.evaluation[set_name].n}" in records[-1]
