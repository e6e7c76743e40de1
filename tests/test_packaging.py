"""pyproject's package list names every package folder, and nothing else."""

import tomllib
from pathlib import Path

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
