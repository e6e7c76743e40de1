"""Chat formats turn messages into token ids, continue a conversation without touching earlier tokens, and read answers.

No part of a conversation is tokenised twice: the next prompt consists of the tokens of the last prompt and answer,
followed by the tokens of the new messages.
"""

from __future__ import annotations

import copy
import importlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter

from ...dataplane.imports import MissingExtra
from .chat_template import ANSWER_MARK, apply_chat_template
from .stop_tokens import tokenizer_ends

Message = Mapping[str, Any]
"""A chat message in the form of OpenAI's API, such as `{"role": "user", "content": "Hello"}`."""

TEMPLATE = "template"
"""Value of `model.renderer` for the chat template of the model's own tokenizer."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the policy requests."""

    id: str
    name: str
    arguments: str
    """Arguments as JSON text."""

    def as_dict(self) -> dict[str, Any]:
        """Return the call in the form of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's answer, read from its tokens."""

    content: str
    """Text of the answer, without its reasoning and its calls."""
    reasoning: str = ""
    """Text between the model's thinking tags; "" if there was none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Well-formed tool calls, in order. Malformed calls are left out."""

    def as_message(self) -> dict[str, Any]:
        """Return the answer as a message in the form of OpenAI's API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message


class ChatFormat(Protocol):
    """Protocol of a model's chat format."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer, in addition to those of the engine."""
        ...

    @property
    def reads_tools(self) -> bool:
        """True if the format can read tool calls from an answer."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the token ids of a conversation, up to where the policy begins to answer. Raises ValueError if the
        format does not take the messages. A last message of the assistant is continued, or refused by a format that
        cannot do that."""
        ...

    def extend(
        self,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
    ) -> list[int] | None:
        """Return the token ids of a conversation that continues with new messages. They begin with exactly `prompt_ids`
        and `answer_ids`. Returns None if the format cannot do that, for example because it would change an earlier
        turn."""
        ...

    def parse(self, answer_ids: Sequence[int], tools: Sequence[Message] = ()) -> Reply:
        """Read the policy's answer from its token ids."""
        ...

    def showing(self, expand: Callable[[str], str]) -> ChatFormat:
        """Return the same format for messages with pictures. expand: puts the texts of the pictures in place of their
        placeholders in a text. Raises ValueError if the format shows no pictures."""
        ...


def build_chat_format(
    tokenizer: Any, renderer: str, options: Mapping[str, Any], template_arguments: Mapping[str, Any]
) -> ChatFormat:
    """Build the chat format that `model.renderer` names.

    options: options of a renderer (`model.renderer_options`). template_arguments: arguments of the chat template
    (`data.chat_template_kwargs`). Raises ValueError with one sentence if the tokenizer has no chat template, or the
    renderer does not exist or does not fit the tokenizer, and MissingExtra if the package is not installed.
    """
    if renderer == TEMPLATE:
        return TemplateFormat(tokenizer, template_arguments)
    return RendererFormat(tokenizer, renderer, options)


class TemplateFormat:
    """The chat template of the model's tokenizer. It can continue a conversation if the template only appends text."""

    reads_tools = False

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        """arguments: arguments of the template. Raises ValueError if the tokenizer has no template."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("model.path: the tokenizer has no chat template, expected a chat model")
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        self._expand: Callable[[str], str] = str
        self.stop_token_ids = tokenizer_ends(tokenizer).ids

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        return self._encode(self._text(messages, tools, prompted=True))

    def extend(
        self,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
    ) -> list[int] | None:
        if any(message.get("role") == "assistant" for message in messages):
            return None
        before: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": ANSWER_MARK}]
        ended = self._text(before, tools, prompted=False)
        whole = self._text([*before, *messages], tools, prompted=True)
        if not whole.startswith(ended) or ended.count(ANSWER_MARK) != 1:
            return None  # The template changes an earlier turn when another turn follows.
        added = self._encode(whole[whole.index(ANSWER_MARK) + len(ANSWER_MARK) :])
        if added[:1] and list(answer_ids[-1:]) == added[:1] and added[0] in self.stop_token_ids:
            added = added[1:]  # The answer already has the token that ends a turn.
        return [*prompt_ids, *answer_ids, *added]

    def showing(self, expand: Callable[[str], str]) -> TemplateFormat:
        shown = copy.copy(self)
        shown._expand = expand
        return shown

    def parse(self, answer_ids: Sequence[int], tools: Sequence[Message] = ()) -> Reply:
        ids = list(answer_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        thinking, end, answer = text.rpartition("</think>")
        return Reply(answer.lstrip("\n"), thinking.removeprefix("<think>").strip()) if end else Reply(text)

    def _text(self, messages: Sequence[Message], tools: Sequence[Message], *, prompted: bool) -> str:
        return apply_chat_template(self._tokenizer, messages, self._arguments, tools=tools, prompted=prompted)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(self._expand(text), add_special_tokens=False)["input_ids"]


class RendererFormat:
    """A chat format of the package `renderers`, written by hand for one family of models."""

    reads_tools = True

    def __init__(self, tokenizer: Any, name: str, options: Mapping[str, Any]) -> None:
        """name: name of the renderer, such as `qwen3`; `auto` finds it by the model's hub id. Raises ValueError and
        MissingExtra as `build_chat_format` does."""
        try:
            package = importlib.import_module("renderers")
            kinds = TypeAdapter(importlib.import_module("renderers.configs").RendererConfig)
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("renderers"):
                raise MissingExtra("renderers", f"model.renderer={name}", "endpoint") from None
            raise
        try:
            config = kinds.validate_python({"name": name, **_with_all_thinking(name, options)})
            self._renderer = package.create_renderer(tokenizer, config)
        except Exception as error:  # The package raises pydantic errors, KeyError and ValueError.
            raise ValueError(
                f"model.renderer: got {name!r} with model.renderer_options={dict(options)}, expected a renderer that "
                f"fits the tokenizer: {' '.join(str(error).split())}"
            ) from error
        self._name = name
        self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        if messages and messages[-1].get("role") == "assistant":
            raise ValueError(
                "messages: got a last message of the assistant, expected one of another role, because a renderer does "
                "not continue a message; model.renderer=template does"
            )
        try:
            return list(
                self._renderer.render_ids(_plain(messages), tools=_enveloped(tools), add_generation_prompt=True)
            )
        except Exception as error:  # The renderer or its template failed.
            raise ValueError(f"the renderer does not take the messages: {error}") from error

    def extend(
        self,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
    ) -> list[int] | None:
        try:
            more = self._renderer.bridge_to_next_turn(
                list(prompt_ids), list(answer_ids), _plain(messages), tools=_enveloped(tools)
            )
        except Exception as error:
            raise ValueError(f"the renderer does not take the messages: {error}") from error
        if more is None:
            return None
        before = [*prompt_ids, *answer_ids]
        return list(more.token_ids) if list(more.token_ids[: len(before)]) == before else None

    def showing(self, expand: Callable[[str], str]) -> RendererFormat:
        raise ValueError(
            f"model.renderer: got {self._name!r} and messages with pictures, expected 'template', because a renderer "
            "shows no pictures"
        )

    def parse(self, answer_ids: Sequence[int], tools: Sequence[Message] = ()) -> Reply:
        parsed = self._renderer.parse_response(list(answer_ids), tools=_enveloped(tools))
        calls = tuple(
            ToolCall(
                call.id or f"call_{secrets.token_hex(8)}",
                call.name,
                call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {}),
            )
            for call in parsed.tool_calls
            if call.status == "ok" and call.name
        )
        return Reply(parsed.content or "", parsed.reasoning_content or "", calls)


def _with_all_thinking(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a renderer that keeps the reasoning of earlier turns. The reasoning is in the row anyway; a
    renderer that drops it would begin a new row at each message of the user."""
    return {**({} if name in ("default", "auto") else {"thinking_retention": "all"}), **options}


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with contents as texts. Lists of text parts are joined, and missing content becomes an empty
    text."""
    return [{**message, "content": text_of(message.get("content"))} for message in messages]


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a text, a list of text parts, or None. Raises ValueError for
    parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type", "text") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"messages: got a part of type {kind!r}, expected only parts of type 'text'")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(texts)


def _enveloped(tools: Sequence[Message]) -> list[dict[str, Any]] | None:
    """Return the declarations of tools in OpenAI's form, as renderers expect them; None if there are no tools."""
    return [dict(tool) for tool in tools] or None
