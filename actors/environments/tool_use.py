"""The `tool_use` environment lets the policy call tools within its answer and continue with their results.

prompt -> "... <tool>calculator: 12*3</tool>" -> "<result>36</result>" -> "... 36"
          turn 0, chosen by the policy           masked                  turn 1, chosen by the policy

A tool takes a text and returns a text; `calculator` is built in.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import math
import operator
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from ...dataplane.imports import import_object
from ..failures import SandboxFailed
from ..process.user_errors import awaited, said_by, storable
from ..process.user_function_timeouts import TooManyHang, UserProcessDied, UserProcesses, UserThreads
from .episode import Episode

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
CALL_END = "</tool>"
_CALL = re.compile(r"<tool>\s*(\w+)\s*:((?:(?!<tool>).)*)" + re.escape(CALL_END), re.DOTALL)
NUM_TOOL_THREADS = 32
"""Largest number of tool functions that run in threads at the same time in a rollout actor. The number of `async def`
tools that are awaited is not limited."""
NUM_TOOL_PROCESSES = 4
"""Largest number of processes of each tool in a rollout actor, with `runs=process`."""


def calculator(expression: str) -> str:
    """Return the value, as text, of an arithmetic expression of numbers, brackets and + - * / // % **.

    Raises ValueError for anything else and for more than 200 characters, ZeroDivisionError for a division by zero, and
    OverflowError for integers above 4096 bits and for floats that are too large.
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
            # The size of a power is checked before it is computed, because 9**9**9 would keep the machine busy forever.
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
            raise ValueError(f"environment.options.tools: {name!r} is given twice")
        if ":" in entry:
            tools[name] = import_object(entry, "environment.options.tools")
            _check_arguments(entry, tools[name])
        elif entry in TOOLS:
            tools[name] = TOOLS[entry]
        else:
            raise ValueError(
                f"environment.options.tools: got {entry!r}, expected one of {', '.join(TOOLS)} or an import path "
                f"'package.module:function'"
            )
    return tools


def _check_arguments(entry: str, tool: Any) -> None:
    """Raise ValueError unless a user's tool can be called with one text."""
    if not callable(tool):
        raise ValueError(f"environment.options.tools: {entry!r} is a {type(tool).__name__}, expected a function")
    try:
        signature = inspect.signature(tool)
    except ValueError:  # Some built-in callables have no signature.
        return
    try:
        signature.bind("")
    except TypeError as error:
        raise ValueError(
            f"environment.options.tools: {entry!r} takes {signature}, expected a function of one text, the arguments "
            f"of a call ({error})"
        ) from error


class ToolUse:
    """Plays episodes of up to `max_turns` turns; each turn ends with a tool call or with the answer.

    Each tool call runs in its own thread, so that a hanging tool does not delay anything else, or in one of the tool's
    processes. A tool may also be an `async def`, which is awaited.
    """

    def __init__(
        self,
        tools: Sequence[str] | Mapping[str, Tool] = ("calculator",),
        max_turns: int = 4,
        runs: Literal["thread", "process"] = "thread",
        timeout_s: float = 30.0,
        retries: int = 0,
    ) -> None:
        """tools: names or import paths of the tools (see `build_tools`), or the tools by name. max_turns: largest
        number of turns of an episode. runs: place where tools given by an import path run. `thread`: in threads.
        `process`: in separate processes, which are killed when a call takes too long. timeout_s: time limit in seconds
        for a call of a tool's function; with threads, awaiting the result of an `async def` has another limit of the
        same length. If a limit is exceeded, the policy gets an error text as the result. retries: number of times
        that a call in a process is tried again when it fails or takes too long."""
        for name, number, least in (("max_turns", max_turns, 1), ("retries", retries, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"environment.options.{name}: got {number!r}, expected a whole number >= {least}")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ValueError(f"environment.options.timeout_s: got {timeout_s!r}, expected a number of seconds > 0")
        if runs not in ("thread", "process"):
            raise ValueError(f"environment.options.runs: got {runs!r}, expected 'thread' or 'process'")
        if retries and runs == "thread":
            raise ValueError(
                f"environment.options.retries: got {retries} with runs='thread', where a call is not tried again, "
                "expected runs='process'"
            )
        self._tools = tools if isinstance(tools, Mapping) else build_tools(tools)
        own = [] if isinstance(tools, Mapping) or runs == "thread" else [entry for entry in tools if ":" in entry]
        self._processes = {entry.rpartition(":")[2]: UserProcesses(entry, {}, NUM_TOOL_PROCESSES) for entry in own}
        self._max_turns = max_turns
        self._timeout_s = float(timeout_s)
        self._retries = retries
        self._threads = UserThreads("tools", NUM_TOOL_THREADS)

    async def close(self) -> None:
        """End the tools' processes. Idempotent."""
        for processes in self._processes.values():
            await processes.close()

    async def play(self, episode: Episode) -> None:
        """Play one episode.

        `rollout.max_new_tokens` limits its tokens after the prompt, including the results of tools. The text of the
        sample is that of its last turn, the answer. An episode that ends with a tool call has finish_reason `length`.
        Raises TooManyHang if too many earlier tool calls have not returned.
        """
        for turn in range(self._max_turns):
            said = await episode.generate(stop=(CALL_END,))
            # The marks of a call can be special tokens, which the text of a turn does not have.
            texts = (said.text, episode.whole_text(said)) if said.finish_reason == "stop" else ()
            call = next(filter(None, map(find_call, texts)), None)
            if call is None:
                return
            if turn + 1 == self._max_turns:
                break
            try:
                result_ids = episode.encode(f"<result>{await self._answer(*call)}</result>")
            except TooManyHang as error:
                episode.fatal = error
                raise
            if len(result_ids) >= episode.tokens_left:
                break  # No token would be left for an answer.
            episode.add_tokens(result_ids)
        episode.finish_reason = "length"

    async def _answer(self, name: str, arguments: str) -> str:
        """Run a tool and return its result as text. If the call is wrong or fails, return a text that describes the
        error, so that the policy can react to it. Raises SandboxFailed if the tool's process died."""
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}, expected {', '.join(self._tools)}"
        try:
            if name in self._processes:
                return storable(str(await self._processes[name].call([arguments], self._timeout_s, self._retries)))
            result: Any = await self._threads.call(f"tool {name!r}", lambda: tool(arguments), self._timeout_s)
            if inspect.isawaitable(result):
                limit = asyncio.timeout(self._timeout_s)
                try:
                    async with limit:
                        result = await awaited(lambda: result)
                except TimeoutError:
                    if limit.expired():
                        return f"error: tool {name!r} did not return within {self._timeout_s:g} s"
                    raise  # The tool itself raised this error.
            return storable(str(result))
        except TooManyHang:
            raise
        except UserProcessDied as error:
            raise SandboxFailed(f"tool {name!r}: {error}") from error
        except Exception as error:
            return f"error: {said_by(error) or type(error).__name__}"


def find_call(text: str) -> tuple[str, str] | None:
    """Return the tool name and the arguments of the call at the end of `text`. Returns None if it does not end with a
    call."""
    if not text.rstrip().endswith(CALL_END):
        return None
    calls = _CALL.findall(text)
    return (calls[-1][0], calls[-1][1].strip()) if calls else None
