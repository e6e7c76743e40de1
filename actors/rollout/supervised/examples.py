"""Reads the conversations of a supervised run from files, checks them, and makes rows of tokens of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...images.config import IMAGES, ImagesConfig
from ...images.prompt_pictures import OTHER_TYPES, PICTURE_TYPES, BadPicture, Picture, take_pictures
from ...protocols import PromptRow
from ..prompt_sources import PromptRows, read_jsonl
from .config import SftConfig
from .turn_marks import TurnMarker, TurnTokens, as_it_is

if TYPE_CHECKING:  # It imports transformers, which takes seconds.
    from ...images.processor import PictureProcessor, Prepared

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
    pictures: tuple[Picture, ...] = ()
    """Pictures of the messages, in order; not read yet."""

    def upto(self, index: int) -> Conversation:
        """Return the conversation up to message `index`, which alone is trained on."""
        messages = self.messages[: index + 1]
        shown = sum(len(_pictures_of(message)) for message in messages)
        return Conversation(messages, self.tools, (index,), self.pictures[:shown])


@dataclass(frozen=True, slots=True)
class Completion:
    """A text and its continuation, which is trained on."""

    prompt: str
    completion: str


class Examples:
    """Rows of the conversations in one or several files. A PromptSource whose prompts are the numbers of rows."""

    def __init__(self, config: SftConfig, *, validation: bool, images: ImagesConfig | None = None) -> None:
        """Read the files of training, or those of validation if `validation` is True. images: section `data.images`;
        None refuses pictures. Raises ValueError with one sentence, which names file and line, for a line that is no
        conversation."""
        self._config, self._images = config, images if images is not None and images.enabled else None
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
        """Return the row's number as a prompt, which a `PromptStream` puts in order, with the row's pictures."""
        part = self._parts[index]
        return PromptRow(
            str(index), "", {"row": index}, pictures=part.pictures if isinstance(part, Conversation) else ()
        )

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        """Return the prompts `start` to `stop - 1`."""
        return [self.row(index) for index in range(start, stop)]

    def tokens(
        self,
        index: int,
        marker: TurnMarker,
        processor: PictureProcessor | None = None,
        prepared: Sequence[Prepared] = (),
        *,
        added: int = 0,
    ) -> TurnTokens:
        """Return the tokens of row `index`. Raises ValueError, which names file and line, if the chat template does not
        take the messages, or if the row is too long; and BadPicture if its placeholders and its pictures differ.

        prepared: the row's pictures, preprocessed by `processor`; without it each has one token. added: number of
        tokens that are missing of them, for the check of the length.
        """
        part, most, expand = self._parts[index], self._config.max_tokens, as_it_is
        if processor is not None:
            expand = _expanding(processor, prepared, self._place(index))
        try:
            if isinstance(part, Completion):
                tokens = marker.completion(part.prompt, part.completion)
            else:
                tokens = marker.conversation(part.messages, part.tools, part.trained, expand)
        except BadPicture:
            raise
        except ValueError as error:
            raise self._wrong(index, str(error)) from None
        if len(tokens.ids) + added > most:
            if self._config.overlong == "error":
                raise self._wrong(
                    index,
                    f"the row has {len(tokens.ids) + added} tokens, expected at most sft.max_tokens={most} "
                    "(sft.overlong=truncate cuts rows)",
                )
            end = most if processor is None else processor.whole_length(tokens.ids, prepared, most)
            tokens = TurnTokens(tokens.ids[:end], tokens.mask[:end])
        if not tokens.mask.any():
            raise self._wrong(index, f"none of the first sft.max_tokens={most} tokens is trained on, expected some")
        return tokens

    # ---------------- These private methods read lines.

    def _table(self, file: str) -> PromptRows:
        try:
            return read_jsonl(Path(file), file)
        except ValueError as error:
            raise ValueError(f"{self._key}{str(error).removeprefix('data')}") from error

    def _place(self, index: int) -> str:
        table, line = self._places[index]
        return f"{self._key}: {table.place(line)}"

    def _wrong(self, index: int, what: str) -> ValueError:
        return ValueError(f"{self._place(index)}: {what}")

    def _of_line(self, table: PromptRows, index: int, line: Mapping[str, Any]) -> Iterator[Conversation | Completion]:
        """Yield the parts of a line that each become a row."""
        place = f"{self._key}: {table.place(index)}"
        try:
            part = read_line(line, self._config.messages_field, pictures=self._images is not None)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if self._images is not None:
            part = self._illustrated(part, line, place, Path(table.name).parent)
        if isinstance(part, Completion) or self._config.turns == "all":
            yield part
        elif self._config.turns == "each":
            yield from map(part.upto, part.trained)
        else:
            yield part.upto(part.trained[-1])

    def _illustrated(
        self, part: Conversation | Completion, line: Mapping[str, Any], place: str, folder: Path
    ) -> Conversation | Completion:
        """Take the pictures of a line out of its messages and its column. folder: where relative paths begin."""
        images = self._images
        assert images is not None
        column = line.get(images.field or (IMAGES if line.get(IMAGES) is not None else "image"))
        if isinstance(part, Completion):
            if column:
                raise ValueError(f"{place}: got pictures beside texts, expected messages, which have parts for them")
            return part
        for index, message in enumerate(part.messages):
            if message["role"] == "assistant" and _pictures_of(message):
                raise ValueError(f"{place}: message {index} of the assistant has a picture, expected only text")
        base = folder if images.folder is None else Path(images.folder)
        taken = take_pictures(list(part.messages), column, place, folder=base, allow_urls=images.allow_urls)
        assert not isinstance(taken.prompt, str)
        return replace(part, messages=tuple(taken.prompt), pictures=taken.pictures)


def _pictures_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message that are pictures."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in PICTURE_TYPES]


def _expanding(processor: PictureProcessor, prepared: Sequence[Prepared], place: str) -> Callable[[str, bool], str]:
    """Return the function that puts the tokens of pictures into the text of a conversation, or of its beginning."""

    def expand(text: str, whole: bool) -> str:
        shown = prepared if whole else prepared[: text.count(processor.placeholder)]
        return processor.expanded(text, shown, place)

    return expand


def read_line(line: Mapping[str, Any], messages_field: str, *, pictures: bool = False) -> Conversation | Completion:
    """Return the conversation or the text of a line. messages_field: name of the column of messages. pictures: whether
    messages may have some. Raises ValueError if the line has neither, or if a message is not valid."""
    if messages_field in line:
        messages, prompt = _messages(line[messages_field], messages_field, pictures), ()
    elif "prompt" in line and "completion" in line:
        prompt, completion = line["prompt"], line["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise ValueError("`completion` is empty, expected a text to train on")
            return Completion(prompt, completion)
        prompt = _messages(prompt, "prompt", pictures)
        messages = (*prompt, *_messages(completion, "completion", pictures))
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


def _messages(given: Any, column: str, pictures: bool) -> tuple[Mapping[str, Any], ...]:
    """Return checked messages, with an empty text for missing content. column: name of their column. pictures: whether
    messages may have some."""
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
        refused = OTHER_TYPES if pictures else (*PICTURE_TYPES, *OTHER_TYPES)
        if shown := [kind for kind in kinds if kind in refused]:
            expected = "text and pictures" if pictures else "only text while data.images.enabled=false"
            raise ValueError(f"message {index} has a part of type {shown[0]!r}, expected {expected}")
        checked.append({**message, "content": "" if content is None else content})
    return tuple(checked)
