"""Where prompts come from, and the run's prompt stream: position 0, 1, 2, ... -> Prompt."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...codecs.imports import MissingExtra
from ..engines.tokenizer import encode_prompts
from ..protocols import Prompt, PromptRow, PromptSource
from .config import DataConfig
from .tasks import TaskSource

_CHECK_CHUNK = 1000
_CHECK_ENDLESS = 1000
"""Prompts of an endless source that the start-up check looks at."""
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"


def open_source(config: DataConfig, tokenizer: Any = None, *, seed: int = 0, validation: bool = False) -> PromptSource:
    """The source of training or validation prompts, checked: it exists, is not empty, has the columns, and its first
    row fits the template.

    tokenizer: Hugging Face tokenizer, needed when prompts are chat messages. seed: of a generated task's prompts. A
    generated task has its validation prompts in its held-out part. Raises ValueError in one sentence.
    """
    source = (config.validation if validation else None) or config.train
    if source.startswith("task:"):
        task = source.removeprefix("task:")
        return TaskSource(task, held_out=validation, seed=seed, options=config.options)
    return TableSource(config, source, load_rows(source, config.split), tokenizer)


class TableSource:
    """Rows of a file or dataset as prompts."""

    def __init__(self, config: DataConfig, name: str, rows: Any, tokenizer: Any = None) -> None:
        """name: of the source, for errors. rows: a sequence of dicts (a list, or a `datasets.Dataset`)."""
        self.name = name
        self.size: int | None = len(rows)
        self._config = config
        self._rows = rows
        self._tokenizer = tokenizer
        if not self.size:
            raise ValueError(f"data: {self.name!r} is empty, expected at least one row")
        self.row(0)

    def row(self, index: int) -> PromptRow:
        config = self._config
        row = self._rows[index]
        prompt = self._column(row, config.prompt_field, "data.prompt_field", index)
        answer = self._column(row, config.answer_field, "data.answer_field", index) if config.answer_field else ""
        others = {name: value for name, value in row.items() if name not in (config.prompt_field, config.answer_field)}
        return PromptRow(self._text(row, prompt, index), self._answer(answer, index), others)

    def _column(self, row: Mapping[str, Any], name: str, key: str, index: int) -> Any:
        if name not in row:
            near = difflib.get_close_matches(name, row, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{key}: row {index} of {self.name!r} has no column {name!r}, it has {', '.join(row)}{hint}"
            )
        return row[name]

    def _text(self, row: Mapping[str, Any], prompt: Any, index: int) -> str:
        if isinstance(prompt, list):
            prompt = self._chat(prompt, index)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(
                f"{self.name!r} row {index}: the prompt is {prompt!r}, expected text or a list of chat messages"
            )
        try:
            return self._config.template.format(**{**row, "prompt": prompt})
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"data.template: {self._config.template!r} does not fit row {index} of {self.name!r} "
                f"with columns {', '.join(row)}: {type(error).__name__}: {error}"
            ) from None

    def _chat(self, messages: list[Any], index: int) -> str:
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise ValueError(
                f"{self.name!r} row {index}: the prompt is a list of chat messages, but the model's tokenizer has no "
                "chat template"
            )
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of their own and raise what they like
            raise ValueError(
                f"{self.name!r} row {index}: the chat template does not take the prompt: {error}"
            ) from error

    def _answer(self, answer: Any, index: int) -> str:
        if answer is None:
            return ""
        if isinstance(answer, (str, int, float)):
            return str(answer)
        raise ValueError(
            f"{self.name!r} row {index}: the answer is a {type(answer).__name__}, expected text or a number"
        )


class PromptStream:
    """A source as an endless, seeded sequence: every actor maps the same position to the same prompt.

    Finite sources are gone through epoch by epoch, each epoch in an order of its own; endless ones as they come.
    """

    def __init__(self, source: PromptSource, *, seed: int = 0, shuffle: bool = True, uid_prefix: str = "") -> None:
        """shuffle: False goes through a finite source in its own order. uid_prefix: keeps two streams' uids apart."""
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._uid_prefix = uid_prefix
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __getitem__(self, position: int) -> Prompt:
        """The prompt at `position` (0 or more); its uid is the position in base 36."""
        size = self._source.size
        index = position
        if size is not None:
            epoch, index = divmod(position, size)
            if self._shuffle:
                index = int(self._order(epoch)[index])
        row = self._source.row(index)
        return Prompt(self._uid_prefix + base36(position), row.text, row.answer, row.fields)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        assert self._source.size is not None
        return np.random.default_rng([self._seed, epoch]).permutation(self._source.size)


def row_key(prompt_uid: str, sample: int) -> str:
    """Return the key of one sample's row."""
    return f"{prompt_uid}.{sample}"


def base36(number: int) -> str:
    """`number` (0 or more) in digits 0-9a-z."""
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _BASE36[digit] + digits
        if not number:
            return digits


def check_prompt_lengths(source: PromptSource, tokenizer: Any, max_tokens: int) -> int:
    """Tokenise the source's prompts (the first 1000 of an endless one); returns the longest in tokens.

    Raises ValueError naming the first prompts above `max_tokens` with their lengths, and how many there are.
    """
    size = _CHECK_ENDLESS if source.size is None else source.size
    longest, too_long = 0, []
    for start in range(0, size, _CHECK_CHUNK):
        texts = [source.row(index).text for index in range(start, min(size, start + _CHECK_CHUNK))]
        for index, ids in enumerate(encode_prompts(tokenizer, texts), start):
            longest = max(longest, len(ids))
            if len(ids) > max_tokens:
                too_long.append(f"row {index} ({len(ids)} tokens)")
    if too_long:
        more = f" and {len(too_long) - 3} more" if len(too_long) > 3 else ""
        raise ValueError(
            f"data.max_prompt_tokens: got {max_tokens}, but prompts of {source.name!r} are longer: "
            f"{', '.join(too_long[:3])}{more}"
        )
    return longest


# ---------------- Rows of prompt files: JSONL, Hugging Face datasets on disk or on the hub.

JSONL_SUFFIXES = (".jsonl", ".ndjson")


def load_rows(source: str, split: str) -> Sequence[dict[str, Any]]:
    """All rows of `source`, as dicts by column.

    source: a .jsonl file, a folder (`save_to_disk`, or data files that `datasets` reads), or a hub id.
    split: of a dataset; a JSONL file has none. Raises ValueError in one sentence.
    """
    path = Path(source).expanduser()
    if path.suffix in JSONL_SUFFIXES:
        return read_jsonl(path)
    if not path.exists() and (source.startswith(("/", ".", "~")) or source.count("/") != 1):
        raise ValueError(
            f"data: got {source!r}, expected task:NAME, a .jsonl file or a folder that exists, or a hub id"
        )
    if path.is_file():
        raise ValueError(f"data: got file {source!r}, expected one that ends in {' or '.join(JSONL_SUFFIXES)}")
    return _load_dataset(source, path, split)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line; blank lines are skipped. Raises ValueError naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data: {str(path)!r} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data: line {number} of {str(path)!r} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"data: line {number} of {str(path)!r} is a {type(row).__name__}, expected an object")
        rows.append(row)
    return rows


def _load_dataset(source: str, path: Path, split: str) -> Any:
    try:
        import datasets  # seconds to import, and most runs need none
    except ModuleNotFoundError:
        raise MissingExtra("datasets", f"data: the dataset {source!r}", "datasets") from None
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.is_dir() else source)
    except Exception as error:  # builders raise whatever their parsers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"data: {source!r} cannot be loaded as a dataset: {reason}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ValueError(
                f"data.split: {source!r} has no split {split!r}, expected one of {', '.join(map(str, loaded))}"
            )
        return loaded[split]
    if not isinstance(loaded, datasets.Dataset):
        raise ValueError(f"data: {source!r} is a {type(loaded).__name__}, expected a dataset with random access")
    return loaded
