"""Tests that every recipe of `examples/` is planned with its model's shape, and that its scaled-down form trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from headrace import load_config
from headrace.cli import main
from headrace.cli.outcome import DONE, MISTAKE
from headrace.tests import forks
from headrace.tests.runs.cli_runs import environment, shared_ray
from headrace.trainers.errors import UserError
from headrace.trainers.observe.metrics import read_metrics
from headrace.trainers.recipes.gallery import find_recipe, recipes
from headrace.trainers.recipes.offline import write_offline

NAMES = list(recipes())


def test_every_recipe_has_a_page_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe"]) == DONE
    listed = capsys.readouterr().out
    assert len(NAMES) >= 4
    for name, recipe in recipes().items():
        page = (recipe.folder / "README.md").read_text()
        assert f"headrace train examples/{name}/config.yaml" in page and "## What was run" in page
        assert f"{name} " in listed and recipe.file.summary in listed
    assert main(["recipe", "gsm"]) == MISTAKE
    assert "recipe: got 'gsm', expected one of" in capsys.readouterr().err


def needs_math_verify(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check of optional packages find math-verify, which no plan needs."""
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "math_verify" else found(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_planned_for_its_machine_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_math_verify(name, monkeypatch)
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
        assert source.startswith("task:") or Path(source).is_relative_to(folder), "nothing is fetched"


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
