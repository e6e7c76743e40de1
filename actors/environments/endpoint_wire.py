"""Reads requests and writes answers in OpenAI's wire format, with the types that the package `openai` publishes."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Once httpx begins to load, clients of openai 3 use parts of it, and fail if another thread is still loading it. So it
# is loaded here, before agents run in threads.
import httpx  # noqa: F401
from openai.types import Completion as TextCompletion
from openai.types import CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from pydantic import TypeAdapter, ValidationError

from ..engines.chat import Reply, text_of
from ..engines.protocol import Completion

_CHAT = TypeAdapter(ChatParams)
_TEXT = TypeAdapter(TextParams)
IGNORED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "tool_choice", "parallel_tool_calls",
)  # fmt: skip
"""Fields of a request that have no effect, because the run decides how the policy samples."""


class BadRequest(ValueError):
    """Raised for a request that the endpoint refuses. The message says what is wrong."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        self.status = status
        self.code = code
        super().__init__(message)


MAX_DEPTH = 100
"""Largest nesting depth of lists and objects in a body. It is limited because Python's JSON reader recurses."""
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One call of the policy, as a client requests it."""

    messages: tuple[Mapping[str, Any], ...]
    """Chat messages; () for a text completion."""
    prompt: str | tuple[int, ...]
    """Text or token ids of a text completion; "" for a chat completion."""
    tools: tuple[Mapping[str, Any], ...]
    model: str
    """Name of the model as the client gave it."""
    max_new_tokens: int | None
    """Largest number of tokens that the client wants; None if it sets no limit."""
    stop: tuple[str, ...]
    stream: bool
    """Whether the answer is sent as server-sent events."""
    usage_in_stream: bool
    """Whether a stream ends with the numbers of tokens."""
    logprobs: bool
    """Whether the answer has the log-prob of each token."""
    token_ids: bool
    """Whether the answer has the token ids of prompt and answer (`return_token_ids`, as in vLLM)."""
    ignored: tuple[str, ...]
    """Names of the fields that the client has set and that have no effect."""

    @property
    def is_chat(self) -> bool:
        """True for a chat completion."""
        return bool(self.messages)


def read_call(body: bytes, *, chat: bool) -> CallRequest:
    """Read the body of a request. Raises BadRequest if it is not a valid request, or asks for something that the
    endpoint does not support."""
    given = _json_object(body)
    if given.get("n") not in (None, 1):
        raise BadRequest(f"n: got {given['n']!r}, expected 1, because each call is one turn of the policy")
    if chat and (given.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise BadRequest("response_format: expected text, because the policy's tokens are not constrained")
    try:
        checked: Any = (_CHAT if chat else _TEXT).validate_python({**given, "stream": False})
        tools = tuple(checked.get("tools") or ())
    except ValidationError as error:
        raise _invalid(error) from None
    messages = _messages_of(given["messages"], checked["messages"]) if chat else ()
    if given.get("tool_choice") == "none":
        tools = ()
    limits = [_whole(given, name) for name in ("max_completion_tokens", "max_tokens")]
    stop = given.get("stop") or ()
    options = given.get("stream_options")
    return CallRequest(
        messages=messages,
        prompt="" if chat else _prompt_of(given.get("prompt")),
        tools=tuple(given["tools"]) if tools else (),
        model=str(given["model"]),
        max_new_tokens=next((limit for limit in limits if limit is not None), None),
        stop=(stop,) if isinstance(stop, str) else tuple(text for text in stop if text),
        stream=bool(given.get("stream")),
        usage_in_stream=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(given.get("logprobs")),
        token_ids=bool(given.get("return_token_ids")),
        ignored=tuple(name for name in IGNORED if given.get(name) is not None),
    )


def _json_object(body: bytes) -> dict[str, Any]:
    if _depth(body) > MAX_DEPTH:
        raise BadRequest(f"the body is nested deeper than {MAX_DEPTH} lists and objects")
    try:
        given = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {type(error).__name__}") from None
    if not isinstance(given, dict):
        raise BadRequest(f"the body is a {type(given).__name__}, expected a JSON object")
    return given


def _depth(body: bytes) -> int:
    """Return the nesting depth of the lists and objects of a JSON text; 0 if there are at most MAX_DEPTH of them."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return 0
    depth = deepest = 0
    for found in _BRACKETS.finditer(body):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _messages_of(given: Any, checked: Iterable[Any]) -> tuple[dict[str, Any], ...]:
    """Return the messages of a request, with their contents as texts. checked: pydantic's iterator, which checks each
    message when it is read. Raises BadRequest for invalid messages."""
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
    return tuple(_plain_message(message) for message in given)


def _invalid(error: ValidationError, within: str = "") -> BadRequest:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return BadRequest(f"{within}{where or 'the body'}: {first['msg']}")


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**message, "content": text_of(message.get("content"))}
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _prompt_of(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        [prompt] = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
        return tuple(prompt)
    raise BadRequest("prompt: expected one text or one list of token ids that is not empty")


def _whole(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise BadRequest(f"{name}: got {value!r}, expected a whole number >= 1")
    return value


# ---------------- Answers to clients are made here.


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The policy's answer to one call."""

    id: str
    prompt_ids: Sequence[int]
    """Token ids that the engine was given."""
    completion: Completion
    reply: Reply
    """The answer as a message. For a text completion, only its content is used."""
    tokens: Sequence[str]
    """Text of each token if the client requested log-probs; else ()."""

    @property
    def finish_reason(self) -> str:
        """Reason why the answer ended, in OpenAI's words."""
        return "tool_calls" if self.reply.tool_calls else self.completion.finish_reason


def answer_body(request: CallRequest, answer: CallAnswer, model: str) -> bytes:
    """Return the JSON body of an answer that is not streamed."""
    usage = _usage(answer)
    if not request.is_chat:
        choice: dict[str, Any] = {
            "index": 0,
            "text": answer.reply.content,
            "finish_reason": answer.finish_reason,
            "logprobs": _text_logprobs(answer) if request.logprobs else None,
        }
        whole: Any = TextCompletion(
            id=answer.id, object="text_completion", created=int(time.time()), model=model,
            choices=[CompletionChoice.model_validate(choice)], usage=usage,
        )  # fmt: skip
    else:
        choice = {
            "index": 0,
            "message": _message(answer.reply),
            "finish_reason": answer.finish_reason,
            "logprobs": {"content": _chat_logprobs(answer)} if request.logprobs else None,
        }
        whole = ChatCompletion.model_validate(
            {
                "id": answer.id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": model,
                "choices": [choice],
                "usage": usage.model_dump(),
            }  # fmt: skip
        )
    shown = whole.model_dump(mode="json", exclude_none=True)
    if request.token_ids:
        shown["prompt_token_ids"] = list(answer.prompt_ids)
        shown["choices"][0]["token_ids"] = answer.completion.token_ids.tolist()
    return json.dumps(shown).encode()


def answer_events(request: CallRequest, answer: CallAnswer, model: str) -> Iterator[bytes]:
    """Yield the server-sent events of a streamed answer. The answer is complete before the first event is sent."""
    if not request.is_chat:
        body = json.loads(answer_body(request, answer, model))
        yield _event(body)
    else:
        head = {"id": answer.id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        reply = answer.reply
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if reply.reasoning:
            deltas.append({"reasoning_content": reply.reasoning})
        if reply.content:
            deltas.append({"content": reply.content})
        deltas += [{"tool_calls": [{"index": at, **c.as_dict()}]} for at, c in enumerate(reply.tool_calls)]
        ends: list[str | None] = [*([None] * len(deltas)), answer.finish_reason]
        for delta, end in zip([*deltas, {}], ends, strict=True):
            choice = {"index": 0, "delta": delta, "finish_reason": end}
            chunk = ChatCompletionChunk.model_validate({**head, "choices": [choice]})
            yield _event(chunk.model_dump(mode="json", exclude_none=True))
        if request.usage_in_stream:
            last = ChatCompletionChunk.model_validate({**head, "choices": [], "usage": _usage(answer).model_dump()})
            yield _event(last.model_dump(mode="json", exclude_none=True))
    yield b"data: [DONE]\n\n"


def error_body(message: str, code: str) -> bytes:
    """Return the JSON body of an error, in OpenAI's form."""
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": code}}).encode()


def models_body(models: Iterable[str]) -> bytes:
    """Return the JSON body of the list of models."""
    shown = [{"id": model, "object": "model", "created": 0, "owned_by": "headrace"} for model in models]
    return json.dumps({"object": "list", "data": shown}).encode()


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _usage(answer: CallAnswer) -> CompletionUsage:
    prompt, said = len(answer.prompt_ids), len(answer.completion.token_ids)
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=said, total_tokens=prompt + said)


def _message(reply: Reply) -> dict[str, Any]:
    message = reply.as_message()
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls and not reply.content:
        message["content"] = None
    return message


def _chat_logprobs(answer: CallAnswer) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": _finite(value), "bytes": None, "top_logprobs": []}
        for text, value in zip(answer.tokens, answer.completion.logprobs.tolist(), strict=True)
    ]


def _text_logprobs(answer: CallAnswer) -> dict[str, Any]:
    values = [_finite(value) for value in answer.completion.logprobs.tolist()]
    return {"tokens": list(answer.tokens), "token_logprobs": values}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -9999.0
