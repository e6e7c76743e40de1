"""A dialect is a wire format in which clients call the policy; this module has what the dialects share.

body -> `json_object` -> dialect.read -> `CallRequest` -> the session -> `CallAnswer` -> dialect.body or dialect.events
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engines.chat import Reply
from ...engines.protocol import Completion, SamplingParams

Json = dict[str, Any]
IGNORED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "use_beam_search", "tool_choice",
    "parallel_tool_calls", "reasoning", "reasoning_effort", "thinking",
)  # fmt: skip
"""Fields of a request that have no effect, because the run decides how the policy samples."""
_CUTS: dict[str, tuple[type, str]] = {
    "top_p": (float, "above 0, at most 1"), "top_k": (int, "0 (off) or more"), "min_p": (float, "from 0 to 1"),
}  # fmt: skip
"""Fields that say from which tokens each token is drawn, which training can repeat."""
_UNCHANGED: dict[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": [],
    "allowed_token_ids": [], "min_tokens": 0, "use_beam_search": False,
}  # fmt: skip
"""Fields that change the distribution itself -> the value with which they do not."""
MAX_DEPTH = 100
"""Largest nesting depth of lists and objects in a body. It is limited because Python's JSON reader recurses."""
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part of a content -> its field that has the text."""


class BadRequest(ValueError):
    """Raised for a request that the endpoint refuses. The message says what is wrong."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        self.status = status
        self.code = code
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One call of the policy, as a client requests it, in whichever dialect."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages in the form of chat completions; () for a text completion."""
    prompt: str | tuple[int, ...] = ""
    """Text or token ids of a text completion; "" for a chat."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Declarations of tools in the form of chat completions."""
    model: str
    """Name of the model as the client gave it."""
    n: int = 1
    """Number of answers that the client wants."""
    max_new_tokens: int | None
    """Largest number of tokens that the client wants; None if it sets no limit."""
    stop: tuple[str, ...] = ()
    schema: str = ""
    """JSON schema that the answer must match; "" if there is none."""
    schema_field: str = ""
    """Name of the field that gave the schema."""
    stream: bool
    """True if the answer is sent as server-sent events."""
    usage_in_stream: bool = False
    """True if a stream of chat completions ends with the numbers of tokens."""
    logprobs: bool = False
    """True if the answer has the log-prob of each token."""
    token_ids: bool = False
    """True if the answer has the token ids of prompt and answer (`return_token_ids`, as in vLLM)."""
    previous: str = ""
    """Id of the response whose messages come before those of this call (`previous_response_id`); "" for none."""
    num_instructions: int = 0
    """Number of the first messages that are instructions, which belong to this call alone."""
    store: bool = False
    """True if a later call of the episode can name this one as its previous response."""
    ignored: tuple[str, ...]
    """Names of the fields that the client has set and that have no effect."""
    sampling: Mapping[str, Any]
    """The sampling fields that are about the distribution of tokens, with their values."""

    @property
    def is_chat(self) -> bool:
        """True unless the call is a text completion."""
        return bool(self.messages)


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of the policy."""

    completion: Completion
    text: str
    """Text of the completion, as the episode records it."""
    reply: Reply
    """The answer as a message. For a text completion, only its content is used."""
    stopped_by: str = ""
    """Stop text of the request that ended the answer, which the reply does not contain; "" if none did."""
    tokens: Sequence[str] = ()
    """Text of each token if the client requested log-probs; else ()."""

    @property
    def finish_reason(self) -> str:
        """Reason why the answer ended, in the words of chat completions."""
        return "tool_calls" if self.reply.tool_calls else self.completion.finish_reason


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The policy's answers to one call."""

    id: str
    created: int
    """Time of the answer in seconds since 1970."""
    prompt_ids: Sequence[int]
    """Token ids that the engine was given."""
    num_cached: int
    """Number of the first tokens of the prompt that an earlier call of the episode had already."""
    choices: tuple[Choice, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(choice.completion.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The functions that read the requests and write the answers of one wire format."""

    read: Callable[[Json], CallRequest]
    """Reads the body of a request. Raises BadRequest if it is invalid or asks for what the endpoint does not have."""
    body: Callable[[CallRequest, CallAnswer], Json]
    """Returns the body of an answer that is not streamed."""
    events: Callable[[CallRequest, CallAnswer], Iterator[bytes]]
    """Yields the server-sent events of a streamed answer. The answer is complete before the first event is sent."""
    error: Callable[[BadRequest], Json]
    """Returns the body of a refusal."""


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """Return one server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(body).encode() + b"\n\n"


# ---------------- These functions read parts of requests. They raise BadRequest with the place of what does not fit.


def json_object(body: bytes) -> Json:
    """Return the JSON object that a body consists of."""
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


def wrong(where: str, got: Any, expected: str) -> BadRequest:
    """Return the refusal of a value."""
    return BadRequest(f"{where}: got {repr(got)[:80]}, expected {expected}")


def refuse(given: Json, *names: str, why: str) -> None:
    """Refuse a request that sets one of these fields."""
    for name in names:
        if given.get(name):
            raise BadRequest(f"{name}: {why}")


def whole(given: Mapping[str, Any], name: str) -> int | None:
    """Return a field that is a whole number above 0; None if it is not set."""
    value = given.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise wrong(name, value, "a whole number >= 1")
    return value


def text_at(given: Mapping[str, Any], name: str, where: str = "") -> str:
    """Return a field that is a text and not empty."""
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(where + name, value, "a text")
    return value


def object_at(given: Mapping[str, Any], name: str, where: str = "") -> Json:
    """Return a field that is an object."""
    value = given.get(name)
    if not isinstance(value, dict):
        raise wrong(where + name, value, "an object")
    return value


def objects_at(given: Mapping[str, Any], name: str, where: str = "") -> list[Json]:
    """Return a field that is a list of objects; [] if it is not set."""
    value = given.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong(where + name, value, "a list of objects")
    return value


def texts_at(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a field that is a text or a list of texts, without those that are empty."""
    value = given.get(name)
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong(name, value, "a list of texts")
    return tuple(text for text in texts if text)


def content_text(content: Any, where: str) -> str:
    """Return the text of a content, which is a text, a list of parts that are texts, or None."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, content, "a text or a list of parts")
    return "".join(part_text(part, f"{where}.{number}") for number, part in enumerate(content))


def content_of(content: Any, where: str) -> str | list[Json]:
    """Return a content in the form of chat completions: a text, or parts where some are pictures."""
    if not isinstance(content, list):
        return content_text(content, where)
    return joined([part_of(part, f"{where}.{number}") for number, part in enumerate(content)])


def joined(parts: Sequence[str | Json]) -> str | list[Json]:
    """Return texts and pictures as one content, which is a text if there is no picture."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def part_of(part: Any, where: str) -> str | Json:
    """Return one part of a content: its text, or a picture as `{"type": "image", "image": ...}`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image":  # Anthropic's form.
        source = object_at(part, "source", f"{where}.")
        if source.get("type") != "base64":
            raise wrong(f"{where}.source.type", source.get("type"), "base64")
        kind, data = (text_at(source, name, f"{where}.source.") for name in ("media_type", "data"))
        url = f"data:{kind};base64,{data}"
    elif kind in ("image_url", "input_image"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise wrong(f"{where}.image_url", url, "a data URI")
    else:
        return part_text(part, where)
    return {"type": "image", "image": url}


def part_text(part: Any, where: str) -> str:
    """Return the text of one part of a content."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise BadRequest(f"{where}: got a part of type {repr(kind)[:80]}, expected texts or pictures")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise wrong(f"{where}.{_TEXTS[kind]}", text, "a text")
    return text


def function_tool(name: str, description: Any, parameters: Any) -> Json:
    """Return the declaration of a tool in the form of chat completions."""
    function: Json = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def tools_used(given: Json, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that the policy can call: none if the request's `tool_choice` says so."""
    return () if given.get("tool_choice") in ("none", {"type": "none"}) else tuple(tools)


def schema_at(given: Any, field: str, tools: Sequence[Any]) -> str:
    """Return the JSON schema of a format for answers; "" if it leaves them free.

    given: the format of any dialect. field: its name in the request.
    """
    if given is None or given == {"type": "text"}:
        return ""
    kind = given.get("type") if isinstance(given, dict) else given
    if kind not in ("json_object", "json_schema"):
        raise wrong(f"{field}.type", kind, "text, json_object or json_schema")
    if tools:
        raise BadRequest(f"{field}: got {kind} with tools, expected one of them, because it leaves no room for calls")
    holder = given if "schema" in given or kind == "json_object" else object_at(given, "json_schema", f"{field}.")
    return json.dumps({"type": "object"} if kind == "json_object" else object_at(holder, "schema", f"{field}."))


def ignored_of(given: Json) -> dict[str, Any]:
    """Return the fields `ignored` and `sampling` of a CallRequest."""
    names = tuple(name for name in IGNORED if given.get(name) is not None)
    known = ("temperature", *_CUTS, *_UNCHANGED)
    return {"ignored": names, "sampling": {name: given[name] for name in names if name in known}}


def own_cuts(sampling: Mapping[str, Any], temperature: float | None) -> dict[str, Any]:
    """Return the sampling parameters that a request sets, where requests decide (`rollout.endpoint.sampling`).

    sampling: see `CallRequest`. temperature: that of the run; None if the answer is not trained on. Raises BadRequest
    for what training cannot repeat.
    """
    cuts: dict[str, Any] = {}
    for name, value in sampling.items():
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if name in _CUTS:
            kind, expected = _CUTS[name]
            try:
                cuts[name] = kind(value)
                SamplingParams(**{name: cuts[name]})
            except (TypeError, ValueError, OverflowError):
                raise wrong(name, value, expected) from None
            if not plain or cuts[name] != value:
                raise wrong(name, value, expected)
        elif temperature is None:
            continue
        elif name == "temperature":
            if not plain or value != temperature:
                raise wrong(name, value, f"{temperature:g} or unset, because training repeats the run's temperature")
        elif value != _UNCHANGED[name]:
            raise wrong(name, value, f"{_UNCHANGED[name]} or unset, because training cannot repeat it")
    return cuts
