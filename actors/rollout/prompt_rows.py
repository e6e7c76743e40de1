"""Checks the columns, chat messages and answers of rows of files and datasets, before a chat template renders them.

Most chat templates render a missing part of a message as nothing, so a row that is not a prompt would become an empty
prompt.
"""

from __future__ import annotations

import ast
import difflib
import html
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
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
        _check_no_chat(prompt, where)
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


def check_rendered(text: str, messages: tuple[Mapping[str, Any], ...], place: str, added: int, where: str) -> None:
    """Raise ValueError if a chat template has left a message out of the text, or has written one as a Python list.

    added: number of messages of `data.system_prompt` at the front. where: beginning of the error.
    """
    for number, message in enumerate(messages, 1 - added):
        content = message.get("content")
        if isinstance(content, list) and repr(content) in text:
            raise ValueError(f"{where}: the chat template takes no lists as `content`, expected text, as in {MESSAGE}")
        what = f"{where}: message {number}" if number > 0 else f"data.system_prompt: {place}: the message"
        _check_appears(text, message["role"], content, what)


def _check_appears(text: str, role: Any, content: Any, what: str) -> None:
    """Raise ValueError, which begins with `what`, if a chat template has left a message out of the text.

    The text may have other white space, and escapes of JSON or HTML. A message of the assistant may have been changed,
    because templates leave out its reasoning.
    """
    if role == "assistant":
        return
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    for part in parts:
        if not isinstance(part, str) or part.strip() in text:
            continue
        forms = (part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
        if not any(_dense(form.strip()) in _dense(one) for form in forms for one in (text, html.unescape(text))):
            raise ValueError(
                f"{what} of the role {role!r} is missing from the text of the chat template, expected a role that the "
                "template knows"
            )


def _dense(text: str) -> str:
    return "".join(text.split())


def _check_no_chat(prompt: str, where: str) -> None:
    """Raise ValueError if a text prompt is a list of chat messages that was stored as text."""
    if not re.match(r"\s*\[\s*\{", prompt):
        return
    messages: Any = None
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            messages = messages or parse(prompt.strip())
    known = ({"role", "content"}, {"from", "value"})
    if isinstance(messages, list) and all(isinstance(m, dict) and any(k <= m.keys() for k in known) for m in messages):
        raise ValueError(
            f"{where}: the chat messages are stored as text, {prompt!r:.{_SHOWN_CHARS}}, expected a list of messages "
            "(json.loads of the column makes it one)"
        )


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
    if isinstance(answer, bool):
        raise ValueError(f"{where}: the answer is {answer}, expected text or a number")
    if not isinstance(answer, str | int | float):
        raise ValueError(f"{where}: the answer is a {type(answer).__name__}, expected text or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"{where}: the answer is {answer}, expected text or a finite number, or null for no answer")
    # A column of whole numbers with a gap, as pandas writes it, has floats.
    whole = isinstance(answer, float) and answer.is_integer() and abs(answer) < 1 << 53
    text = str(int(answer) if whole else answer)
    check_encodable(text, where)
    pattern = config.answer_pattern
    if pattern is None:
        return text
    found = re.findall(pattern, text)
    if not found:
        raise ValueError(
            f"data.answer_pattern: {pattern!r} does not match the answer of {place}, {text[-_SHOWN_CHARS:]!r}"
        )
    if not found[-1].strip():
        raise ValueError(
            f"data.answer_pattern: {pattern!r} finds an empty text in the answer of {place}, {text[-_SHOWN_CHARS:]!r}, "
            "expected an answer"
        )
    return found[-1].strip()
