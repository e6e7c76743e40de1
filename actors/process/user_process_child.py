"""Calls one function in a separate process, which a keeper ends (see process_keeper.py).

The first line of the input is {"target": "module:name", "options": {...}, "path": [...], "shipped": {...}}, answered by
{"ready": true} or {"failed": "..."}. `shipped` has the target's pickle in base64 if the target is a shipped object.
Each further line is {"method": "__call__", "arguments": [...]}, answered by {"value": ...} or {"error": "..."}.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import json
import os
import pickle
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPT = "__prompt__"
"""Key that marks an argument as a prompt. The fields of a prompt become attributes of an object."""


# This script runs without the package, so it reads its neighbour as a file.
_NEIGHBOUR = runpy.run_path(str(Path(__file__).with_name("user_errors.py")))
described, text_of_error = _NEIGHBOUR["described"], _NEIGHBOUR["text_of_error"]


def load(first: dict[str, Any]) -> Any:
    # The import path keeps the parent's order, so that a name means the same module in both processes.
    sys.path[:] = dict.fromkeys([*first["path"], *sys.path])
    module, _, name = first["target"].partition(":")
    pickled = first["shipped"].get(first["target"])
    # The parent process, which writes this line, has the pickle from the run's driver.
    target = pickle.loads(base64.b64decode(pickled)) if pickled else getattr(importlib.import_module(module), name)
    if inspect.isclass(target):
        return target(**first["options"])
    options = first["options"]
    return (lambda *arguments: target(*arguments, **options)) if options else target


def call(function: Any, arguments: list[Any]) -> Any:
    given = [
        SimpleNamespace(**argument[PROMPT]) if isinstance(argument, dict) and PROMPT in argument else argument
        for argument in arguments
    ]
    value = function(*given)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _plain(value: Any) -> Any:
    """Return an array or tensor as a list or number, and any other value that is not JSON as a number."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if not hasattr(value, "__float__"):
        raise TypeError(f"the function returned a {type(value).__name__}, expected what JSON can hold, such as a list")
    return float(value)


def main() -> None:
    # Output that the function prints must not mix with the protocol's lines, so it goes to standard error.
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        output.write(json.dumps(message, default=_plain) + "\n")

    try:
        first = json.loads(sys.stdin.readline())
        function = load(first)
    except BaseException as error:  # A user's module can raise any error at import.
        write({"failed": text_of_error(error)})
        return
    write({"ready": True})
    for line in sys.stdin:
        try:
            request = json.loads(line)
            write({"value": call(getattr(function, request["method"]), request["arguments"])})
        except BaseException as error:  # The function can raise anything. Some libraries end a call by a BaseException.
            write({"error": described(error)})


if __name__ == "__main__":
    main()
