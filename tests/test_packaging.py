"""The wheel holds every package and runs outside the clone; pyproject's package list names every package folder."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
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


FOLDERS = ("codecs", "dataplane", "actors", "trainers", "bench", "cli", "testing", "constraints", "examples")
SHIPPED = {
    "py.typed": "type checkers look for it",
    "examples/gpu-0.6b.yaml": "`headrace bench gpu` runs it",
    "examples/quickstart.yaml": "`headrace recipe quickstart` copies it",
    "examples/grpo_in_one_file.py": "a page sends its readers there",
    "examples/tool-use/recipe.yaml": "`headrace recipe` reads it",
    "constraints/cpu.txt": "`headrace doctor --constraints cpu` prints it",
    "constraints/gpu.txt": "`headrace doctor --constraints gpu` prints it",
    "trainers/observe/pages/samples.js": "the report is made of it",
    "trainers/observe/pages/page.js": "the report is made of it",
    "trainers/observe/pages/page.css": "the report is made of it",
    "trainers/observe/pages/uplot/uPlot.iife.min.js": "the report is made of it",
    "trainers/observe/pages/uplot/uPlot.min.css": "the report is made of it",
    "trainers/observe/pages/uplot/LICENSE": "the report is made of it",
}


def distributions(folder: Path) -> tuple[Path, Path]:
    """Build the source archive of the working tree, and the wheel from that archive, without a network."""
    source = folder / "source"
    source.mkdir()
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "py.typed"))]:
        shutil.copy(path, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "build" / "site").mkdir(parents=True)
    (source / "build" / "site" / "search.js").touch()  # `make docs` leaves such files in a clone.
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, str(folder)], source)
    [archive] = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    run([*pip, str(archive)], folder)
    [wheel] = folder.glob("*.whl")
    return archive, wheel


@pytest.mark.processes
def test_the_wheel_runs_outside_the_clone(tmp_path: Path):
    """The wheel has all that it needs. Its help and its sets of versions need Python alone, and the README's three
    processes run with this machine's dependencies."""
    archive, wheel = distributions(tmp_path)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    for name, why in SHIPPED.items():
        assert (site / "headrace" / name).exists(), why
    with tarfile.open(archive) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    shipped = {str(path.relative_to(site / "headrace")) for path in (site / "headrace").rglob("*") if path.is_file()}
    assert shipped <= inside and not [name for name in shipped if name.startswith(("tests/", "docs/", "build/"))]

    alone = [sys.executable, "-S", "-m", "headrace.cli"]
    said = run([*alone, "doctor", "--constraints", "cpu"], tmp_path, PYTHONPATH=str(site))
    assert said == (ROOT / "constraints" / "cpu.txt").read_text()
    assert "doctor" in run([*alone, "--help"], tmp_path, PYTHONPATH=str(site))
    lacking = subprocess.run(
        [*alone, "train", "my.yaml"], env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert lacking.returncode == 2 and "is not installed, but this command needs it" in lacking.stderr

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


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["wheel", "archive"])
def test_a_first_run_without_a_clone(kind: str, tmp_path: Path):
    """The pip commands of the Containerfile install either file into an empty environment, as the page says. From
    there the copied quickstart is planned, and with the wheel it trains."""
    archive, wheel = distributions(tmp_path)
    place, work = tmp_path / "headrace", tmp_path / "work"
    work.mkdir()
    text = (ROOT / "container" / "Containerfile").read_text().replace("\\\n", "")
    [install] = [line.removeprefix("RUN ") for line in text.splitlines() if "pip install" in line]
    given = archive if kind == "archive" else wheel
    for mine, theirs in (
        ("rm /tmp/headrace-*.whl", "true"), ("/tmp/headrace-*.whl", str(given)), ("/opt/headrace", str(place)),
        ("python -m venv", f"{sys.executable} -m venv"), ("pip install --no-deps", "pip install -q --no-deps"),
    ):  # fmt: skip
        assert mine in install, mine
        install = install.replace(mine, theirs)
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    run(["sh", "-c", install], work, PATH=path, PYTHONPATH="", SET="cpu", EXTRAS="train", limit_s=1200)
    headrace = [str(place / "bin" / "headrace")]
    run([*headrace, "recipe", "quickstart", "--out", "first"], work, PYTHONPATH="")
    train = [*headrace, "train", "first/config.yaml", "run.dir=run", "algorithm.steps=2", "warmup.steps=5"]
    assert "plan of a step" in run([*train, "--dry-run"], work, PYTHONPATH="")
    if kind == "wheel":
        run(train, work, PYTHONPATH="", limit_s=200)
        assert (work / "run" / "report.html").exists() and (work / "run" / "model" / "config.json").exists()


def run(command: list[str], folder: Path, limit_s: float = 120, **environment: str) -> str:
    """The output of a command that must end well."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=limit_s
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
