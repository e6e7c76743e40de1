"""The house stays easy to walk: short functions, few imports per file, small folders, one meaning per file name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

import pytest

from headrace.tests.house import tree

MAX_LINES = 60
"""Lines that a function may have, from `def` to its last."""
MAX_FAN_OUT = 25
"""Other modules of Headrace that a file may import from."""
MAX_FILES = 16
"""Python files that a folder may have."""
MAX_WHOLE_CONFIG = 40
"""Functions of the package that may take the whole `Config`; others take the section that they read."""
PARTS = {
    *("__init__", "__main__", "config", "factory", "protocol", "messages"),
    *("engine", "backend", "benchmark", "actor", "worker"),
}
"""Names that several files of a floor may have, since they say which part of its folder a file is."""


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{path}:{node.lineno} {node.name}": length
        for path in tree.modules()
        for node in tree.definitions(path)
        if not isinstance(node, ast.ClassDef) and (length := _length(node)) > MAX_LINES
    }
    assert long == {}


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_imports_from_too_many_others() -> None:
    # The public names come from as many modules as they have, and are loaded one by one.
    modules = [path for path in tree.package() if path != "__init__.py"]
    wide = {path: len(fan) for path in modules if len(fan := _imported(path)) > MAX_FAN_OUT}
    assert wide == {}


def _imported(path: str) -> set[str]:
    """Return the modules of Headrace that the file at `path` imports from, relative to the root."""
    known = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in tree.package()}
    found: set[str] = set()
    for node in tree.nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = path.removesuffix(".py").split("/")[: -node.level]
            module = ".".join([*parts, *([node.module] if node.module else [])])
            inner = {f"{module}.{name.name}".lstrip(".") for name in node.names}
            found |= {name for name in inner if name in known} or {module}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace."):
            found.add((node.module or "").removeprefix("headrace."))
    return found


def test_no_folder_is_crowded() -> None:
    folders = Counter(path.rpartition("/")[0] for path in tree.package())
    assert {folder: count for folder, count in folders.items() if count > MAX_FILES} == {}


def test_few_functions_take_the_whole_config() -> None:
    """A function that takes a section says what it reads."""
    takers = [
        f"{path}:{node.lineno} {node.name}"
        for path in tree.package()
        for node in tree.definitions(path)
        if not isinstance(node, ast.ClassDef) and any(map(_is_config, ast.walk(node.args)))
    ]
    assert len(takers) <= MAX_WHOLE_CONFIG, "\n".join(takers)


def _is_config(node: ast.AST) -> bool:
    annotation = node.annotation if isinstance(node, ast.arg) else None
    return annotation is not None and any(
        isinstance(part, ast.Name) and part.id == "Config" for part in ast.walk(annotation)
    )


@pytest.mark.parametrize("floor", tree.FOLDERS)
def test_a_file_name_means_one_thing_on_a_floor(floor: str) -> None:
    named: defaultdict[str, list[str]] = defaultdict(list)
    for path in tree.modules(floor):
        named[path.rpartition("/")[2].removesuffix(".py")].append(path)
    assert {name: paths for name, paths in named.items() if len(paths) > 1 and name not in PARTS} == {}
