"""Compares the installed packages with the sets of versions that were run, which are the files of `constraints/`.

Only metadata is read, so that nothing that takes seconds to import, or is broken, is imported.
"""

from __future__ import annotations

import importlib.metadata
import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "constraints"
_LINE = re.compile(r"([\w.-]+)==([\w.+!]+)\s*(?:;\s*python_version\s*(<|>=)\s*['\"](\d+)\.(\d+)['\"]\s*)?$")
_COMPARE = {"<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A set of versions beside what is installed."""

    name: str
    """Name of the set, such as `cpu`."""
    same: int
    """Number of packages of the set that are installed in its version."""
    different: tuple[str, ...]
    """Packages that are installed in another version, such as `torch 2.12.0, not 2.13.0`."""


def read_set(path: Path, python: tuple[int, int]) -> dict[str, str]:
    """Return the versions of a set by package, as a Python of this version installs them.

    Raises ValueError for a line that pins no version.
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


def compare(name: str, versions: Mapping[str, str]) -> Comparison:
    """Compare a set with the installed packages.

    Those that are not installed do not count, nor does the part of an installed version that names a build, such as
    `+cpu`.
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
    """Return the set that has the fewest differences to what is installed; None if there are no sets.

    Of several such sets, it is the one with the most packages in common.
    """
    python = sys.version_info[:2]
    found = [compare(path.stem, read_set(path, python)) for path in sorted(folder.glob("*.txt"))]
    return min(found, key=lambda one: (len(one.different), -one.same), default=None)
