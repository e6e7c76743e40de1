"""Applies the chat template of a model's tokenizer to messages."""

from __future__ import annotations

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
    message. Raises ValueError if the template does not take the messages.
    """
    given = {} if tools is None else {"tools": list(tools) or None}
    try:
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
