"""Compares the installed packages with the tested sets of versions, the files in `constraints/`.

Only metadata is read, so slow or broken packages are not imported.
"""

from __future__ import annotations

import importlib.metadata
import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError

FOLDER = Path(__file__).parents[3] / "constraints"
_LINE = re.compile(r"([\w.-]+)==([\w.+!]+)\s*(?:;\s*python_version\s*(<|>=)\s*['\"](\d+)\.(\d+)['\"]\s*)?$")
_COMPARE = {"<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A set of versions, compared with the installed packages."""

    name: str
    """Name of the set, such as `cpu`."""
    same: int
    """Number of packages that are installed in the version of the set."""
    different: tuple[str, ...]
    """Packages that are installed in another version, such as `torch 2.12.0, not 2.13.0`."""


def read_set(path: Path, python: tuple[int, int]) -> dict[str, str]:
    """Return the versions of a set by package, for the running version of Python. Raises ValueError for a line without
    a pinned version.
    """
    versions = {}
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        if (found := _LINE.match(line)) is None:
            raise ValueError(f"{path.name}: got {line!r}, expected a package and its version, such as torch==2.13.0")
        name, version, compare, *bound = found.groups()
        if compare is None or _COMPARE[compare](python, (int(bound[0]), int(bound[1]))):
            versions[name] = version
    return versions


def set_text(name: str, folder: Path = FOLDER) -> str:
    """Return the content of the set's file, which `pip install -c` takes. Raises UserError if there is no such set."""
    known = sorted(path.stem for path in folder.glob("*.txt"))
    if name not in known:
        raise UserError(f"--constraints: got {name!r}, expected {' or '.join(known)}")
    return (folder / f"{name}.txt").read_text(encoding="utf-8")


def compare(name: str, versions: Mapping[str, str]) -> Comparison:
    """Compare a set with the installed packages. Packages that are not installed are ignored, as is the build in an
    installed version, such as `+cpu`.
    """
    same, different = 0, []
    for package, version in versions.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.partition("+")[0] == version:
            same += 1
        else:
            different.append(f"{package} {installed}, not {version}")
    return Comparison(name, same, tuple(different))


def nearest_set(folder: Path = FOLDER) -> Comparison | None:
    """Return the set with the fewest differences from the installed packages; None if there are no sets. Of several
    such sets, returns the set with the most packages in common.
    """
    python = sys.version_info[:2]
    found = [compare(path.stem, read_set(path, python)) for path in sorted(folder.glob("*.txt"))]
    return min(found, key=lambda one: (len(one.different), -one.same), default=None)
