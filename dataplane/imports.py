"""Imports users' objects by path and slow modules ahead of their use, and names the extra of a missing package.

An object of the running script or notebook has no module that other processes could import. It is shipped instead: its
path is `object@DIGEST:NAME`, with the digest of its source, and each process of the run gets its pickle when it starts.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OBJECT = "object@"
"""Beginning of the path of a shipped object."""
_shipped: dict[str, bytes] = {}
_loaded: dict[str, Any] = {}


class MissingExtra(ValueError):
    """An optional package is not installed. The message names the extra of Headrace that installs it."""

    def __init__(self, package: str, needed_by: str, extra: str) -> None:
        self.parts = (package, needed_by, extra)
        super().__init__(f"{needed_by} needs {package}, which is not installed: pip install 'headrace[{extra}]'")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        return MissingExtra, self.parts


def ship_objects(objects: Mapping[str, bytes]) -> None:
    """Let `import_object` load these objects in this process: path -> pickle. To load a pickle runs its code, so
    `objects` must come from the user of this process, its parent or Ray, and never from a client of the data plane."""
    for path, data in objects.items():
        if _shipped.get(path) != data:
            _shipped[path] = data
            _loaded.pop(path, None)


def shipped_objects(paths: Iterable[str]) -> dict[str, bytes]:
    """Return the pickles of the shipped objects among `paths`. Other paths are left out."""
    return {path: _shipped[path] for path in paths if path in _shipped}


def import_object(path: str, what: str) -> Any:
    """Import and return the object at `path`, which has the form `package.module:name`, or load a shipped object.

    what: config key or purpose of the object, for error messages (such as `sampler`). Raises ValueError when the path
    is malformed, when the module cannot be imported (the message gives the original error), and when the module has no
    such name. `__main__` is refused, because other processes cannot import what a notebook or a script defines.
    """
    if path.startswith(OBJECT):
        return _load_shipped(path, what)
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{what}: got {path!r}, expected an import path like 'package.module:function'")
    if module_name == "__main__":
        raise ValueError(
            f"{what}: got {path!r}, expected a module in a file of its own, because the run's processes cannot import "
            "what a notebook or a script defines"
        )
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A user's module can raise any error at import, also SystemExit.
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        where = f"; the working folder {os.getcwd()} and Python's path were searched" if absent else ""
        raise ValueError(
            f"{what}: module {module_name!r} of {path!r} cannot be imported: {type(error).__name__}: {error}{where}"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what}: module {module_name!r} ({getattr(module, '__file__', None)}) has no {name!r}{hint}")
    return getattr(module, name)


def _load_shipped(path: str, what: str) -> Any:
    """Return a shipped object, which each process loads once. Raises ValueError if it was not shipped to this process,
    or cannot be loaded here."""
    if path not in _shipped:
        raise ValueError(
            f"{what}: got {path!r}, expected its file in the folder `objects` of the run, because the object is of a "
            "script or notebook"
        )
    if path not in _loaded:
        try:
            _loaded[path] = pickle.loads(_shipped[path])
        except Exception as error:  # The modules that it needs can raise any error at import.
            raise ValueError(f"{what}: {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return _loaded[path]


def import_each(modules: Sequence[str]) -> None:
    """Import `modules`, one after another. A module that cannot be imported is skipped: the code that needs it imports
    it again and reports the error."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_ahead(modules: Sequence[str]) -> threading.Thread:
    """Start to import `modules` in a thread, as `import_each` does, and return the thread."""
    thread = threading.Thread(target=import_each, args=(modules,), name="headrace-imports", daemon=True)
    thread.start()
    return thread
