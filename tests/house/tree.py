"""Reads the checkout once for all tests of the house: its files, syntax trees, and the text that people read."""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("cli", "bench", "trainers", "actors", "dataplane", "codecs", "testing")
"""Folders of the package, below its root."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Text:
    """A docstring, comment, string or page, with its place."""

    place: str
    """File and line number, as `codecs/blocks.py:12`."""
    text: str
    """Its words; lines of a docstring are kept."""


@functools.cache
def files() -> tuple[str, ...]:
    """Return the paths of all files of the checkout, relative to its root. Hidden folders, `build` and `runs` are left
    out."""
    found: list[str] = []
    for folder, inner, names in os.walk(ROOT):
        here = Path(folder) == ROOT
        inner[:] = [name for name in inner if name[0] != "." and not (here and name in ("build", "runs"))]
        found += [Path(folder, name).relative_to(ROOT).as_posix() for name in names]
    return tuple(sorted(found))


@functools.cache
def modules(*tops: str) -> dict[str, ast.Module]:
    """Return the syntax trees of the Python files below the folders `tops`: path relative to the root -> tree. Without
    `tops`, they are those of the whole checkout."""
    tops = tops or (*FOLDERS, "tests", "tools", "examples", "")
    chosen = [path for path in files() if path.endswith(".py") and path.partition("/")[0 if "/" in path else 1] in tops]
    gc.disable()  # it would look through millions of nodes again and again, none of which is garbage
    try:
        return {path: _parsed(path) for path in chosen}
    finally:
        gc.enable()


@functools.cache
def _parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def package() -> dict[str, ast.Module]:
    """Return the syntax trees of the package itself: path relative to the root -> tree."""
    return modules(*FOLDERS, "")


@functools.cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the file at `path`, relative to the root."""
    return tuple(ast.walk(_parsed(path)))


def definitions(path: str) -> Iterator[Definition]:
    """Yield the classes and functions of a file, inner ones too."""
    for node in nodes(path):
        if isinstance(node, Definition):
            yield node


def pages() -> list[Path]:
    """Return the Markdown files that people read, in order."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


@functools.cache
def prose(page: Path) -> str:
    """Return a page's text with its blocks of code emptied, line for line."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def page_texts() -> Iterator[Text]:
    """Yield the paragraphs of all pages, without blocks of code."""
    for page in pages():
        text, name = prose(page), page.relative_to(ROOT).as_posix()
        for paragraph in re.finditer(r"(?:[^\n]+\n?)+", text):
            yield Text(f"{name}:{text[: paragraph.start()].count(chr(10)) + 1}", paragraph[0])


def comments(path: str) -> Iterator[Text]:
    """Yield the comments of a file; those on lines that follow one another are one text."""
    block: list[str] = []
    first = 0
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("# "):
            first = first if block else number
            block.append(line.lstrip()[2:])
            continue
        if block:
            yield Text(f"{path}:{first}", " ".join(block))
            block = []
        code, mark, behind = line.rpartition("  # ")
        if mark and code.strip() and not set(behind) & set("\"'"):
            yield Text(f"{path}:{number}", behind)


def strings(path: str) -> Iterator[Text]:
    """Yield the strings of a file that hold words: docstrings, errors, help."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(f"{path}:{node.lineno}", node.value)


def docstrings(path: str) -> Iterator[Text]:
    """Yield the docstrings of a file: of its module, classes, functions, and of fields and constants."""
    for node in nodes(path):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield Text(f"{path}:{item.lineno}", item.value.value)
