"""Checks the columns, chat messages and answers of rows of files and datasets, before a chat template renders them.

Most chat templates render a missing part of a message as nothing, so a row that is not a prompt would become an empty
prompt.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...dataplane.config import encodable
from .data_config import DataConfig
from .prompt_sources import PromptRows

_SHOWN_CHARS = 80
MESSAGE = '{"role": "user", "content": "..."}'
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""Role in the format ShareGPT -> role that chat templates know."""


@dataclass(frozen=True, slots=True)
class ReadRow:
    """The checked content of one row."""

    prompt: str | list[Mapping[str, Any]]
    """Text, or chat messages; not empty."""
    answer: str
    """Expected answer; "" if the row has none."""
    others: Mapping[str, Any]
    """Columns other than those of prompt and answer."""


def read_row(config: DataConfig, row: Mapping[str, Any], place: str) -> ReadRow:
    """Return the prompt, the answer and the other columns of a row. place: place of the row, for errors. Raises
    ValueError with a sentence that names the place and the column if the row does not fit."""
    prompt = _column(row, config.prompt_field, "data.prompt_field", place)
    answer = _column(row, config.answer_field, "data.answer_field", place) if config.answer_field else None
    others = {name: value for name, value in row.items() if name not in (config.prompt_field, config.answer_field)}
    where = f"data: {place}, column {config.prompt_field!r}"
    if isinstance(prompt, list) and prompt:
        for number, message in enumerate(prompt, 1):
            _check_message(message, f"{where}: message {number}")
    elif not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where}: the prompt is {prompt!r:.{_SHOWN_CHARS}}, expected text or a list of chat messages")
    else:
        check_encodable(prompt, where)
    return ReadRow(prompt, _answer(config, answer, place), others)


def check_rows(config: DataConfig, table: PromptRows, most: int) -> None:
    """Check the first `most` rows without a tokenizer. Raises ValueError as `read_row` does, also if there is no
    row."""
    if not len(table):
        raise ValueError(f"data: {table.name!r} is empty, expected at least one row")
    for index, row in enumerate(table.dicts(0, min(most, len(table)))):
        read_row(config, row, table.place(index))


def check_encodable(text: str, where: str) -> None:
    """Raise ValueError, which begins with `where`, if no tokenizer can take a text."""
    if not encodable(text):
        half = next(character for character in text if "\ud800" <= character <= "\udfff")
        raise ValueError(f"{where}: got the character {half!r}, half of a surrogate pair, expected text")


def check_rendered(text: str, messages: tuple[Mapping[str, Any], ...], where: str) -> None:
    """Raise ValueError if a chat template has written a list of content parts into the text as a Python list.

    The error begins with `where`.
    """
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and repr(content) in text:
            raise ValueError(f"{where}: the chat template takes no lists as `content`, expected text, as in {MESSAGE}")


def _column(row: Mapping[str, Any], name: str, key: str, place: str) -> Any:
    if name not in row:
        near = difflib.get_close_matches(name, row, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{key}: {place} has no column {name!r}; it has {', '.join(row) or 'none'}{hint}")
    return row[name]


def _check_message(message: Any, what: str) -> None:
    """Raise ValueError unless `message` is a chat message with a role and with text, parts or calls of tools.

    The error begins with `what`.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"{what} is {message!r:.{_SHOWN_CHARS}}, expected a message such as {MESSAGE}")
    role, content = message.get("role"), message.get("content")
    if "from" in message and "value" in message and role is None:
        raise ValueError(
            f"{what} has the keys `from` and `value` of ShareGPT, expected `role` (user for human, assistant for gpt) "
            f"and `content`, as in {MESSAGE}"
        )
    if not isinstance(role, str) or not role:
        raise ValueError(f"{what} has the keys {', '.join(map(str, message))}, expected text in `role`: {MESSAGE}")
    check_encodable(role, what)
    if role in OTHER_ROLES:
        raise ValueError(f"{what} has the role {role!r}, expected {OTHER_ROLES[role]!r}")
    if isinstance(content, list) and content:
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
                raise ValueError(f"{what} has the part {part!r:.{_SHOWN_CHARS}}, expected one with a `type`")
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise ValueError(f"{what} has a part of type text without text in `text`: {part!r:.{_SHOWN_CHARS}}")
            check_encodable(str(part.get("text", "")), what)
        return
    called = isinstance(message.get("tool_calls"), list) and bool(message["tool_calls"])
    if isinstance(content, str) and (content or role != "user"):
        check_encodable(content, what)
    elif content is not None or not called:
        got = repr(content) if "content" in message else "nothing"
        raise ValueError(f"{what} of the role {role!r} has {got:.{_SHOWN_CHARS}} as `content`, expected text")


def _answer(config: DataConfig, answer: Any, place: str) -> str:
    where = f"data: {place}, column {config.answer_field!r}"
    if answer is None:
        return ""
    if not isinstance(answer, str | int | float):
        raise ValueError(f"{where}: the answer is a {type(answer).__name__}, expected text or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"{where}: the answer is {answer}, expected text or a finite number, or null for no answer")
    text = str(answer)
    check_encodable(text, where)
    pattern = config.answer_pattern
    if pattern is None:
        return text
    found = re.findall(pattern, text)
    if not found:
        raise ValueError(
            f"data.answer_pattern: {pattern!r} does not match the answer of {place}, {text[-_SHOWN_CHARS:]!r}"
        )
    return found[-1].strip()
