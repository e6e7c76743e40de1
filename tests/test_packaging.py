"""The wheel holds every package and runs outside the clone; pyproject's package list names every package folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_packages_list_is_true():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    ignored = {"tests", "build", "docs", "examples", "runs"}
    found = {"headrace"} | {
        ".".join(["headrace", *path.parent.relative_to(ROOT).parts])
        for path in ROOT.rglob("*/__init__.py")
        if not path.relative_to(ROOT).parts[0].startswith(".") and path.relative_to(ROOT).parts[0] not in ignored
    }
    assert sorted(declared) == sorted(found)


@pytest.mark.processes
def test_the_wheel_runs_outside_the_clone(tmp_path: Path):
    """`headrace --help` and the README's three processes run from the wheel, with this machine's dependencies."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "py.typed"))]:
        shutil.copy(path, source)
    for folder in ("codecs", "dataplane", "actors", "trainers", "bench", "cli", "testing", "constraints", "examples"):
        shutil.copytree(ROOT / folder, source / folder)
    run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."],
        source,
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert (site / "headrace" / "py.typed").exists()
    assert (site / "headrace" / "examples" / "gpu-0.6b.yaml").exists(), "`headrace bench gpu` runs it"
    assert (site / "headrace" / "constraints" / "cpu.txt").exists(), "`headrace doctor` reads the sets of versions"
    pages = site / "headrace" / "trainers" / "observe" / "pages"
    for name in ("samples.js", "page.js", "page.css", *(f"uplot/uPlot.{end}" for end in ("iife.min.js", "min.css"))):
        assert (pages / name).exists(), "the report is made of it"
    assert (pages / "uplot" / "LICENSE").exists()
    assert (site / "headrace" / "examples" / "tool-use" / "recipe.yaml").exists(), "`headrace recipe` reads it"

    for title, text in re.findall(r'```python title="([^"]+)"\n(.*?)```', (ROOT / "README.md").read_text(), re.DOTALL):
        (tmp_path / title).write_text(text)
    code = "import runpy, headrace; print(headrace.__file__); runpy.run_module('headrace.cli', run_name='__main__')"
    where, _, said = run([sys.executable, "-c", code, "--help"], tmp_path, PYTHONPATH=str(site)).partition("\n")
    assert Path(where) == site / "headrace" / "__init__.py" and "bench" in said
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "trainer.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        handle = trainer.stdout.readline().strip()
        for name in "ab":
            run([sys.executable, "rollout.py", handle, name], tmp_path, PYTHONPATH=str(site))
        said = trainer.stdout.read()
    assert trainer.returncode == 0 and "[3 5 3 5] tensor([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4]" in said, said


def run(command: list[str], folder: Path, **environment: str) -> str:
    """The output of a command that must end well."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
