"""The `tool_use` environment lets the policy call tools within its answer and continue with their results.

prompt -> "... <tool>calculator: 12*3</tool>" -> "<result>36</result>" -> "... 36"
          turn 0, chosen by the policy           masked                  turn 1, chosen by the policy
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..engines.continuation import generate_whole
from ..engines.protocol import SESSION_SEPARATOR, Completion, Generator, SamplingParams
from ..engines.tokenizer import encode_prompts
from ..protocols import EPISODE_ERRORS, Prompt, Sample
from ..user_threads import TooManyHang, UserThreads
from .single_turn import response_texts
from .tools import Tool

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

    def __init__(self, tools: Mapping[str, Tool], max_turns: int) -> None:
        if max_turns < 1:
            raise ValueError(f"environment.max_turns: got {max_turns}, expected at least 1")
        self._tools = tools
        self._max_turns = max_turns
        self._threads = UserThreads("tools", NUM_TOOL_THREADS)

    async def run(self, prompt: Prompt, engine: Generator, tokenizer: Any, params: SamplingParams) -> list[Sample]:
        """Play `params.n` episodes of the prompt and return their samples, in order.

        `params.max_new_tokens` limits the tokens of an episode after the prompt, including the results of tools. The
        text of a sample is the text of its last turn, the answer. An episode that ends with a tool call has
        finish_reason `length`.

        An error of the engine is raised, unless its type is in EPISODE_ERRORS; such an error makes only its own episode
        fail. Raises TooManyHang if too many earlier tool calls have not returned.
        """
        (prompt_ids,) = encode_prompts(tokenizer, [prompt.text])
        episodes = [
            asyncio.create_task(self._play(_Episode(prompt, index, prompt_ids), engine, tokenizer, params))
            for index in range(params.n)
        ]
        try:
            return list(await asyncio.gather(*episodes))
        finally:
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)

    async def _play(self, episode: _Episode, engine: Generator, tokenizer: Any, params: SamplingParams) -> Sample:
        try:
            return await self._turns(episode, engine, tokenizer, params)
        except EPISODE_ERRORS as error:
            return episode.sample("error", f"{type(error).__name__}: {error}")

    async def _turns(self, episode: _Episode, engine: Generator, tokenizer: Any, params: SamplingParams) -> Sample:
        for turn in range(self._max_turns):
            left = params.max_new_tokens - episode.num_response
            of_turn = replace(
                params,
                n=1,
                max_new_tokens=left,
                stop=(*params.stop, CALL_END),
                routes_from=episode.num_routes,
            )
            request_id = f"{episode.prompt.uid}.{episode.index}{SESSION_SEPARATOR}{turn}"
            (completion,) = await generate_whole(engine, tokenizer, request_id, episode.ids.tolist(), of_turn)
            (text,) = response_texts(tokenizer, [completion], of_turn)
            episode.add_turn(completion, text)
            call = find_call(text) if completion.finish_reason == "stop" else None
            if call is None:
                return episode.sample(completion.finish_reason)
            if turn + 1 == self._max_turns:
                break
            result = f"<result>{await self._answer(*call)}</result>"
            result_ids = np.asarray(tokenizer(result, add_special_tokens=False)["input_ids"], dtype=np.int32)
            if episode.num_response + len(result_ids) >= params.max_new_tokens:
                break  # no token would be left for an answer
            episode.add_result(result_ids)
        return episode.sample("length")

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


class _Episode:
    """An episode in progress. It holds the columns of its sample (token ids, mask, log-probs, versions), to which every
    turn is appended."""

    def __init__(self, prompt: Prompt, index: int, prompt_ids: np.ndarray) -> None:
        self.prompt = prompt
        self.index = index
        self.ids = prompt_ids.astype(np.int32)
        self._mask = np.zeros(len(prompt_ids), dtype=np.uint8)
        self._logprobs = np.zeros(len(prompt_ids), dtype=np.float32)
        self._versions = np.full(len(prompt_ids), -1, dtype=np.int32)
        self._num_prompt = len(prompt_ids)
        self._text = ""
        self._routes: list[tuple[int, np.ndarray]] = []

    @property
    def num_response(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.ids) - self._num_prompt

    @property
    def num_routes(self) -> int:
        """Number of the episode's first tokens whose routes are known. The next turn, which computes the tokens of the
        tool's result and the last one before them for the first time, adds those of the rest."""
        return sum(len(routes) for _, routes in self._routes)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Append the tokens that the policy chose in one turn, and the routes that came with them."""
        if completion.routes is not None:
            self._routes.append((self.num_routes, completion.routes))
        count = len(completion.token_ids)
        self._append(completion.token_ids, np.ones(count, np.uint8), completion.logprobs, completion.versions)
        self._text = text

    def add_result(self, ids: np.ndarray) -> None:
        """Append the tokens of a tool's result, which are not trained on."""
        count = len(ids)
        self._append(ids, np.zeros(count, np.uint8), np.zeros(count, np.float32), np.full(count, -1, np.int32))

    def _append(self, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self.ids = np.concatenate([self.ids, ids])
        self._mask = np.concatenate([self._mask, mask])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
        self._versions = np.concatenate([self._versions, versions])

    def sample(self, finish_reason: str, error: str = "") -> Sample:
        """Return the episode as a finished sample. error: message of the error that made the episode fail; "" if it did
        not fail."""
        return Sample(
            prompt=self.prompt,
            index=self.index,
            input_ids=self.ids,
            response_mask=self._mask,
            logprobs=self._logprobs,
            text=self._text,
            finish_reason=finish_reason,
            versions=self._versions,
            error=error,
            routes=tuple(self._routes),
        )
