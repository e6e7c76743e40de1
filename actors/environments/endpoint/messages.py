"""The dialect of Anthropic's Messages API: contents are blocks, and results of tools stand in the user's messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ...process.user_errors import storable
from .dialects import (
    BadRequest,
    CallAnswer,
    CallRequest,
    Choice,
    Dialect,
    Json,
    content_of,
    content_text,
    event,
    function_tool,
    ignored_of,
    joined,
    object_at,
    objects_at,
    part_of,
    part_text,
    refuse,
    schema_at,
    text_at,
    texts_at,
    tools_used,
    whole,
    wrong,
)  # fmt: skip

_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Status of a refusal -> Anthropic's name for its kind; others are `invalid_request_error`."""


def _read(given: Json) -> CallRequest:
    refuse(given, "container", "mcp_servers", why="the endpoint does not have it")
    system = content_text(given.get("system"), "system")
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    asked = objects_at(given, "messages")
    if not asked:
        raise BadRequest("messages: expected a list of at least one message")
    for number, message in enumerate(asked):
        messages += _messages_of(message, f"messages.{number}.")
    tools = tools_used(given, [_tool(tool, f"tools.{at}.") for at, tool in enumerate(objects_at(given, "tools"))])
    config = given.get("output_config")
    nested = config.get("format") if isinstance(config, dict) else None
    field = "output_format" if nested is None else "output_config.format"
    return CallRequest(
        messages=tuple(messages),
        tools=tools,
        model=text_at(given, "model"),
        max_new_tokens=whole(given, "max_tokens"),
        stop=texts_at(given, "stop_sequences"),
        schema=schema_at(given.get("output_format") if nested is None else nested, field, tools),
        schema_field=field,
        stream=bool(given.get("stream")),
        **ignored_of(given),
    )


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise wrong(f"{where}type", tool["type"], "custom, because the endpoint runs no tools")
    return function_tool(text_at(tool, "name", where), tool.get("description"), object_at(tool, "input_schema", where))


def _messages_of(message: Json, where: str) -> list[Json]:
    """Return a message in the form of chat completions, which has a message of its own for each result of a tool."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}role", role, "user, assistant or system")
    where += "content"
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects_at(message, "content", where)
    if role == "assistant":
        return [_said(blocks, where)]
    messages: list[Json] = []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            about = {"role": "tool", "tool_call_id": text_at(block, "tool_use_id", f"{where}.{number}.")}
            messages.append({**about, "content": content_of(block.get("content"), f"{where}.{number}.content")})
            continue
        part = part_of(block, f"{where}.{number}")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"].append(part)
        else:
            messages.append({"role": role, "content": [part]})
    own = ({**one, "content": joined(one["content"])} if one["role"] == role else one for one in messages)
    return list(own) or [{"role": role, "content": ""}]


def _said(blocks: Iterable[Json], where: str) -> Json:
    message: Json = {"role": "assistant", "content": ""}
    for number, block in enumerate(blocks):
        at, kind = f"{where}.{number}.", block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "tool_use":
            function = {"name": text_at(block, "name", at), "arguments": json.dumps(object_at(block, "input", at))}
            call = {"id": text_at(block, "id", at), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            message["content"] += part_text(block, f"{where}.{number}")
    return message


# ---------------- Answers to clients are made here.


def _body(request: CallRequest, answer: CallAnswer) -> Json:
    [choice] = answer.choices
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(answer, choice),
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stopped_by or None,
        "usage": {
            "input_tokens": len(answer.prompt_ids) - answer.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.num_cached,
            "output_tokens": answer.num_tokens,
        },
    }


def _blocks(answer: CallAnswer, choice: Choice) -> list[Json]:
    reply, blocks = choice.reply, []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": answer.id})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _input(arguments: str) -> Json:
    try:
        given = json.loads(arguments)
        # Clients cannot send back numbers that are not finite, nor halves of characters.
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        given = storable(arguments)
    return given if isinstance(given, dict) else {"arguments": given}


def _stop_reason(choice: Choice) -> str:
    if choice.reply.tool_calls:
        return "tool_use"
    if choice.stopped_by:
        return "stop_sequence"
    return "max_tokens" if choice.completion.finish_reason == "length" else "end_turn"


_DELTAS = {
    "text": [("text_delta", "text")],
    "thinking": [("thinking_delta", "thinking"), ("signature_delta", "signature")],
}
"""Type of a block -> the types of its deltas, with the field that each of them has."""


def _events(request: CallRequest, answer: CallAnswer) -> Iterator[bytes]:
    body = _body(request, answer)

    def one(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {**body["usage"], "output_tokens": 0}}
    yield one("message_start", message={**body, **begun})
    for index, block in enumerate(body["content"]):
        deltas = [{"type": kind, field: block[field]} for kind, field in _DELTAS.get(block["type"], ())]
        empty: Json = {field: "" for _, field in _DELTAS.get(block["type"], ())}
        if block["type"] == "tool_use":
            deltas, empty = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}], {"input": {}}
        yield one("content_block_start", index=index, content_block={**block, **empty})
        for delta in deltas:
            yield one("content_block_delta", index=index, delta=delta)
        yield one("content_block_stop", index=index)
    ended = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    yield one("message_delta", delta=ended, usage=body["usage"])
    yield one("message_stop")


def _error(refused: BadRequest) -> Json:
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


MESSAGES = Dialect(_read, _body, _events, _error)
