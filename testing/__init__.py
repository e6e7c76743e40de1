"""Helps to test code that uses Headrace, with a data plane, a cluster, an engine and a trainer without processes.

Each name is imported from its module at its first use. Nothing here needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..actors.engines.scripted import ScriptedEngine, random_tokens
    from ..trainers.backends.scripted import ScriptedBackend
    from .cluster import PENDING, FakeActor, FakeCluster
    from .data_plane import SCHEMA, assert_rows, open_plane, plane, rows
    from .engines import TalkingEngine

__all__ = [
    "PENDING",
    "SCHEMA",
    "FakeActor",
    "FakeCluster",
    "ScriptedBackend",
    "ScriptedEngine",
    "TalkingEngine",
    "assert_rows",
    "open_plane",
    "plane",
    "random_tokens",
    "rows",
]

_MODULES = {
    "..actors.engines.scripted": "ScriptedEngine random_tokens",
    "..trainers.backends.scripted": "ScriptedBackend",
    ".cluster": "PENDING FakeActor FakeCluster",
    ".data_plane": "SCHEMA assert_rows open_plane plane rows",
    ".engines": "TalkingEngine",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name from its module when it is first used. Raises AttributeError for a name that is not public."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
