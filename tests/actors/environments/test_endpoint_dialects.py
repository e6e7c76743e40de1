"""The endpoint's dialects, called by the vendors' own clients: their rows, streams, tools, repeats and refusals."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from headrace.actors.environments.episode import Episode
from headrace.tests.actors.environments.endpoint_world import CALL, TOOLS, Recorder, check_rows, played

FUNCTION = TOOLS[0]["function"]
OPENAI_TOOLS: list[Any] = [{"type": "function", "strict": True, **FUNCTION}]
ANTHROPIC_TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Add.",
        "input_schema": FUNCTION["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
]
TWO_CALLS = f"<think>\nhm\n</think>\n\nnow{CALL}\n{CALL}"
TURNS = (TWO_CALLS, CALL, CALL, "it is 3")


def openai_of(episode: Episode, **settings: Any) -> openai.AsyncOpenAI:
    address = episode.endpoint
    return openai.AsyncOpenAI(**{"base_url": address.url, "api_key": address.secret, "max_retries": 0, **settings})


def anthropic_of(episode: Episode, **settings: Any) -> anthropic.AsyncAnthropic:
    address = episode.endpoint
    return anthropic.AsyncAnthropic(
        **{"base_url": address.root_url, "api_key": address.secret, "max_retries": 0, **settings}
    )


@dataclass
class Played:
    """What a client saw in a loop of tools, without the ids that are drawn at random."""

    kinds: list[list[str]]
    arguments: list[Any]
    thoughts: list[str]
    last: str
    ends: list[str]
    cached: list[int]


async def with_responses(episode: Episode, *, stream: bool, stored: bool) -> Played:
    """Call tools over the Responses API until the policy calls none."""
    seen = Played([], [], [], "", [], [])
    items: list[Any] = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "ab 1+2?"}]
    previous: Any = openai.omit
    async with openai_of(episode) as client:
        while True:
            asked: dict[str, Any] = {
                "model": "m",
                "input": items,
                "tools": OPENAI_TOOLS,
                "previous_response_id": previous,
            }
            asked |= {"instructions": "add", "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"]}
            if stream:
                async with client.responses.stream(**asked) as events:
                    names = [event.type async for event in events]
                    answer = await events.get_final_response()
                assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
            else:
                answer = await client.responses.create(**asked)
            seen.kinds.append([item.type for item in answer.output])
            seen.ends.append(str(answer.status))
            assert answer.usage is not None
            seen.cached.append(answer.usage.input_tokens_details.cached_tokens)
            calls = [item for item in answer.output if item.type == "function_call"]
            seen.arguments += [json.loads(call.arguments) for call in calls]
            seen.thoughts += [c.text for i in answer.output if i.type == "reasoning" for c in i.content or ()]
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
            if not calls:
                seen.last = answer.output_text
                return seen
            if stored:
                items, previous = results, answer.id
            else:
                items += [*[item.model_dump(exclude_none=True) for item in answer.output], *results]


async def with_messages(episode: Episode, *, stream: bool, stored: bool) -> Played:
    """Call tools over the Messages API until the policy calls none. The API stores nothing."""
    seen = Played([], [], [], "", [], [])
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "ab 1+2?"}]}]
    system: Any = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    async with anthropic_of(episode) as client:
        while True:
            asked: dict[str, Any] = {"model": "m", "system": system, "messages": messages, "tools": ANTHROPIC_TOOLS}
            asked |= {"max_tokens": 900, "metadata": {"user_id": "u"}}
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            seen.kinds.append([block.type for block in answer.content])
            seen.ends.append(str(answer.stop_reason))
            seen.cached.append(answer.usage.cache_read_input_tokens or 0)
            calls = [block for block in answer.content if block.type == "tool_use"]
            seen.arguments += [call.input for call in calls]
            seen.thoughts += [block.thinking for block in answer.content if block.type == "thinking"]
            if not calls:
                seen.last = "".join(block.text for block in answer.content if block.type == "text")
                return seen
            said = [block.model_dump(exclude_none=True) for block in answer.content]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]


Loop = Callable[..., Awaitable[Played]]


def looped(loop: Loop, **settings: Any) -> tuple[Played, Any, Recorder]:
    seen: list[Played] = []

    async def play(episode: Episode) -> float:
        seen.append(await loop(episode, **settings))
        return 1.0

    engine = Recorder(*TURNS, version=5)
    [sample] = played(play, engine)
    assert not sample.error, sample.error
    return seen[0], sample, engine


@pytest.mark.parametrize(("loop", "stored"), [(with_responses, False), (with_responses, True), (with_messages, False)])
def test_a_loop_of_tools_is_one_row_and_streams_are_the_same(loop: Loop, stored: bool) -> None:
    plain, sample, engine = looped(loop, stream=False, stored=stored)
    assert len(sample.rows) == 1 and len(sample.turns) == 4
    check_rows(sample, engine)
    assert plain.last == "it is 3" and plain.arguments == [{"a": 1, "b": 2}] * 4 and plain.thoughts == ["hm"]
    known = [0, *(len(prompt) + len(answer) for _, prompt, answer in engine.seen[:-1])]
    assert plain.cached == known, "each prompt begins with the tokens of the call before"
    streamed, sample, engine = looped(loop, stream=True, stored=stored)
    assert streamed == plain and len(sample.rows) == 1
    check_rows(sample, engine)


def test_the_kinds_of_an_answer_are_those_of_its_dialect() -> None:
    responses, *_ = looped(with_responses, stream=True, stored=False)
    assert responses.kinds == [
        ["reasoning", "message", "function_call", "function_call"], ["function_call"], ["function_call"], ["message"]
    ]  # fmt: skip
    assert responses.ends == ["completed"] * 4
    messages, *_ = looped(with_messages, stream=True, stored=False)
    assert messages.kinds == [["thinking", "text", "tool_use", "tool_use"], ["tool_use"], ["tool_use"], ["text"]]
    assert messages.ends == ["tool_use", "tool_use", "tool_use", "end_turn"]


def test_one_conversation_can_change_its_dialect() -> None:
    async def talks(episode: Episode) -> float:
        async with openai_of(episode) as one, anthropic_of(episode) as other:
            messages: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
            first = await one.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            [call] = first.choices[0].message.tool_calls or []
            use = {"type": "tool_use", "id": call.id, "name": "add", "input": {"b": 2, "a": 1}}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
            asked: list[Any] = [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
            ]
            tools: list[Any] = [{k: v for k, v in ANTHROPIC_TOOLS[0].items() if k != "cache_control"}]
            second = await other.messages.create(
                model="m", system="be kind", max_tokens=99, messages=asked, tools=tools
            )
            [text] = second.content
            assert text.type == "text" and text.text == "so"
            items: list[Any] = [
                *messages,
                {"type": "function_call", "call_id": call.id, "name": "add", "arguments": '{"a":1,"b":2}'},
                {"type": "function_call_output", "call_id": call.id, "output": "3"},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "end"}]},
            ]
            third = await one.responses.create(model="m", input=items, tools=OPENAI_TOOLS)
            assert third.output_text == "yes"
        return 1.0

    engine = Recorder(CALL, "so", "yes", version=5)
    [sample] = played(talks, engine)
    assert not sample.error and len(sample.rows) == 1, sample.error
    check_rows(sample, engine)
