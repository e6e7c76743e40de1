"""Opens the prompts of a run, one source or a mixture, and orders them as a stream of positions 0, 1, 2, ..."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..engines.chat import text_of
from ..engines.chat_template import apply_chat_template
from ..engines.tokenizer import count_tokens
from ..images.config import IMAGES
from ..images.prompt_pictures import OTHER_TYPES, PICTURE_TYPES, Picture, is_url, parts_of, take_pictures
from ..protocols import Prompt, PromptRow, PromptSource
from .data_config import DataConfig, indexed_fields
from .difficulty import success_rates, wanted_prompts
from .prompt_rows import ReadRow, check_encodable, check_rendered, read_row
from .prompt_sources import (
    ENVIRONMENT,
    PREFIX,
    EnvironmentTasks,
    PromptRows,
    ReasoningGymTasks,
    TaskSource,
    load_rows,
    validation_note,
)

_CHECK_CHUNK = 1000
_CHECK_ENDLESS = 1000
"""Number of prompts of an endless source that the start-up check reads."""
CHECKED_WITH_PICTURES = 2000
"""Number of prompts with pictures that the start-up check reads. Those of a set of 100,000 would take half an hour on a
disk in the network, and 50 GB if they are stored in its rows."""
_READERS = 32
"""Number of threads that read the sizes of pictures. They mostly wait for a disk."""
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"
SOURCE = "data_source"
"""Name of the prompt field that holds the name of the prompt's source."""
AddedTokens = Callable[[Sequence[Picture]], int]
BLOCK = 1000
"""Number of prompts in a block of a mixture; every source has its share of each block."""


def no_tokens(pictures: Sequence[Picture]) -> int:
    """Return 0, for prompts without pictures."""
    return 0


def open_source(config: DataConfig, tokenizer: Any = None, *, seed: int = 0, validation: bool = False) -> PromptSource:
    """Open the source of the training or validation prompts.

    Checks that the source exists, is not empty and has the configured columns, and that its first row fits the
    template. tokenizer: Hugging Face tokenizer, needed when prompts are chat messages. seed: seed of the prompts of a
    generated task. validation: True opens the validation prompts, which for a generated task are its held-out part.
    Raises ValueError with a one-sentence message when a check fails.
    """
    source = config.source(validation=validation)
    if source == ENVIRONMENT:
        return EnvironmentTasks(held_out=validation)
    if source.startswith("task:"):
        task = source.removeprefix("task:")
        return TaskSource(task, held_out=validation, seed=seed, options=config.options)
    if source.startswith(PREFIX):
        name = source.removeprefix(PREFIX)
        return ReasoningGymTasks(name, held_out=validation, seed=seed, options=config.options)
    return TableSource(config, load_rows(config, validation=validation), tokenizer)


class TableSource:
    """PromptSource that makes prompts from the rows of a file or dataset."""

    def __init__(self, config: DataConfig, rows: PromptRows, tokenizer: Any = None) -> None:
        """Check the arguments of the chat template and the first row. Raises ValueError if these do not fit or there
        are no rows."""
        self.name = rows.name
        self.size: int | None = len(rows)
        self.table = rows
        self._config = config
        self._tokenizer = tokenizer
        self._indexed = indexed_fields(config.template)
        self._images = config.images
        path = Path(rows.name)
        self._folder = Path(config.images.folder or (path if path.is_dir() else path.parent))
        if not self.size:
            raise ValueError(f"data: {self.name!r} is empty, expected at least one row")
        self._check_template_arguments()
        for picture in self.row(0).pictures:
            if not is_url(picture.address):  # Paths that begin at another folder than the user thinks are found here.
                picture.read()

    def row(self, index: int) -> PromptRow:
        return self._row(self.table.rows[index], index)

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        """Return the prompts `start` to `stop - 1`."""
        return [self._row(row, index) for index, row in enumerate(self.table.dicts(start, stop), start)]

    def place(self, index: int) -> str:
        """Return the place of a row, for messages."""
        return self.table.place(index)

    def _row(self, row: Mapping[str, Any], index: int) -> PromptRow:
        read = read_row(self._config, row, self.place(index))
        prompt, pictures = self._illustrated(read, index)
        text, messages = self._text(row, prompt, index, len(pictures))
        where = f"data: {self.place(index)}, column {self._config.prompt_field!r}"
        check_encodable(text, where)
        added = len(messages) - (len(prompt) if isinstance(prompt, list) else 1)
        check_rendered(text, messages, self.place(index), added, where)
        others = {name: value for name, value in read.others.items() if not pictures or name != self._column(read)}
        return PromptRow(text, read.answer, others, messages, pictures, self.place(index))

    def _illustrated(self, read: ReadRow, index: int) -> tuple[str | list[Mapping[str, Any]], tuple[Picture, ...]]:
        """Return the prompt of a row without its pictures, and these."""
        images, where = self._images, f"data: {self.place(index)}"
        if not images.enabled:
            for message in read.prompt if isinstance(read.prompt, list) else ():
                content = message.get("content")
                for part in content if isinstance(content, list) else ():
                    if part["type"] in (*PICTURE_TYPES, *OTHER_TYPES):
                        raise ValueError(
                            f"{where}: got a part of type {part['type']!r} while data.images.enabled=false, expected "
                            "only text"
                        )
            return read.prompt, ()
        column = read.others.get(self._column(read))
        taken = take_pictures(read.prompt, column, where, folder=self._folder, allow_urls=images.allow_urls)
        return taken.prompt, taken.pictures

    def _column(self, read: ReadRow) -> str:
        """Return the name of the column of a row that has its pictures, if it has any."""
        return self._images.field or (IMAGES if read.others.get(IMAGES) is not None else "image")

    def _text(
        self, row: Mapping[str, Any], prompt: Any, index: int, num_pictures: int
    ) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """Return the text that the model gets for a prompt, and the chat messages that it was rendered from, if any.

        The text of a prompt, which is that of the user's last message in a chat, is put into `data.template`. A text
        prompt then becomes a user message with `data.chat_template=all`, in which its pictures come first. Chat
        messages are rendered last."""
        if isinstance(prompt, list):
            messages = self._with_system(self._templated(row, prompt, index))
            return self._chat(messages, index), messages
        text = self._formatted(row, prompt, index)
        config = self._config
        if config.chat_template == "all":
            content = parts_of(text, num_pictures) if num_pictures else text
            messages = self._with_system([{"role": "user", "content": content}])
            return self._chat(messages, index), messages
        for key in ("system_prompt", "chat_template_kwargs"):
            if getattr(config, key):
                raise ValueError(
                    f"data.{key}: got {getattr(config, key)!r}, but the prompt of {self.place(index)} is "
                    "text, expected chat messages or data.chat_template=all"
                )
        return text, ()

    def _formatted(self, row: Mapping[str, Any], prompt: str, index: int) -> str:
        values = {**row, "prompt": prompt}
        for name in self._indexed:
            if isinstance(values.get(name), str):
                raise ValueError(
                    f"data.template: {self._config.template!r} takes a character of the column {name!r} of "
                    f"{self.place(index)}, which is text, expected keys of a mapping or a list"
                )
        try:
            return self._config.template.format(**values)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"data.template: {self._config.template!r} does not fit {self.place(index)} "
                f"with columns {', '.join(row)}: {type(error).__name__}: {error}"
            ) from None

    def _templated(self, row: Mapping[str, Any], messages: list[Any], index: int) -> list[Any]:
        """Put the text of the user's last message into `data.template`."""
        if self._config.template == DataConfig.model_fields["template"].default:
            return messages
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise ValueError(
                f"data.template: got {self._config.template!r}, but the chat of {self.place(index)} has no message of "
                "the user, expected one to put into the template"
            )
        last = messages[users[-1]]
        try:
            text = text_of(last.get("content"))
        except ValueError as error:
            raise ValueError(f"data.template: {self.place(index)} needs a message of text: {error}") from error
        changed = {**last, "content": self._formatted(row, text, index)}
        return [*messages[: users[-1]], changed, *messages[users[-1] + 1 :]]

    def _with_system(self, messages: list[Any]) -> tuple[Any, ...]:
        """Put the message of `data.system_prompt` in front of messages that do not begin with one."""
        system = self._config.system_prompt
        if system and not (isinstance(messages[0], Mapping) and messages[0].get("role") == "system"):
            return {"role": "system", "content": system}, *messages
        return tuple(messages)

    def _chat(self, messages: tuple[Any, ...], index: int) -> str:
        if self._tokenizer is None or not self._tokenizer.chat_template:
            what = "data.chat_template is all" if self._config.chat_template == "all" else "the prompt is chat messages"
            raise ValueError(f"data: {self.place(index)}: {what}, but the model's tokenizer has no chat template")
        where = f"data: {self.place(index)}: the chat template"
        text = self._rendered(messages, where)
        empty = tuple({**one, "content": ""} if one.get("content", "") is None else one for one in messages)
        if "None" in text and empty != messages and text.count("None") > self._rendered(empty, where).count("None"):
            raise ValueError(f"{where} writes None for a message without content, expected an empty text as `content`")
        return text

    def _rendered(self, messages: tuple[Any, ...], where: str) -> str:
        arguments = self._config.chat_template_kwargs
        return apply_chat_template(self._tokenizer, messages, arguments, refusal=f"{where} does not take the prompt")

    def _check_template_arguments(self) -> None:
        """Raise ValueError if `data.chat_template_kwargs` has an argument that the chat template would ignore."""
        given = self._config.chat_template_kwargs
        template = str(getattr(self._tokenizer, "chat_template", None) or "")
        for name in given:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ValueError(
                    f"data.chat_template_kwargs: got {name!r}, expected arguments that the model's chat template reads"
                )


class PromptStream:
    """Endless sequence of the prompts of a source, in an order determined by a seed. Every actor finds the same prompt
    at a given position.

    A finite source is read in epochs, each with its own random order if `shuffle` is True. The order of an endless
    source is kept.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        seed: int = 0,
        shuffle: bool = True,
        uid_prefix: str = "",
        rates: np.ndarray | None = None,
    ) -> None:
        """shuffle: True gives each epoch of a finite source its own random order. uid_prefix: prefix of the uids of the
        prompts; streams with different prefixes never share a uid. rates: success rate of each prompt, float64 `[N]`,
        the highest of which come first in each epoch; None for no such order."""
        self._rates = rates
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._uid_prefix = uid_prefix
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __getitem__(self, position: int) -> Prompt:
        """Return the prompt at `position` (0 or more). Its uid is the stream's prefix followed by the position in base
        36."""
        size = self._source.size
        index = position
        if size is not None:
            epoch, index = divmod(position, size)
            if self._shuffle:
                index = int(self._order(epoch)[index])
        row = self._source.row(index)
        uid = self._uid_prefix + base36(position)
        return Prompt(uid, row.text, row.answer, row.fields, row.messages, row.pictures, place=row.place)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        assert self._source.size is not None
        order = np.random.default_rng([self._seed, epoch]).permutation(self._source.size)
        return order if self._rates is None else order[np.argsort(-self._rates[order], kind="stable")]


def row_key(prompt_uid: str, sample: int) -> str:
    """Return the key that identifies a sample's row in the data plane."""
    return f"{prompt_uid}.{sample}"


def base36(number: int) -> str:
    """Return `number` (0 or more) in base 36, with the digits 0-9a-z."""
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _BASE36[digit] + digits
        if not number:
            return digits


class KeptSource:
    """PromptSource that has only some of the rows of another source."""

    def __init__(self, source: PromptSource, kept: np.ndarray) -> None:
        """kept: indices of the rows of `source` to keep, ascending, int64 `[N]`."""
        self.name = source.name
        self.size: int | None = len(kept)
        self._source = source
        self._kept = kept

    def row(self, index: int) -> PromptRow:
        return self._source.row(int(self._kept[index]))

    def place(self, index: int) -> str:
        return place_of(self._source, int(self._kept[index]))

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        return [self.row(index) for index in range(start, stop)]


def place_of(source: PromptSource, index: int) -> str:
    """Return the place of a prompt in its source, for messages."""
    return source.place(index) if isinstance(source, TableSource | KeptSource) else f"prompt {index} of {source.name!r}"


def prompt_lengths(source: PromptSource, tokenizer: Any, added: AddedTokens = no_tokens) -> np.ndarray:
    """Return the number of tokens of each of the source's prompts (the first 1000 of an endless one), int64 `[N]`.
    added: counts the tokens that pictures add to the placeholders in a prompt's text."""
    size = _CHECK_ENDLESS if source.size is None else source.size
    parts = list[np.ndarray]()
    with ThreadPoolExecutor(1 if added is no_tokens else _READERS) as readers:
        for start in range(0, size, _CHECK_CHUNK):
            rows = source.rows(start, min(size, start + _CHECK_CHUNK))
            of_text = count_tokens(tokenizer, [row.text for row in rows], [row.rendered for row in rows])
            parts.append(of_text + np.array([*readers.map(added, [row.pictures for row in rows])], np.int64))
    return np.concatenate(parts)


def check_prompt_lengths(source: PromptSource, tokenizer: Any, max_tokens: int, added: AddedTokens = no_tokens) -> int:
    """Tokenise the source's prompts, the first 1000 of an endless one, and return the longest length in tokens.

    Raises ValueError if prompts have more than `max_tokens` tokens. The message names the first three with their
    lengths, and says how many more there are.
    """
    lengths = prompt_lengths(source, tokenizer, added)
    too_long = np.flatnonzero(lengths > max_tokens)
    if len(too_long):
        named = ", ".join(f"{place_of(source, index)} ({lengths[index]} tokens)" for index in too_long[:3])
        more = f" and {len(too_long) - 3} more" if len(too_long) > 3 else ""
        hint = "" if source.size is None else "; data.overlong_prompts=drop leaves them out"
        raise ValueError(f"data.max_prompt_tokens: got {max_tokens}, but these prompts are longer: {named}{more}{hint}")
    return int(lengths.max())


def checked_part(source: PromptSource, config: DataConfig) -> PromptSource:
    """Return the first prompts of a source, which are checked at the start: all of them, unless they have pictures."""
    if not config.images.enabled or source.size is None or source.size <= CHECKED_WITH_PICTURES:
        return source
    return KeptSource(source, np.arange(CHECKED_WITH_PICTURES))


def without_overlong(
    source: PromptSource, tokenizer: Any, max_tokens: int, added: AddedTokens = no_tokens
) -> tuple[PromptSource, int]:
    """Return the source without its prompts of more than `max_tokens` tokens, and the number of prompts left out.

    Raises ValueError if no prompt is left.
    """
    lengths = prompt_lengths(source, tokenizer, added)
    kept = np.flatnonzero(lengths <= max_tokens)
    if not len(kept):
        raise ValueError(
            f"data.max_prompt_tokens: got {max_tokens}, but all {len(lengths)} prompts of {source.name!r} are longer, "
            f"the shortest has {lengths.min()} tokens"
        )
    return (source if len(kept) == len(lengths) else KeptSource(source, kept)), len(lengths) - len(kept)


class MixedSource:
    """Endless PromptSource that mixes several streams. In each block of BLOCK prompts, a stream has the number of
    prompts that its weight gives, rounded to a whole number, at places drawn from the seed. Each stream is read in its
    own order without gaps. The prompt at an index depends only on the streams, the weights and the seed.
    """

    size = None
    name = "data.mixture"

    def __init__(self, names: Sequence[str], streams: Sequence[PromptStream], weights: Sequence[float], seed: int):
        """names: name of each stream's source. weights: weight of each stream, above 0; only their ratios count.

        Raises ValueError, which names the source, if a weight is so small that its source would have no prompt in a
        block.
        """
        self._names = tuple(names)
        self._streams = tuple(streams)
        self._seed = seed
        self._counts = shares(weights, BLOCK)
        for name, weight, count in zip(names, weights, self._counts, strict=True):
            if not count:
                raise ValueError(
                    f"data.mixture: got weight {weight:g} for {name!r}, expected at least 1/{BLOCK} of the sum of the "
                    "weights"
                )
        self._order = lru_cache(maxsize=4)(self._block)

    def row(self, index: int) -> PromptRow:
        """Return the prompt at `index`. Its field `data_source` is the name of its source, unless the prompt already
        has such a field."""
        block, place = divmod(index, BLOCK)
        parts, before = self._order(block)
        part = int(parts[place])
        prompt = self._streams[part][block * int(self._counts[part]) + int(before[place])]
        fields = {SOURCE: self._names[part], **prompt.fields}
        return PromptRow(prompt.text, prompt.answer, fields, prompt.messages, prompt.pictures, prompt.place)

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        """Return the prompts `start` to `stop - 1`."""
        return [self.row(index) for index in range(start, stop)]

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each place of a block, the index of its stream and the number of earlier places of that stream.
        Both are int64 `[BLOCK]`."""
        parts = np.repeat(np.arange(len(self._counts)), self._counts)
        parts = np.random.default_rng([self._seed, block]).permutation(parts)
        before = np.zeros(BLOCK, dtype=np.int64)
        for part, count in enumerate(self._counts.tolist()):
            before[parts == part] = np.arange(count)
        return parts, before


def shares(weights: Sequence[float], total: int) -> np.ndarray:
    """Divide `total` places by weight with largest remainders, int64 `[number of weights]`, summing to `total`."""
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    rest = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[rest] += 1
    return counts


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A source of prompts that is ready to be read."""

    source: PromptSource
    notes: tuple[str, ...]
    """Sentences for the user about choices made when the source was opened, such as the split that validation reads or
    how many prompts were left out."""
    rates: np.ndarray | None = None
    """Success rate of each prompt, by which each epoch is ordered, float64 `[N]`; None without a curriculum."""


def open_prompts(
    config: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    check_lengths: bool,
    held_out: str | None = None,
    added: AddedTokens = no_tokens,
) -> OpenedSource:
    """Open the training prompts, or those of one evaluation. With `data.overlong_prompts=drop`, prompts of a finite
    source that are too long are left out.

    held_out: name of the evaluation whose prompts are opened; `config` has its data as validation data; None opens the
    training prompts. check_lengths: True makes prompts that are too long an error, unless they were left out. added:
    see `prompt_lengths`. Raises ValueError with a one-sentence message if the source cannot be opened or its prompts do
    not fit.
    """
    parts = config.parts(validation=held_out is not None)
    checks = {"check_lengths": check_lengths, "added": added}
    opened = [_open_part(part, tokenizer, seed=seed, held_out=held_out, **checks) for part in parts]
    if parts == [config]:
        return opened[0]
    streams = [PromptStream(one.source, seed=seed, shuffle=held_out is None, rates=one.rates) for one in opened]
    weights = [part.weight for part in config.mixture]
    mixed = MixedSource([one.source.name for one in opened], streams, weights, seed)
    return OpenedSource(mixed, tuple(note for one in opened for note in one.notes))


def _open_part(
    config: DataConfig, tokenizer: Any, *, seed: int, check_lengths: bool, held_out: str | None, added: AddedTokens
) -> OpenedSource:
    """Open one source; see `open_prompts`."""
    notes = list[str]()
    source = open_source(config, tokenizer, seed=seed, validation=held_out is not None)
    if held_out is not None and isinstance(source, TableSource):
        note = validation_note(config, source.table, held_out)
        notes += [note] if note else []
    if config.overlong_prompts == "drop" and source.size is not None:
        whole = source.size
        source, dropped = without_overlong(source, tokenizer, config.max_prompt_tokens, added)
        if dropped:
            notes.append(
                f"{dropped} of {whole} {held_out or 'training'} prompts of {source.name} are left out, as they have "
                f"more than data.max_prompt_tokens={config.max_prompt_tokens} tokens"
            )
    elif check_lengths:
        part = checked_part(source, config)
        check_prompt_lengths(part, tokenizer, config.max_prompt_tokens, added)
        if part is not source:
            notes.append(
                f"data.max_prompt_tokens: only the first {part.size} of {source.size} {held_out or 'training'} prompts "
                f"of {source.name} were checked, because they have pictures; one that is too long fails when it comes"
            )
    if config.success_field is None or held_out is not None or source.size is None:
        return OpenedSource(source, tuple(notes))
    source, rates, dropped = by_success(source, config)
    if dropped:
        low, high = config.success_range
        notes.append(
            f"{dropped} of {dropped + len(rates)} training prompts of {source.name} are left out, as their success "
            f"rates are not in data.success_range=[{low:g}, {high:g}]"
        )
    return OpenedSource(source, tuple(notes), rates if config.curriculum == "easy_first" else None)


def by_success(source: PromptSource, config: DataConfig) -> tuple[PromptSource, np.ndarray, int]:
    """Return the prompts of a finite source in `data.success_range`, their rates, and the number of prompts left out.
    Raises what `success_rates` and `wanted_prompts` raise."""
    rates = success_rates(source, config, partial(place_of, source))
    kept = wanted_prompts(rates, config, source.name)
    chosen = source if len(kept) == len(rates) else KeptSource(source, kept)
    return chosen, rates[kept], len(rates) - len(kept)
