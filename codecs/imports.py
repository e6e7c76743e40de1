"""Imports the objects that users name by a path `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any


def import_object(path: str, what: str) -> Any:
    """Return the object that `package.module:name` names.

    what: its purpose, for the error (`sampler`). Raises ValueError in one sentence when the path is malformed, or when
    the module cannot be imported (with its own error) or has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{what}: got {path!r}, expected an import path like 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises at import
        raise ValueError(
            f"{what}: module {module_name!r} of {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(f"{what}: module {module_name!r} has no {name!r}") from None
