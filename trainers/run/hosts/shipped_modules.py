"""Ships the user's Python modules to the run's actors through Ray, for hosts that do not share the user's folder."""

from __future__ import annotations

import importlib.util
import logging
import site
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

from ...errors import UserError

_log = logging.getLogger(__name__)
EXCLUDED = ("**/__pycache__/**", "**/.git/**", "**/.venv/**")
"""Files of shipped packages that stay here."""


@dataclass(frozen=True, slots=True)
class ShippedModules:
    """Modules of the user that travel to the run's actors."""

    paths: tuple[str, ...] = ()
    """Python files, and folders of packages; () if nothing is shipped."""

    def options(self) -> dict[str, Any]:
        """Upload the modules to the Ray cluster, and return the options with which an actor can import them.

        To be called before each start of an actor: Ray forgets modules that no process uses, and the files can have
        changed. Raises UserError if Ray refuses them.
        """
        if not self.paths:
            return {}
        wanted = {"py_modules": list(self.paths), "excludes": list(EXCLUDED)}
        try:
            with tempfile.TemporaryDirectory() as scratch:
                sent = upload_py_modules_if_needed(wanted, include_gitignore=False, scratch_dir=scratch, logger=_log)
        except Exception as error:  # Ray's errors have several classes; too large a package is a RuntimeError.
            raise UserError(
                f"resources.ship: {', '.join(self.paths)} cannot be sent ({error}), expected files that can be read "
                "and packages of less than 500 MiB; name only what the run needs"
            ) from error
        return {"runtime_env": {"py_modules": sent["py_modules"]}}


def modules_beside(name: str) -> list[str]:
    """Return the paths of a top-level module of the user, and of all others in its folder that an import finds here.
    For a module that is installed, or unknown here, there are none."""
    place = _place_of(name)
    installed = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    if place is None or str(place.parent) in installed:
        return []
    beside = (path for path in place.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    # A file with the name of an installed module must not hide that module elsewhere.
    return sorted({str(place), *(str(path) for path in beside if _place_of(path.stem) == path)})


def _place_of(name: str) -> Path | None:
    """Return the file or folder of a top-level module; None if there is none."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        return None
    place = Path(next(iter(spec.submodule_search_locations or ()), spec.origin or ""))
    return place if place.is_absolute() and place.exists() else None


def named_modules(paths: Sequence[str]) -> list[str]:
    """Return absolute paths of the Python files and packages that the user names. Raises UserError for another path."""
    found = [Path(path).expanduser().absolute() for path in paths]
    for path in found:
        if not (path.is_dir() or (path.suffix == ".py" and path.is_file())):
            raise UserError(f"resources.ship: got {str(path)!r}, expected a Python file or the folder of a package")
    return [str(path) for path in found]
