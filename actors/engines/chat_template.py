"""Applies the chat template of a model's tokenizer to messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_MARK = "\N{REPLACEMENT CHARACTER}answer\N{REPLACEMENT CHARACTER}"
"""Placeholder for the policy's answer. It shows which text a template puts after an answer."""


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompted: bool = True,
    refusal: str = "the chat template does not take the messages",
) -> str:
    """Return the text of a conversation. The text already has its special tokens, so it must be tokenised as it is.

    arguments: arguments of the template. tools: declarations of tools; with None the template gets no argument `tools`.
    prompted: True ends the text where the model begins to answer: in a message of its own, or at the end of the last
    message if that is the assistant's, which the model then continues (as in TRL). refusal: beginning of the error
    message. Texts become lists of parts for a template that takes nothing else, as those of some models with pictures.
    Raises ValueError if the template does not take the messages.
    """
    given = {} if tools is None else {"tools": list(tools) or None}
    try:
        if _takes_only_parts(tokenizer, str(tokenizer.chat_template)):
            messages = [_in_parts(message) for message in messages]
        last = messages[-1] if messages else {}
        continued = prompted and isinstance(last, Mapping) and last.get("role") == "assistant"
        return tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=prompted and not continued,
            continue_final_message=continued,
            **given,
            **arguments,
        )
    except Exception as error:  # A template is a program and can raise any error.
        raise ValueError(f"{refusal}: {error}") from error


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


@functools.lru_cache(maxsize=8)
def _takes_only_parts(tokenizer: Any, template: str) -> bool:
    """Return whether a chat template leaves out a text as `content`, but not one in a list of parts.

    Such a template walks through the letters of a text as if they were parts. template: that of the tokenizer, which
    can be replaced.
    """

    def shown(content: Any) -> bool:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception:  # Some templates raise an error for a text, or need arguments.
            return False
        return ANSWER_MARK in text

    return not shown(ANSWER_MARK) and shown([{"type": "text", "text": ANSWER_MARK}])
