"""Makes mutants of the package at random: one expression or statement of one function changes its meaning.

A comparison is turned round or loses its equality, a condition is negated, `and` and `or` change places, an operator of
arithmetic is replaced, a number is one larger, a truth value is its opposite, or a call whose result is not used is
left out. Lines that only make text (errors, logs, docstrings, reports) are passed over, since tests are not to pin
words.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("codecs", "dataplane", "actors", "trainers", "cli")
"""Folders of the package whose code is changed. Benchmarks are not: they are tools themselves."""
NEEDS = ("vllm", "megatron", "mooncake", "cuda", "gpu", "kernel", "verifiers", "trl")
"""Words in the path of a file whose tests need a device or a library that not every machine has."""
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+",
}  # fmt: skip
WORDS = {"debug", "info", "warning", "error", "exception", "print", "message", "note", "line"}
"""Names of functions that only tell something."""


@dataclass(frozen=True)
class Change:
    """One change of the package's code, between two places of one file."""

    path: str
    """Path of the file, relative to the checkout."""
    line: int
    start: int
    """Offset of the replaced text in the file's bytes."""
    end: int
    new: str
    """Text that replaces it."""
    what: str
    """Description of the change, for the report."""

    def apply(self, text: bytes) -> bytes:
        """Return the file's content with the change."""
        return text[: self.start] + self.new.encode() + text[self.end :]


def draw(root: Path, number: int, seed: int) -> list[Change]:
    """Return `number` changes, drawn by `seed` from all functions of the package; each is in a file of its own."""
    rng = random.Random(seed)
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    paths = [path for path in paths if not any(word in path.relative_to(root).as_posix() for word in NEEDS)]
    weights = [len(path.read_bytes()) for path in paths]
    found: list[Change] = []
    while len(found) < number:
        path = rng.choices(paths, weights)[0]
        changes = list(changes_of(root, path.relative_to(root).as_posix()))
        if changes and path.relative_to(root).as_posix() not in {change.path for change in found}:
            found.append(rng.choice(changes))
    return found


def changes_of(root: Path, path: str) -> Iterator[Change]:
    """Yield all changes of the file at `path` that the module's docstring describes, in order of the code."""
    text = (root / path).read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(first: ast.expr | ast.stmt, last: ast.expr | ast.stmt, new: str, what: str) -> Change:
        start = starts[first.lineno - 1] + first.col_offset
        end = starts[(last.end_lineno or last.lineno) - 1] + (last.end_col_offset or 0)
        return Change(path, first.lineno, start, end, new, f"{text[start:end].decode()!r} -> {new!r} ({what})")

    for function in ast.walk(ast.parse(text)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in _code(function):
                if (found := _replacement(node)) is not None:
                    yield change(node, node, *found)


def _code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes of a function's body, without those of inner functions and those that only make text."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr)
        ):
            continue
        if isinstance(node, ast.Call) and _name(node) in WORDS:
            continue
        if isinstance(node, (ast.expr, ast.stmt)):
            yield node
        waiting.extend(child for child in reversed(list(ast.iter_child_nodes(node))) if not _is_annotation(node, child))


def _is_annotation(node: ast.AST, child: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and child is node.annotation


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _replacement(node: ast.expr | ast.stmt) -> tuple[str, str] | None:
    """Return the code that stands for `node` in a mutant, and what the mutant does; None for other nodes."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = COMPARISONS[type(node.ops[0])]
        return f"({ast.unparse(node.left)} {new} {ast.unparse(node.comparators[0])})", "another comparison"
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return f"({ast.unparse(ast.BoolOp(other, node.values))})", "and, or exchanged"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})", "not dropped"
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _has_text(node):
        return f"({ast.unparse(node.left)} {OPERATORS[type(node.op)]} {ast.unparse(node.right)})", "another operator"
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return repr(not node.value), "the opposite"
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return repr(node.value + 1), "one more"
    if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        return None if isinstance(call, ast.Call) and _name(call) in WORDS else ("pass", "a call left out")
    return None


def _has_text(node: ast.BinOp) -> bool:
    parts = [part for part in ast.walk(node) if isinstance(part, (ast.Constant, ast.JoinedStr))]
    return any(isinstance(part, ast.JoinedStr) or isinstance(part.value, str) for part in parts)
