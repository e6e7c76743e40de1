"""Stores the shipped objects of a run, functions and classes of a script or notebook, in its folder `objects`.

An object's path in the configuration, `object@DIGEST:NAME`, says which file it is in: `objects/NAME-DIGEST.pickle`. So
any process can resume and evaluate a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...dataplane.imports import OBJECT, ship_objects, shipped_objects
from ..errors import UserError

FOLDER = "objects"


def write_objects(paths: Sequence[str], folder: Path) -> None:
    """Write the objects at `paths` that this process has to the run folder `folder`. Only the user can read them."""
    objects = shipped_objects(paths)
    if objects:
        (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
    for path, data in objects.items():
        file = folder / FOLDER / _file_name(path)
        draft = file.with_name(f"{file.name}.new")
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(data)
        draft.replace(file)


def read_objects(paths: Sequence[str], folders: Iterable[str | Path]) -> None:
    """Read the objects at `paths` that this process does not have from the first of the run folders that has them. They
    are loaded when they are used; an object without a file is refused then. Raises UserError for a file that others
    can have written, because to load it runs its code."""
    known = shipped_objects(paths)
    for path in (path for path in paths if path not in known):
        files = (Path(folder) / FOLDER / _file_name(path) for folder in folders)
        if file := next((file for file in files if file.is_file()), None):
            if not (_is_own(file) and _is_own(file.parent)):
                raise UserError(f"{file}: others can write the file or its folder, expected only this user to")
            ship_objects({path: file.read_bytes()})


def _is_own(place: Path) -> bool:
    state = place.stat()
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _file_name(path: str) -> str:
    digest, _, name = path.removeprefix(OBJECT).partition(":")
    return f"{os.path.basename(name)}-{os.path.basename(digest)}.pickle"
