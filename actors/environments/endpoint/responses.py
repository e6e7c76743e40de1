"""The dialect of OpenAI's Responses API: items instead of messages, and events with numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .chat_completions import error_body
from .dialects import (
    CallAnswer,
    CallRequest,
    Dialect,
    Json,
    content_of,
    content_text,
    event,
    function_tool,
    ignored_of,
    objects_at,
    refuse,
    schema_at,
    text_at,
    tools_used,
    whole,
    wrong,
)  # fmt: skip

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


def _read(given: Json) -> CallRequest:
    refuse(given, "background", "conversation", "prompt", why="the endpoint does not have it")
    instructions = content_text(given.get("instructions"), "instructions")
    before: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    asked = given.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else objects_at(given, "input")
    if not items:
        raise wrong("input", asked, "a text or a list of at least one item")
    messages: list[Json] = []
    for number, item in enumerate(items):
        _add(messages, item, f"input.{number}")
    tools = tools_used(given, [_tool(tool, f"tools.{at}.") for at, tool in enumerate(objects_at(given, "tools"))])
    text = given.get("text")
    return CallRequest(
        messages=(*before, *messages),
        tools=tools,
        model=text_at(given, "model"),
        max_new_tokens=whole(given, "max_output_tokens"),
        schema=schema_at(text.get("format") if isinstance(text, dict) else None, "text.format", tools),
        schema_field="text.format",
        stream=bool(given.get("stream")),
        previous=text_at(given, "previous_response_id") if given.get("previous_response_id") is not None else "",
        num_instructions=len(before),
        store=given.get("store") is not False,
        **ignored_of(given),
    )


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") != "function":
        raise wrong(f"{where}type", tool.get("type"), "function, because the endpoint runs no tools")
    return function_tool(text_at(tool, "name", where), tool.get("description"), tool.get("parameters"))


def _add(messages: list[Json], item: Json, where: str) -> None:
    """Add an item to the messages. The items of one answer (reasoning, text, calls) become one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in list(_ROLES):
            raise wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
        if role == "assistant":
            content = content_text(item.get("content"), f"{where}.content")
            _answer(messages, begins=("content", "tool_calls"))["content"] = content
        else:
            messages.append({"role": _ROLES[role], "content": content_of(item.get("content"), f"{where}.content")})
    elif kind == "reasoning":
        thoughts = objects_at(item, "content", f"{where}.") or objects_at(item, "summary", f"{where}.")
        answer = _answer(messages, begins=("content", "tool_calls", "reasoning_content"))
        answer["reasoning_content"] = "".join(str(part.get("text", "")) for part in thoughts)
    elif kind == "function_call":
        function = {"name": text_at(item, "name", f"{where}."), "arguments": str(item.get("arguments") or "{}")}
        call = {"id": text_at(item, "call_id", f"{where}."), "type": "function", "function": function}
        _answer(messages, begins=()).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = content_of(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": text_at(item, "call_id", f"{where}."), "content": output})
    else:
        expected = "message, reasoning, function_call or function_call_output"
        raise wrong(f"{where}.type", kind, expected)


def _answer(messages: list[Json], *, begins: tuple[str, ...]) -> Json:
    """Return the message of the assistant that an item belongs to. begins: fields of the last message for which the
    item begins a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in begins):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# ---------------- Answers to clients are made here.


def _body(request: CallRequest, answer: CallAnswer) -> Json:
    [choice] = answer.choices
    cut = choice.completion.finish_reason == "length"
    prompt, said = len(answer.prompt_ids), answer.num_tokens
    return {
        **_head(request, answer),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(answer),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.num_cached, "cache_write_tokens": 0},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + said,
        },
    }


def _head(request: CallRequest, answer: CallAnswer) -> Json:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools]
    return {
        "id": answer.id, "object": "response", "created_at": answer.created, "status": "in_progress", "error": None,
        "background": False, "incomplete_details": None, "instructions": None, "metadata": {}, "model": request.model,
        "max_output_tokens": request.max_new_tokens, "output": [], "parallel_tool_calls": True, "store": request.store,
        "previous_response_id": request.previous or None, "temperature": None, "tool_choice": "auto", "tools": tools,
        "top_p": None, "usage": None,
    }  # fmt: skip


def _items(answer: CallAnswer) -> list[Json]:
    [choice] = answer.choices
    reply, items = choice.reply, []
    status = "incomplete" if choice.completion.finish_reason == "length" else "completed"
    if reply.reasoning:
        thoughts = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": f"rs-{answer.id}", "summary": [], "content": thoughts})
    if reply.content or not reply.tool_calls:
        text = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg-{answer.id}", "role": "assistant", "status": status, "content": [text]}
        )
    for call in reply.tool_calls:
        about = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        items.append({"type": "function_call", "id": f"fc-{call.id}", **about})
    return items


def _events(request: CallRequest, answer: CallAnswer) -> Iterator[bytes]:
    body, numbers = _body(request, answer), itertools.count()

    def one(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    yield one("response.created", response=_head(request, answer))
    yield one("response.in_progress", response=_head(request, answer))
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        started = {"status": "in_progress"} if "status" in item else {}
        yield one("response.output_item.added", output_index=index, item={**item, **started, **empty})
        if item["type"] == "function_call":
            name = "response.function_call_arguments"
            yield one(f"{name}.delta", **place, delta=item["arguments"])
            yield one(f"{name}.done", **place, name=item["name"], arguments=item["arguments"])
        for at, part in enumerate(item.get("content", ())):
            where = {**place, "content_index": at}
            more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
            yield one("response.content_part.added", **where, part={**part, "text": ""})
            if part["text"]:
                yield one(f"response.{part['type']}.delta", **where, delta=part["text"], **more)
            yield one(f"response.{part['type']}.done", **where, text=part["text"], **more)
            yield one("response.content_part.done", **where, part=part)
        yield one("response.output_item.done", output_index=index, item=item)
    yield one(f"response.{body['status']}", response=body)


RESPONSES = Dialect(_read, _body, _events, error_body)
