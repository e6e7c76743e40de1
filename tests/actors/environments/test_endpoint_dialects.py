"""The endpoint's dialects, called by the vendors' own clients: their rows, streams, tools, repeats and refusals."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

pytest.importorskip("renderers")
pytest.importorskip("anthropic")

import anthropic
import openai

from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.environments.endpoint import session
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.recovery import RecoveringEngine, TurnRecord
from headrace.actors.environments.turns import generate_whole
from headrace.tests.actors.environments.endpoint_world import CALL, TOKENIZER, TOOLS, Recorder, check_rows, played
from headrace.tests.attacks.mutations import mutated

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


def anthropic_of(episode: Episode, **settings: Any) -> Any:
    address = episode.endpoint
    return anthropic.AsyncAnthropic(
        **{"base_url": address.root_url, "api_key": address.secret, "max_retries": 0, **settings}
    )


@dataclass
class Played:
    """The answers that a client saw in a loop of tools, without the ids that are drawn at random."""

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
@pytest.mark.long
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


# ---------------------------------------------------------------- several answers, and answers under a schema


def test_several_answers_are_rows_of_their_own_and_each_can_be_continued() -> None:
    async def asks(episode: Episode) -> float:
        async with openai_of(episode) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            first = await client.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": first.choices[0].message.content}]
            messages += [{"role": "user", "content": "more?"}]
            both = await client.chat.completions.create(model="m", messages=messages, n=2, stream=False)
            assert [choice.message.content for choice in both.choices] == ["two", "three"]
            assert both.usage is not None and both.usage.completion_tokens == len("two.three.")
            messages += [{"role": "assistant", "content": "three"}, {"role": "user", "content": "end"}]
            stream = await client.chat.completions.create(model="m", messages=messages, n=2, stream=True)
            said = ["", ""]
            async for chunk in stream:
                for choice in chunk.choices:
                    said[choice.index] += choice.delta.content or ""
            assert said == ["four", "five"]
            texts = await client.completions.create(model="m", prompt="once", n=2)
            assert [choice.text for choice in texts.choices] == ["six", "seven"]
        return 1.0

    engine = Recorder("one", "two", "three", "four", "five", "six", "seven", version=5)
    [sample] = played(asks, engine, config=EnvironmentConfig(max_rows=5))
    assert not sample.error, sample.error
    assert [turn.row for turn in sample.turns] == [0, 0, 1, 1, 2, 3, 4], "the second answer begins a row and goes on"
    check_rows(sample, engine)
    [sample] = played(asks, Recorder("one", "two", "three", "four", "five", "six", "seven"))
    assert sample.error == "the episode has 5 rows, more than environment.max_rows=1"


class Obedient(Recorder):
    """An engine that takes schemas, and says its texts whatever they are."""

    schemas: list[str] = []

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.schemas.append(params.schema)
        return await super().generate(request_id, prompt_ids, replace(params, schema=""))


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def with_schemas(episode: Episode) -> float:
    """Ask once without a schema and then with one in each dialect, in one conversation."""
    named: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    async with openai_of(episode) as one, anthropic_of(episode) as other:
        messages: list[Any] = [{"role": "user", "content": "hi"}]

        def goes_on() -> None:
            messages.extend([{"role": "assistant", "content": "{}"}, {"role": "user", "content": "more"}])

        await one.chat.completions.create(model="m", messages=messages)
        goes_on()
        formats: list[Any] = [{"type": "json_object"}, {"type": "json_schema", "json_schema": named}]
        for wanted in formats:
            raw = await one.chat.completions.with_raw_response.create(
                model="m", messages=messages, response_format=wanted
            )
            assert raw.headers["x-headrace-untrained"] == "response_format"
            goes_on()
        said = await one.responses.with_raw_response.create(model="m", input=messages, text={"format": named})
        assert said.headers["x-headrace-untrained"] == "text.format"
        goes_on()
        last = await other.messages.with_raw_response.create(
            model="m",
            max_tokens=9,
            messages=messages,
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        )
        assert last.headers["x-headrace-untrained"] == "output_config.format"
        with pytest.raises(openai.BadRequestError, match="response_format: got json_object with tools"):
            await one.chat.completions.create(model="m", messages=messages, response_format=formats[0], tools=TOOLS)
    return 1.0


def test_tokens_under_a_schema_are_in_the_row_and_not_trained_on() -> None:
    engine = Obedient("{}", version=5)
    [sample] = played(with_schemas, engine)
    assert not sample.error and len(sample.rows) == 1 and len(sample.turns) == 5, sample.error
    assert [json.loads(schema or "null") for schema in engine.schemas] == [None, {"type": "object"}, *[SCHEMA] * 3]
    row = sample.rows[0]
    for number, (turn, (_, prompt_ids, answer_ids)) in enumerate(zip(sample.turns, engine.seen, strict=True)):
        until = turn.start + turn.num_tokens
        assert row.input_ids[:until].tolist() == [*prompt_ids, *answer_ids]
        assert (row.response_mask[turn.start : until] == (number == 0)).all()
    assert row.response_mask.sum() == len(engine.seen[0][2]) and (row.versions[row.response_mask == 0] == -1).all()


def test_answers_under_a_schema_are_recovered_whole_and_only_for_the_same_request() -> None:
    async def main() -> None:
        records: list[TurnRecord] = []

        class Log:
            async def write(self, record: TurnRecord) -> None:
                records.append(record)

        asked = SamplingParams(max_new_tokens=50, schema='{"type": "object"}')
        [first] = await RecoveringEngine(Obedient("{abcde}"), Log(), (), 2).generate("p.0/0", [5, 6], asked)
        assert first.finish_reason == "stop" and len(first.token_ids) == len("{abcde}.")
        again = RecoveringEngine(Obedient("other"), None, records, 50)
        [free] = await again.generate("p.0/0", [5, 6], replace(asked, schema=""))
        [other] = await again.generate("p.0/0", [5, 6], replace(asked, top_p=0.5))
        [same] = await again.generate("p.0/0", [5, 6], asked)
        assert first.token_ids.tolist() not in (free.token_ids.tolist(), other.token_ids.tolist())
        assert same.token_ids.tolist() == first.token_ids.tolist()

    asyncio.run(main())


def test_an_answer_under_a_schema_starts_again_where_a_weight_update_cut_it() -> None:
    class CutOnce(Obedient):
        async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Any:
            [whole] = await super().generate(request_id, prompt_ids, params)
            if params.continues is not None:
                return [whole]
            return [Completion(whole.token_ids[:2], whole.logprobs[:2], "abort", whole.versions[:2])]

    async def main() -> None:
        engine = CutOnce("{abc}")
        params = SamplingParams(max_new_tokens=50, schema="{}")
        [answer] = await generate_whole(engine, TOKENIZER, "p.0/0", [5, 6], params)
        assert [prompt for _, prompt, _ in engine.seen] == [[5, 6]] * 2
        assert answer.token_ids.tolist() == engine.seen[1][2] and answer.finish_reason == "stop"

    asyncio.run(main())


def test_an_engine_without_schemas_refuses_them() -> None:
    async def asks(episode: Episode) -> float:
        async with openai_of(episode) as client:
            with pytest.raises(openai.BadRequestError, match="text.format: this engine cannot restrict answers"):
                await client.responses.create(model="m", input="hi", text={"format": {"type": "json_object"}})
        return 1.0

    [sample] = played(asks, Recorder("{}"))
    assert not sample.error and not sample.turns, sample.error


# ---------------------------------------------------------------- what else clients need


def test_both_headers_both_lists_of_models_and_the_number_of_tokens() -> None:
    async def looks(episode: Episode) -> float:
        address = episode.endpoint
        asked: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": ANTHROPIC_TOOLS,
        }
        async with anthropic_of(episode) as client:
            counted = await client.messages.count_tokens(**asked, system="be kind")
            answer = await client.messages.create(**asked, system="be kind", max_tokens=9)
            assert counted.input_tokens == answer.usage.input_tokens == len(engine.seen[0][1])
            asked["messages"] += [{"role": "assistant", "content": "ab"}, {"role": "user", "content": "x"}]
            counted = await client.messages.count_tokens(**asked, system="be kind")
            assert counted.input_tokens > answer.usage.input_tokens
            [model] = [model async for model in client.models.list()]
            assert model.id == model.display_name == "policy" and model.type == "model"
        async with anthropic_of(episode, api_key=None, auth_token=address.secret) as client:
            await client.messages.count_tokens(**asked)
        async with anthropic_of(episode, api_key="x") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.count_tokens(**asked)
            assert refused.value.body == {
                "type": "error", "error": {"type": "authentication_error", "message": UNKNOWN}
            }  # fmt: skip
            with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
                await client.post("/v1/files", cast_to=object, body={})
        async with httpx.AsyncClient() as client:
            assert (await client.head(address.root_url)).status_code == 200
        return 1.0

    engine = Recorder("ab", version=5)
    [sample] = played(looks, engine)
    assert not sample.error and len(sample.turns) == 1, sample.error


UNKNOWN = "expected the header Authorization: Bearer, or x-api-key, with the secret of an episode that has not ended"


def test_ends_of_answers() -> None:
    async def ends(episode: Episode) -> float:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        async with openai_of(episode) as one, anthropic_of(episode) as other:
            for create in (other.messages.create, other.messages.create):
                said = await create(model="m", max_tokens=9, messages=messages, stop_sequences=["q", "cd"])
                [block] = said.content
                assert block.type == "text" and block.text == "ab"
                assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "cd")
                messages += [{"role": "assistant", "content": "ab"}, {"role": "user", "content": "more"}]
            cut = await other.messages.create(model="m", max_tokens=2, messages=messages)
            assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
            short = await one.responses.create(model="m", input="hi", max_output_tokens=2)
            assert short.status == "incomplete" and short.incomplete_details is not None
            assert short.incomplete_details.reason == "max_output_tokens" and short.output_text == "ab"
            plain = await one.chat.completions.create(model="m", messages=messages[:1], stop="c")
            assert plain.choices[0].message.content == "ab" and plain.choices[0].finish_reason == "stop"
            async with one.responses.stream(model="m", input="hi", max_output_tokens=2) as events:
                names = [event.type async for event in events]
            assert names[-1] == "response.incomplete"
        return 1.0

    engine = Recorder("abcde", version=5)
    [sample] = played(ends, engine, config=EnvironmentConfig(max_rows=4))
    assert not sample.error and [turn.row for turn in sample.turns] == [0, 0, 0, 1, 2, 3], sample.error
    check_rows(sample, engine)


def asked_in(path: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    """A plain call in the dialect of a path."""
    content = {"input": text} if path == "responses" else {"messages": [{"role": "user", "content": text}]}
    return {"model": "m", **content, **more}


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_a_repeat_joins_its_call_and_a_client_that_went_away_is_not_recorded(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LINGER_S", 0.3)

    async def drops(episode: Episode) -> float:
        headers, url = {"x-api-key": episode.endpoint.secret}, f"{episode.endpoint.url}/{path}"
        soon = httpx.Timeout(30.0, read=0.05)  # A busy machine may need longer to connect.
        async with httpx.AsyncClient(headers=headers) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url, json=asked_in(path), timeout=soon)
            again = await client.post(url, json=asked_in(path), headers={"x-stainless-retry-count": "1"})
            assert again.status_code == 200 and len(engine.seen) == 1
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url, json=asked_in(path, "lost"), timeout=soon)
            await asyncio.sleep(0.6)
            key = {"idempotency-key": "k"}
            both = await asyncio.gather(*(client.post(url, json=asked_in(path, "x"), headers=key) for _ in range(2)))
            assert both[0].json()["id"] == both[1].json()["id"]
        return 1.0

    engine = Recorder("ab", version=5, latency_s=0.15)
    [sample] = played(drops, engine, config=EnvironmentConfig(max_rows=2))
    assert not sample.error and len(sample.turns) == 2, sample.error


def test_limits_are_told_in_the_form_of_the_dialect() -> None:
    async def asks(episode: Episode) -> float:
        async with anthropic_of(episode) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            both = await asyncio.gather(
                *(client.messages.create(model="m", max_tokens=9, messages=messages) for _ in range(2)),
                return_exceptions=True,
            )
            [refused] = [one for one in both if isinstance(one, anthropic.RateLimitError)]
            assert refused.response.headers["retry-after"] == "1" and "rate_limit_error" in str(refused)
            messages[0]["content"] = "x" * (1 << 20)
            with pytest.raises(anthropic.APIStatusError, match="request_too_large.*more than 1 MiB"):
                await client.messages.create(model="m", max_tokens=9, messages=messages)
        return 1.0

    endpoint = EndpointConfig(enabled=True, max_episode_calls=1, max_body_mib=1)
    [sample] = played(asks, Recorder("ab", latency_s=0.2), endpoint=endpoint)
    assert not sample.error and len(sample.turns) == 1, sample.error


# ---------------------------------------------------------------- what is refused

IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("responses", {"background": True}, "background: "),
        ("responses", {"conversation": "c"}, "conversation: "),
        ("responses", {"previous_response_id": "r"}, "previous_response_id: got 'r', expected the id of a stored"),
        ("responses", {"tools": [{"type": "local_shell"}]}, "tools.0.type: got 'local_shell', expected function"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools.0.type: got 'web_search'"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "0.content.0.image_url: g"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type: got 'item_reference'"),
        ("responses", {"input": []}, "input: got []"),
        ("responses", {"text": {"format": {"type": "grammar"}}}, "text.format.type: got 'grammar', expected text"),
        ("chat/completions", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type: got 'custom'"),
        ("messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.source.type: got"),
        ("messages", {"messages": [{"role": "tool", "content": ""}]}, "messages.0.role: got 'tool'"),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: got 'bash_20250124'"),
        ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers: "),
        ("messages", {"max_tokens": 0}, "max_tokens: got 0, expected a whole number >= 1"),
        ("messages", {"model": None}, "model: got None, expected a text"),
        ("messages", {"messages": [{"role": "user", "content": "x" * 9000}]}, "no tokens left"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(path: str, more: dict[str, Any], words: str) -> None:
    async def sends(episode: Episode) -> float:
        async with httpx.AsyncClient(headers={"x-api-key": episode.endpoint.secret}) as client:
            answer = await client.post(f"{episode.endpoint.url}/{path}", json={**asked_in(path), **more})
            assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"], answer.text
            assert answer.json().get("type", "none") == ("error" if path == "messages" else "none")
        return 1.0

    [sample] = played(sends, Recorder("ab"))
    assert not sample.error and not sample.turns, sample.error


async def mixed_up(episode: Episode, path: str, dice: random.Random, count: int) -> None:
    """Send requests of which one value is replaced, and others of which one byte is."""
    calls: list[Any] = [
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
    ]
    blocks: list[Any] = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                                          {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
    ]  # fmt: skip
    good: dict[str, dict[str, Any]] = {
        "responses": {"input": [{"role": "user", "content": "hi"}, *calls], "tools": OPENAI_TOOLS, "instructions": "x",
                      "text": {"format": {"type": "text"}}, "stream": True, "previous_response_id": None},
        "messages": {"messages": [{"role": "user", "content": "hi"}, *blocks], "tools": ANTHROPIC_TOOLS, "system": "x",
                     "stop_sequences": ["q"], "tool_choice": {"type": "auto"}, "output_config": {"format": None}},
        "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "n": 1, "stop": "q",
                             "response_format": {"type": "text"}, "stream_options": {"include_usage": True}},
    }  # fmt: skip
    odd: list[Any] = [None, 1, -1, 0.5, True, "", "x", [], [1], [[]], {}, {"type": []}, {"type": "text"}, [None]]
    headers, url = {"x-api-key": episode.endpoint.secret}, f"{episode.endpoint.url}/{path}"
    async with httpx.AsyncClient(headers=headers) as client:
        for number in range(count):
            whole = {"model": "m", **json.loads(json.dumps(good[path]))}
            at: Any = whole
            while True:
                key = dice.choice(list(at) if isinstance(at, dict) else range(len(at)))
                if not isinstance(at[key], dict | list) or not at[key] or dice.random() < 0.3:
                    break
                at = at[key]
            at[key] = dice.choice(odd)
            body = json.dumps(whole).encode()
            answer = await client.post(url, content=mutated(dice, body) if number % 3 == 0 else body)
            assert answer.status_code < 500, (answer.text, body)
            assert answer.status_code == 200 or answer.json()["error"]["message"], body


@pytest.mark.long
@pytest.mark.parametrize("path", ["responses", "messages", "chat/completions"])
@pytest.mark.parametrize("count", [25, pytest.param(600, marks=pytest.mark.slow)])
def test_no_body_is_an_error_of_the_server(path: str, count: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"dialects: seed {seed}")

    async def sends(episode: Episode) -> float:
        await mixed_up(episode, path, random.Random(seed), count)
        return 1.0

    [sample] = played(sends, Obedient("ab"), config=EnvironmentConfig(max_rows=10_000))
    assert not sample.error, sample.error


@pytest.mark.parametrize(
    "arguments", ["[1, 2]", '"x"', '""', "null", '{"a": NaN}', '{"a": 1e400}', '{"a": "\\ud800"}', '{"arguments": "x"}']
)
def test_odd_arguments_of_a_tool_do_not_begin_a_row(arguments: str) -> None:
    """The policy can write what no client can send back as an object."""

    async def agent(episode: Episode) -> float:
        seen = await with_messages(episode, stream=False, stored=False)
        return float(seen.last == "it is 3")

    call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    engine = Recorder(call, call, "it is 3", version=5)
    [sample] = played(agent, engine)
    assert (sample.error, sample.more_rows, sample.rewards) == ("", (), {"reward": 1.0})
    check_rows(sample, engine)
