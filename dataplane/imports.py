"""Imports users' objects by path and slow modules ahead of their use, and names the extra of a missing package."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Sequence
from typing import Any


class MissingExtra(ValueError):
    """An optional package is not installed. The message names the extra of Headrace that installs it."""

    def __init__(self, package: str, needed_by: str, extra: str) -> None:
        self.parts = (package, needed_by, extra)
        super().__init__(f"{needed_by} needs {package}, which is not installed: pip install 'headrace[{extra}]'")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        return MissingExtra, self.parts


def import_object(path: str, what: str) -> Any:
    """Import and return the object at `path`, which has the form `package.module:name`.

    what: purpose of the object, for error messages (such as `sampler`). Raises ValueError when the path is malformed,
    when the module cannot be imported (the message gives the original error), and when the module has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{what}: got {path!r}, expected an import path like 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # A user's module can raise any error at import.
        raise ValueError(
            f"{what}: module {module_name!r} of {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(f"{what}: module {module_name!r} has no {name!r}") from None


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
