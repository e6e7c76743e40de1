"""The dialects of OpenAI's chat and text completions, checked with the types that the package `openai` publishes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Once httpx begins to load, clients of openai 3 use parts of it, and fail if another thread is still loading it. So it
# is loaded here, before agents run in threads.
import httpx  # noqa: F401
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from pydantic import BaseModel, TypeAdapter, ValidationError

from ...engines.chat import Reply
from .dialects import (
    BadRequest,
    CallAnswer,
    CallRequest,
    Choice,
    Dialect,
    Json,
    content_of,
    event,
    ignored_of,
    schema_at,
    texts_at,
    tools_used,
    whole,
    wrong,
)  # fmt: skip

_CHAT = TypeAdapter(ChatParams)
_TEXT = TypeAdapter(TextParams)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RENAMED = {"developer": "system", "function": "tool"}
"""Roles that most chat formats leave out without a word -> the roles in which the policy reads their messages."""


def _read_chat(given: Json) -> CallRequest:
    checked = _checked(_CHAT, given)
    messages = _messages_of(given["messages"], checked["messages"])
    tools = tools_used(given, given.get("tools") or ())
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise wrong(f"tools.{number}.type", tool.get("type"), "function")
    schema = schema_at(given.get("response_format"), "response_format", tools)
    return _request(given, messages=messages, tools=tools, schema=schema)


def _read_text(given: Json) -> CallRequest:
    _checked(_TEXT, given)
    schema = schema_at(given.get("response_format"), "response_format", ())
    return _request(given, prompt=_prompt_of(given.get("prompt")), schema=schema)


def _request(given: Json, **read: Any) -> CallRequest:
    limits = [whole(given, name) for name in ("max_completion_tokens", "max_tokens")]
    options = given.get("stream_options")
    return CallRequest(
        **read,
        model=str(given["model"]),
        n=whole(given, "n") or 1,
        max_new_tokens=next((limit for limit in limits if limit is not None), None),
        stop=texts_at(given, "stop"),
        schema_field="response_format",
        stream=bool(given.get("stream")),
        usage_in_stream=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(given.get("logprobs")),
        token_ids=bool(given.get("return_token_ids")),
        **ignored_of(given),
    )


def _checked(kind: TypeAdapter[Any], given: Json) -> Any:
    """Return a request as pydantic's types have it; its `messages` are checked when they are read."""
    try:
        # The format of answers is read by `schema_at`, whose errors are the same in all dialects.
        checked = kind.validate_python({**given, "stream": False, "response_format": {"type": "text"}})
        tuple(checked.get("tools") or ())
    except ValidationError as error:
        raise _invalid(error) from None
    return checked


def _messages_of(given: Any, checked: Iterable[Any]) -> tuple[Json, ...]:
    """Return the messages of a request, with their contents as texts or parts. checked: pydantic's iterator, which
    checks each message when it is read. Raises BadRequest for invalid messages."""
    if not isinstance(given, list) or not given:
        raise BadRequest("messages: expected a list of at least one message")
    for number, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise BadRequest(f"messages.{number}: got the role {role!r}, expected one of {', '.join(ROLES)}")
    try:
        for _ in checked:
            pass
    except ValidationError as error:
        raise _invalid(error, "messages.") from None
    return tuple(_plain_message(message, f"messages.{number}") for number, message in enumerate(given))


def _invalid(error: ValidationError, within: str = "") -> BadRequest:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return BadRequest(f"{within}{where or 'the body'}: {first['msg']}")


def _plain_message(message: Json, where: str) -> Json:
    role = message["role"]
    content = content_of(message.get("content"), f"{where}.content")
    return {**message, "role": _RENAMED.get(role, role), "content": content}


def _prompt_of(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        [prompt] = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
        return tuple(prompt)
    raise BadRequest("prompt: expected one text or one list of token ids that is not empty")


# ---------------- Answers to clients are made here.


def _chat_body(request: CallRequest, answer: CallAnswer) -> Json:
    shown = [
        {"message": _message(one.reply), "logprobs": {"content": _chat_logprobs(one)} if request.logprobs else None}
        for one in answer.choices
    ]
    return _body(ChatCompletion, "chat.completion", request, answer, shown)


def _text_body(request: CallRequest, answer: CallAnswer) -> Json:
    shown = [
        {"text": one.reply.content, "logprobs": _text_logprobs(one) if request.logprobs else None}
        for one in answer.choices
    ]
    return _body(TextCompletion, "text_completion", request, answer, shown)


def _body(form: type[BaseModel], kind: str, request: CallRequest, answer: CallAnswer, shown: list[Json]) -> Json:
    """Return the body of an answer. form: openai's type of it. shown: the fields of each choice that differ by kind."""
    pairs = list(zip(shown, answer.choices, strict=True))
    choices = [{"index": i, "finish_reason": one.finish_reason, **part} for i, (part, one) in enumerate(pairs)]
    whole_answer = {**_head(request, answer, kind), "choices": choices, "usage": _usage(answer)}
    body = form.model_validate(whole_answer).model_dump(mode="json", exclude_none=True)
    if request.token_ids:
        body["prompt_token_ids"] = list(answer.prompt_ids)
        for part, one in zip(body["choices"], answer.choices, strict=True):
            part["token_ids"] = one.completion.token_ids.tolist()
    return body


def _chat_events(request: CallRequest, answer: CallAnswer) -> Iterator[bytes]:
    head = _head(request, answer, "chat.completion.chunk")
    for index, choice in enumerate(answer.choices):
        reply = choice.reply
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        if reply.reasoning:
            deltas.append({"reasoning_content": reply.reasoning})
        if reply.content:
            deltas.append({"content": reply.content})
        deltas += [{"tool_calls": [{"index": at, **c.as_dict()}]} for at, c in enumerate(reply.tool_calls)]
        ends: list[str | None] = [*([None] * len(deltas)), choice.finish_reason]
        for delta, end in zip([*deltas, {}], ends, strict=True):
            yield _chunk({**head, "choices": [{"index": index, "delta": delta, "finish_reason": end}]})
    if request.usage_in_stream:
        yield _chunk({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _text_events(request: CallRequest, answer: CallAnswer) -> Iterator[bytes]:
    yield event(_text_body(request, answer))
    yield b"data: [DONE]\n\n"


def _chunk(body: Json) -> bytes:
    return event(ChatCompletionChunk.model_validate(body).model_dump(mode="json", exclude_none=True))


def error_body(refused: BadRequest) -> Json:
    """Return the body of a refusal, in OpenAI's form."""
    return {"error": {"message": str(refused), "type": "invalid_request_error", "code": refused.code, "param": None}}


def _head(request: CallRequest, answer: CallAnswer, kind: str) -> Json:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": request.model}


def _usage(answer: CallAnswer) -> Json:
    prompt, said = len(answer.prompt_ids), answer.num_tokens
    numbers = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    return {**numbers, "prompt_tokens_details": {"cached_tokens": answer.num_cached}}


def _message(reply: Reply) -> Json:
    message = reply.as_message()
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls and not reply.content:
        message["content"] = None
    return message


def _chat_logprobs(choice: Choice) -> list[Json]:
    return [
        {"token": text, "logprob": _finite(value), "bytes": None, "top_logprobs": []}
        for text, value in zip(choice.tokens, choice.completion.logprobs.tolist(), strict=True)
    ]


def _text_logprobs(choice: Choice) -> Json:
    values = [_finite(value) for value in choice.completion.logprobs.tolist()]
    return {"tokens": list(choice.tokens), "token_logprobs": values}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -9999.0


CHAT = Dialect(_read_chat, _chat_body, _chat_events, error_body)
TEXT = Dialect(_read_text, _text_body, _text_events, error_body)
