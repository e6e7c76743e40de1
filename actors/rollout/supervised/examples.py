"""Reads the conversations of a supervised run from files, checks them, and makes rows of tokens of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...images.prompt_pictures import OTHER_TYPES, PICTURE_TYPES
from ...protocols import PromptRow
from ..prompt_sources import PromptRows, read_jsonl
from .config import SftConfig
from .turn_marks import TurnMarker, TurnTokens

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message can have."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one line, with the turns to train on."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Mapping[str, Any]] | None
    """Declarations of tools for the chat template; None without a column `tools`."""
    trained: tuple[int, ...]
    """Indices of the assistant's messages that are trained on, at least one, ascending."""

    def upto(self, index: int) -> Conversation:
        """Return the conversation up to message `index`, which alone is trained on."""
        return Conversation(self.messages[: index + 1], self.tools, (index,))


@dataclass(frozen=True, slots=True)
class Completion:
    """A text and its continuation, which is trained on."""

    prompt: str
    completion: str


class Examples:
    """Rows of the conversations in one or several files. A PromptSource whose prompts are the numbers of rows."""

    def __init__(self, config: SftConfig, *, validation: bool) -> None:
        """Read the files of training, or those of validation if `validation` is True. Raises ValueError with one
        sentence, which names file and line, for a line that is no conversation."""
        self._config = config
        self._key = "sft.validation" if validation else "sft.train"
        files = config.files(validation=validation)
        self.name = ", ".join(files)
        self.tables = [self._table(file) for file in files]
        """Lines of each file."""
        self._places: list[tuple[PromptRows, int]] = []
        """File and index of the line of each row."""
        self._parts: list[Conversation | Completion] = []
        for table in self.tables:
            for index, line in enumerate(table.dicts(0, len(table))):
                for part in self._of_line(table, index, line):
                    self._places.append((table, index))
                    self._parts.append(part)
        if not self._parts:
            raise ValueError(f"{self._key}: {self.name} has no line, expected at least one conversation")

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self._parts)

    def steps(self, rows: int) -> int:
        """Return the number of steps of `rows` rows each in `sft.epochs`, rounded up."""
        assert self._config.epochs is not None
        return max(1, math.ceil(self._config.epochs * self.size / rows))

    def row(self, index: int) -> PromptRow:
        """Return the row's number as a prompt, which a `PromptStream` puts in order."""
        return PromptRow(str(index), "", {"row": index})

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        """Return the prompts `start` to `stop - 1`."""
        return [self.row(index) for index in range(start, stop)]

    def tokens(self, index: int, marker: TurnMarker) -> TurnTokens:
        """Return the tokens of row `index`. Raises ValueError, which names file and line, if the chat template does not
        take the messages, or if the row is too long."""
        part, most = self._parts[index], self._config.max_tokens
        try:
            if isinstance(part, Completion):
                tokens = marker.completion(part.prompt, part.completion)
            else:
                tokens = marker.conversation(part.messages, part.tools, part.trained)
        except ValueError as error:
            raise self._wrong(index, str(error)) from None
        if len(tokens.ids) > most:
            if self._config.overlong == "error":
                raise self._wrong(
                    index,
                    f"the row has {len(tokens.ids)} tokens, expected at most sft.max_tokens={most} "
                    "(sft.overlong=truncate cuts rows)",
                )
            tokens = TurnTokens(tokens.ids[:most], tokens.mask[:most])
        if not tokens.mask.any():
            raise self._wrong(index, f"none of the first sft.max_tokens={most} tokens is trained on, expected some")
        return tokens

    # ---------------- These private methods read lines.

    def _table(self, file: str) -> PromptRows:
        try:
            return read_jsonl(Path(file), file)
        except ValueError as error:
            raise ValueError(f"{self._key}{str(error).removeprefix('data')}") from error

    def _wrong(self, index: int, what: str) -> ValueError:
        table, line = self._places[index]
        return ValueError(f"{self._key}: {table.place(line)}: {what}")

    def _of_line(self, table: PromptRows, index: int, line: Mapping[str, Any]) -> Iterator[Conversation | Completion]:
        """Yield the parts of a line that each become a row."""
        try:
            part = read_line(line, self._config.messages_field)
        except ValueError as error:
            raise ValueError(f"{self._key}: {table.place(index)}: {error}") from None
        if isinstance(part, Completion) or self._config.turns == "all":
            yield part
        elif self._config.turns == "each":
            yield from map(part.upto, part.trained)
        else:
            yield part.upto(part.trained[-1])


def read_line(line: Mapping[str, Any], messages_field: str) -> Conversation | Completion:
    """Return the conversation or the text of a line. messages_field: name of the column of messages. Raises ValueError
    if the line has neither, or if a message is not valid."""
    if messages_field in line:
        messages, prompt = _messages(line[messages_field], messages_field), ()
    elif "prompt" in line and "completion" in line:
        prompt, completion = line["prompt"], line["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise ValueError("`completion` is empty, expected a text to train on")
            return Completion(prompt, completion)
        prompt = _messages(prompt, "prompt")
        messages = (*prompt, *_messages(completion, "completion"))
    else:
        raise ValueError(
            f"got the columns {', '.join(line) or 'none'}, expected `{messages_field}`, or `prompt` and `completion`"
        )
    spoken = [message["role"] == "assistant" for message in messages]
    trained = tuple(index for index in range(len(prompt), len(messages)) if spoken[index])
    if not trained:
        raise ValueError("there is no message of the assistant to train on, expected at least one")
    if spoken[0] or any(first and second for first, second in zip(spoken, spoken[1:], strict=False)):
        raise ValueError("a message of the assistant is the first or follows another one, expected one that it answers")
    tools = line.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"`tools` is a {type(tools).__name__}, expected a list of declarations")
    return Conversation(messages, tools, trained)


def _messages(given: Any, column: str) -> tuple[Mapping[str, Any], ...]:
    """Return checked messages, with an empty text for missing content. column: name of their column."""
    if not isinstance(given, list) or not given:
        kind = "an empty list" if given == [] else f"a {type(given).__name__}"
        raise ValueError(f"`{column}` is {kind}, expected a list of messages")
    checked = []
    for index, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index} is a {type(message).__name__}, expected `role` and `content`")
        if message.get("role") not in ROLES:
            role = message.get("role")
            raise ValueError(f"message {index} has the role {role!r}, expected one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | list | None) or (content is None and not message.get("tool_calls")):
            raise ValueError(f"message {index} has the content {content!r}, expected text")
        kinds = [part.get("type") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
        if shown := [kind for kind in kinds if kind in (*PICTURE_TYPES, *OTHER_TYPES)]:
            raise ValueError(f"message {index} has a part of type {shown[0]!r}, expected only text in a supervised run")
        checked.append({**message, "content": "" if content is None else content})
    return tuple(checked)
