"""The `tool_use` environment lets the policy call tools within its answer and continue with their results.

prompt -> "... <tool>calculator: 12*3</tool>" -> "<result>36</result>" -> "... 36"
          turn 0, chosen by the policy           masked                  turn 1, chosen by the policy
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..user_threads import TooManyHang, UserThreads
from .episode import Episode
from .tools import Tool, build_tools

CALL_END = "</tool>"
_CALL = re.compile(r"<tool>\s*(\w+)\s*:((?:(?!<tool>).)*)" + re.escape(CALL_END), re.DOTALL)

TOOL_TIMEOUT_S = 30.0
"""Time limit in seconds for a tool's function, and again for awaiting the result of an `async def` tool. When it is
exceeded, the policy gets an error text as the result."""
NUM_TOOL_THREADS = 32
"""Largest number of tool functions that run in threads at the same time in a rollout actor. The awaiting of `async def`
tools is not limited."""


class ToolUse:
    """Plays episodes of up to `max_turns` turns; each turn ends with a tool call or with the answer.

    Each tool call runs in a thread of its own, so that a tool that hangs does not hold up anything else. A tool may
    also be an `async def`, which is awaited.
    """

    def __init__(self, tools: Sequence[str] | Mapping[str, Tool] = ("calculator",), max_turns: int = 4) -> None:
        """tools: names or import paths of the tools (see `build_tools`), or the tools by name. max_turns: largest
        number of turns of an episode."""
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ValueError(f"environment.options.max_turns: got {max_turns!r}, expected a whole number >= 1")
        self._tools = tools if isinstance(tools, Mapping) else build_tools(tools)
        self._max_turns = max_turns
        self._threads = UserThreads("tools", NUM_TOOL_THREADS)

    async def play(self, episode: Episode) -> None:
        """Play one episode.

        `rollout.max_new_tokens` limits its tokens after the prompt, including the results of tools. The text of the
        sample is that of its last turn, the answer. An episode that ends with a tool call has finish_reason `length`.
        Raises TooManyHang if too many earlier tool calls have not returned.
        """
        for turn in range(self._max_turns):
            said = await episode.generate(stop=(CALL_END,))
            call = find_call(said.text) if said.finish_reason == "stop" else None
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
                break  # no token would be left for an answer
            episode.add_tokens(result_ids)
        episode.finish_reason = "length"

    async def _answer(self, name: str, arguments: str) -> str:
        """Run a tool and return its result as text. If the call is wrong or fails, return a text that describes the
        error, so that the policy can react to it."""
        tool = self._tools.get(name)
        if tool is None:
            return f"error: no tool {name}, there is {', '.join(self._tools)}"
        try:
            result: Any = await self._threads.call(f"tool {name!r}", lambda: tool(arguments), TOOL_TIMEOUT_S)
            if inspect.isawaitable(result):
                async with asyncio.timeout(TOOL_TIMEOUT_S):
                    result = await result
            return str(result)
        except TooManyHang:
            raise
        except Exception as error:
            return f"error: {str(error) or type(error).__name__}"


def find_call(text: str) -> tuple[str, str] | None:
    """Return the tool name and the arguments of the call at the end of `text`; None if `text` does not end with a
    call."""
    if not text.rstrip().endswith(CALL_END):
        return None
    calls = _CALL.findall(text)
    return (calls[-1][0], calls[-1][1].strip()) if calls else None
