"""Applies the chat template of a model's tokenizer to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompted: bool = True,
    refusal: str = "the chat template does not take the messages",
) -> str:
    """Return the text of a conversation.

    arguments: arguments of the template. tools: declarations of tools; with None the template gets no argument `tools`.
    prompted: True ends the text where the model begins to answer. refusal: beginning of the error message. Raises
    ValueError if the template does not take the messages.
    """
    given = {} if tools is None else {"tools": list(tools) or None}
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompted, **given, **arguments
        )
    except Exception as error:  # A template is a program and can raise any error.
        raise ValueError(f"{refusal}: {error}") from error
