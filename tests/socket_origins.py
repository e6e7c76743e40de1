"""Remembers where each socket of this process was opened, so that the warning about an unclosed one says it.

The garbage collector may find such a socket many tests later, and it is the test that runs just then that fails.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_NUM_LINES = 6
_MOST = 1 << 16
"""Largest number of sockets that are remembered: few, as most come to lie where an earlier one lay."""
_origins: dict[int, tuple[str, list[tuple[CodeType, int]]]] = {}
"""Test and innermost lines of code that opened a socket, by the socket's id."""


def _note_socket(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "socket.__new__":
        return
    lines: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < _NUM_LINES and "/_pytest/" not in frame.f_code.co_filename:
        if frame.f_code.co_filename != socket.__file__:
            lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    if len(_origins) >= _MOST:
        _origins.clear()
    _origins[id(arguments[0])] = os.environ.get("PYTEST_CURRENT_TEST", "no test"), lines


sys.addaudithook(_note_socket)


def add_to_warnings(config: pytest.Config) -> None:
    """Make the warnings about unclosed sockets say where these were opened. To be called when pytest has set its own
    hook for what the garbage collector finds, which gets the longer text."""
    show = sys.unraisablehook

    def show_with_origin(found: sys.UnraisableHookArgs) -> None:
        origin = _origins.get(id(found.object)) if isinstance(found.object, socket.SocketType) else None
        if origin is None:
            show(found)
            return
        names = ("exc_type", "exc_value", "exc_traceback", "object")
        longer: Any = SimpleNamespace(**{name: getattr(found, name) for name in names})
        longer.err_msg = f"{_told(*origin)}. {found.err_msg or 'Exception ignored in'}"
        show(longer)

    sys.unraisablehook = show_with_origin
    config.add_cleanup(lambda: setattr(sys, "unraisablehook", show))


def _told(test: str, lines: list[tuple[CodeType, int]]) -> str:
    shown = [f"{_short(code.co_filename)}:{line} {code.co_name}" for code, line in lines]
    return f"This socket was opened by {test} at {' <- '.join(shown)}"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else "/".join(path.parts[-2:])
