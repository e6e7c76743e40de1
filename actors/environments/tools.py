"""Tools that a policy may call in the middle of an episode; each takes a text and returns a text."""

from __future__ import annotations

import ast
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ...dataplane.imports import import_object

Tool = Callable[[str], str | Awaitable[str]]
"""Type of a tool: a function, possibly an `async def`, that takes the arguments of a call as text and returns the
result as text. If it raises, the policy gets the error message as the result."""

_MAX_LENGTH = 200
_MAX_BITS = 4096

_BINARY: Mapping[type[ast.operator], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Return the value, as text, of an arithmetic expression of numbers, brackets and + - * / // % **.

    Raises ValueError for anything else and for more than 200 characters, ZeroDivisionError for a division by zero, and
    OverflowError for integers above 4096 bits.
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, expected at most {_MAX_LENGTH}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(f"{expression.strip()!r} is not an arithmetic expression") from None
    value = _value(tree.body)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
            # Checked before it is computed, because 9**9**9 would keep the machine busy for good.
            if abs(right) * max(left.bit_length(), 1) > _MAX_BITS:
                raise OverflowError("the number is too large")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError(f"{ast.unparse(node)!r} is not made of numbers and + - * / // % **")


def _bounded(value: int | float) -> int | float:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError("the number is too large")
    return value


TOOLS: Mapping[str, Tool] = {"calculator": calculator}


def build_tools(names: Sequence[str]) -> dict[str, Tool]:
    """Return the tools in `names`, by name.

    names: names in TOOLS, or import paths `package.module:function`, whose tools are named after the function. Raises
    ValueError with a one-sentence message for an unknown name, a path that cannot be imported, or a name given twice.
    """
    tools: dict[str, Tool] = {}
    for entry in names:
        name = entry.rpartition(":")[2]
        if name in tools:
            raise ValueError(f"rollout.tools: {name!r} is given twice")
        if ":" in entry:
            tools[name] = import_object(entry, "rollout.tools")
        elif entry in TOOLS:
            tools[name] = TOOLS[entry]
        else:
            raise ValueError(
                f"rollout.tools: got {entry!r}, expected one of {', '.join(TOOLS)} or an import path "
                f"'package.module:function'"
            )
    return tools
