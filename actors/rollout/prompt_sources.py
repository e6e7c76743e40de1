"""Reads rows of prompts from files and Hugging Face datasets, and generates prompts of tasks from a seed.

A built-in task has a training part and a held-out part, which never share a prompt: a prompt is held out when the hash
of its text falls into the first of ten buckets. Both parts are endless, and prompt i is a function of (seed, part, i).
The library reasoning-gym has more tasks, each with its own scorer.
"""

from __future__ import annotations

import difflib
import importlib
import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dataplane.imports import MissingExtra
from ..protocols import PromptRow
from .data_config import JSONL_SUFFIXES, DataConfig

HELD_OUT_SPLITS = ("validation", "test")
"""Names of the splits that validation reads when `data.validation_split` is unset, in order of preference."""
_HELD_OUT_BUCKETS = 10
_TRIES = 10_000
ENVIRONMENT = "environment"
"""Value of `data.train` for prompts that are the numbers of the environment's own tasks."""
PREFIX = "reasoning-gym:"
"""Prefix of sources that are data sets of reasoning-gym, such as `reasoning-gym:chain_sum`."""
_ENDLESS = 10**9
_HELD_OUT_SEED = 1_000_003
"""Number that is added to the seed for the held-out part, so that its tasks differ from the training tasks."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a file or of one split of a dataset."""

    name: str
    """Path or id of the source."""
    rows: Any
    """Sequence of rows, each a dict from column name to value: a list, or a `datasets.Dataset`."""
    split: str | None = None
    """Name of the split that was read; None when the source has no splits."""
    lines: Sequence[int] = ()
    """Line of each row in its file, counted from 1; () for a dataset."""
    digest: str = ""
    """Digest of the file's text; "" for a dataset."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        """Return the place of a row in the source, which is its line in a file or its index in a dataset."""
        place = f"line {self.lines[index]}" if self.lines else f"row {index} (counted from 0)"
        return f"{place} of {self.name!r}"

    def dicts(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the rows `start` to `stop - 1` as dicts, in one read of the source."""
        part = self.rows[start:stop]
        if isinstance(part, list):
            return part
        names = list(part)  # Here `part` is a dict of columns.
        return [dict(zip(names, values, strict=True)) for values in zip(*part.values(), strict=True)]


def load_rows(config: DataConfig, *, validation: bool = False) -> PromptRows:
    """Load all rows of the training source, or of the validation source if `validation` is True.

    Raises ValueError with a one-sentence message when the source cannot be read or does not fit the configuration.
    """
    source = config.source(validation=validation)
    path = Path(source)
    if path.suffix in JSONL_SUFFIXES:
        for key in ("validation_subset", "validation_split") if validation else ("subset",):
            if getattr(config, key) is not None:
                raise ValueError(
                    f"data.{key}: got {getattr(config, key)!r}, but {source!r} is a file, expected it unset"
                )
        return read_jsonl(path, source)
    if not path.exists() and (source.startswith(("/", ".", "~")) or source.count("/") != 1):
        raise ValueError(
            f"data: got {source!r}, expected task:NAME, a .jsonl file or a folder that exists, or a hub id"
        )
    if path.is_file():
        raise ValueError(f"data: got file {source!r}, expected one that ends in {' or '.join(JSONL_SUFFIXES)}")
    return _load_split(config, source, path, validation)


def subset_of(config: DataConfig, *, validation: bool) -> str | None:
    """Return the name of the dataset configuration (subset) that training reads; None if none is configured. If
    `validation` is True, return that of the validation prompts."""
    if not validation or (config.validation_subset is None and config.source(validation=True) == config.train):
        return config.subset
    return config.validation_subset


def validation_note(config: DataConfig, rows: PromptRows, name: str = "validation") -> str | None:
    """Return a note for the user on the prompts that the evaluation `name` reads, or None. There is a note if the split
    was chosen automatically, or if the prompts are also trained on."""
    if rows.split is not None and config.validation_split is None:
        return f"{name} reads the split {rows.split!r} of {rows.name} (data.validation_split is not set)"
    subset = subset_of(config, validation=True)
    trained = [(config.train, config.split, config.subset)]
    trained += [(part.source, part.split or config.split, part.subset) for part in config.mixture]
    for source, split, own in trained:
        if _is_same(source, rows.name):
            if rows.split in (None, split) and subset == own:
                return f"{name} reads the prompts that are trained on, those of {rows.name}"
        elif rows.digest and _digest_if_like(source, rows.name) == rows.digest:
            return f"{name} reads a copy of the prompts that are trained on: {rows.name} is equal to {source}"
    return None


def _is_same(source: str, other: str) -> bool:
    """Return whether two sources are the same, even if their paths are written differently."""
    if source == other:
        return True
    paths = [Path(one).expanduser() for one in (source, other)]
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _digest_if_like(source: str, other: str) -> str | None:
    """Return the digest of the file `source`; None if it is no file of the size of the file `other`."""
    path = Path(source)
    if path.suffix not in JSONL_SUFFIXES or not path.is_file() or path.stat().st_size != Path(other).stat().st_size:
        return None
    return _digest(path.read_text(encoding="utf-8-sig", errors="replace"))


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def read_jsonl(path: Path, name: str) -> PromptRows:
    """Read one JSON object from each line; blank lines are skipped. name: name of the source, for errors. Raises
    ValueError if the file cannot be read or a line is not a JSON object; the message names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Some editors begin a file with a byte-order mark.
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data: {name!r} cannot be read: {error}") from error
    rows, lines = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"data: line {number} of {name!r} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"data: line {number} of {name!r} is a {type(row).__name__}, expected an object")
        rows.append(row)
        lines.append(number)
    return PromptRows(name, rows, lines=lines, digest=_digest(text))


def _load_split(config: DataConfig, source: str, path: Path, validation: bool) -> PromptRows:
    loaded, datasets = _load_dataset(config, source, path, validation)
    if isinstance(loaded, datasets.DatasetDict):
        splits = [str(split) for split in loaded]
        split = _validation_split(config, source, splits) if validation else config.split
        if split not in splits:
            key = "data.validation_split" if validation and config.validation_split else "data.split"
            raise ValueError(f"{key}: {source!r} has no split {split!r}, expected one of {', '.join(splits)}")
        return PromptRows(source, _EncodedRows(loaded[split]) if config.images.enabled else loaded[split], split)
    if not isinstance(loaded, datasets.Dataset):
        raise ValueError(f"data: {source!r} is a {type(loaded).__name__}, expected a dataset with random access")
    if validation and config.validation_split is not None:
        raise ValueError(
            f"data.validation_split: got {config.validation_split!r}, but {source!r} has no splits, expected it unset"
        )
    return PromptRows(source, _EncodedRows(loaded) if config.images.enabled else loaded)


class _EncodedRows:
    """The rows of a dataset with pictures as the content of their files, as the dataset stores them.

    `datasets` would decode all pictures of the rows that it reads, also those of which only the text is wanted.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        found = self._rows[index].to_pylist()
        return found if isinstance(index, slice) else found[0]


def _validation_split(config: DataConfig, source: str, splits: Sequence[str]) -> str:
    """Return the name of the split that validation reads. It is the configured one; else `validation` or `test`; else,
    for a dataset that training does not read, its only split or the one named by `data.split`.

    Raises ValueError if training reads the dataset and neither `validation` nor `test` is left for validation.
    """
    if config.validation_split is not None:
        return config.validation_split
    trained = source == config.train and subset_of(config, validation=True) == config.subset
    free = [split for split in splits if not (trained and split == config.split)]
    for split in HELD_OUT_SPLITS:
        if split in free:
            return split
    if trained:
        raise ValueError(
            f"data.validation_split: not set, and {source!r}, which is also data.train, has no split "
            f"{' or '.join(HELD_OUT_SPLITS)} beside the one that is trained on, expected one of {', '.join(splits)}"
        )
    return splits[0] if len(splits) == 1 else config.split


def _load_dataset(config: DataConfig, source: str, path: Path, validation: bool) -> tuple[Any, Any]:
    """Load the dataset `source`, and return it together with the imported module `datasets`."""
    try:
        import datasets  # This import takes seconds, and most runs do not need it.
    except ModuleNotFoundError:
        raise MissingExtra("datasets", f"data: the dataset {source!r}", "datasets") from None
    subset = subset_of(config, validation=validation)
    key = "data.validation_subset" if validation and source != config.train else "data.subset"
    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if saved and subset is not None:
        raise ValueError(f"{key}: got {subset!r}, but {source!r} has no configurations, expected it unset")
    try:
        if saved:
            return datasets.load_from_disk(str(path)), datasets
        return datasets.load_dataset(str(path) if path.is_dir() else source, subset), datasets
    except Exception as error:  # Dataset builders raise any error of their parsers.
        reason = " ".join(str(error).split()) or type(error).__name__
        if "Config name is missing" in reason:
            raise ValueError(f"{key}: not set, but {source!r} has several configurations: {reason}") from error
        if subset is not None and "not found" in reason:
            raise ValueError(f"{key}: got {subset!r}, which {source!r} does not have: {reason}") from error
        raise ValueError(f"data: {source!r} cannot be loaded as a dataset: {reason[:300]}") from error


def reverse(rng: random.Random, *, min_digits: int = 3, max_digits: int = 8) -> PromptRow:
    """Make a prompt like `r48213=` with answer `31284`. Lengths from min_digits to max_digits are equally likely."""
    digits = "".join(rng.choices("0123456789", k=rng.randint(min_digits, max_digits)))
    return PromptRow(f"r{digits}=", digits[::-1], {"num_digits": len(digits)})


def arithmetic(rng: random.Random, *, min_digits: int = 1, max_digits: int = 2) -> PromptRow:
    """Make a prompt like `12+30=` with answer `42`. The two numbers have no leading zeros, and their lengths from
    min_digits to max_digits are equally likely."""
    left, right = (_number(rng, rng.randint(min_digits, max_digits)) for _ in range(2))
    return PromptRow(f"{left}+{right}=", str(left + right), {"left": left, "right": right})


def _number(rng: random.Random, num_digits: int) -> int:
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


TASKS: dict[str, Callable[..., PromptRow]] = {"reverse": reverse, "arithmetic": arithmetic}


def is_held_out(text: str) -> bool:
    """Return whether a prompt belongs to the held-out part of its task. The answer does not depend on the seed."""
    return zlib.crc32(text.encode()) % _HELD_OUT_BUCKETS == 0


class EnvironmentTasks:
    """PromptSource of an environment with its own tasks: prompt i is the number of a task.

    Every tenth task is held out for validation. The number is the prompt's field `task` and also its text.
    """

    size = None
    name = ENVIRONMENT

    def __init__(self, *, held_out: bool) -> None:
        self._held_out = held_out

    def row(self, index: int) -> PromptRow:
        """Return the prompt at `index` of the part (training or held-out) that this source reads."""
        ninths, rest = divmod(index, _HELD_OUT_BUCKETS - 1)
        last = _HELD_OUT_BUCKETS - 1
        number = _HELD_OUT_BUCKETS * index + last if self._held_out else _HELD_OUT_BUCKETS * ninths + rest
        return PromptRow(str(number), "", {"task": number})

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        """Return the prompts `start` to `stop - 1`."""
        return [self.row(index) for index in range(start, stop)]


class TaskSource:
    """PromptSource that generates the prompts of a built-in task, without end."""

    size = None

    def __init__(self, task: str, *, held_out: bool, seed: int = 0, options: Mapping[str, Any] | None = None) -> None:
        """options: the task's options, `min_digits` and `max_digits`. Raises ValueError with a one-sentence message for
        an unknown task, or for an option that is unknown or does not fit."""
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data: there is no built-in task {task!r}, expected one of {', '.join(TASKS)}{hint}")
        self.name = f"task:{task}"
        self._make = TASKS[task]
        self._held_out = held_out
        self._seed = seed
        self._options = _checked_options(task, dict(options or {}))
        self.row(0)  # This call raises an error now if the options leave this part without prompts.

    def row(self, index: int) -> PromptRow:
        """Return the prompt at `index` of the part (training or held-out) that this source reads."""
        part = "held_out" if self._held_out else "train"
        rng = random.Random(f"{self._seed}/{part}/{index}")
        for _ in range(_TRIES):
            row = self._make(rng, **self._options)
            if is_held_out(row.text) == self._held_out:
                return row
        raise ValueError(f"data.options: {self._options} leave {self.name} no {part} prompts, expected a wider range")

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        """Return the prompts `start` to `stop - 1`."""
        return [self.row(index) for index in range(start, stop)]


def _checked_options(task: str, options: dict[str, Any]) -> dict[str, int]:
    defaults: dict[str, int] = TASKS[task].__kwdefaults__ or {}
    for name, value in options.items():
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data.options: task {task!r} has no {name!r}, expected {', '.join(defaults)}{hint}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"data.options.{name}: got {value!r}, expected a whole number of at least 1")
    merged = {**defaults, **options}
    if merged["min_digits"] > merged["max_digits"]:
        raise ValueError(
            f"data.options: got min_digits={merged['min_digits']}, expected at most max_digits={merged['max_digits']}"
        )
    return merged


class ReasoningGymTasks:
    """PromptSource of one data set of reasoning-gym, endless; prompt i is a function of (seed, part, i).

    The held-out part has another seed. Tasks of small data sets may therefore be in both parts.
    """

    size = None

    def __init__(
        self, dataset: str, *, held_out: bool, seed: int = 0, options: Mapping[str, Any] | None = None
    ) -> None:
        """dataset: name of the data set. options: its configuration. Raises ValueError with a one-sentence message for
        an unknown data set or options that do not fit, and MissingExtra if the library is not installed."""
        self.name = PREFIX + dataset
        gym = _library(self.name)
        known = list(gym.factory.DATASETS)
        if dataset not in known:
            near = difflib.get_close_matches(dataset, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data: reasoning-gym has no data set {dataset!r}{hint}")
        try:
            self._tasks = gym.create_dataset(
                dataset, seed=seed + _HELD_OUT_SEED * held_out, size=_ENDLESS, **dict(options or {})
            )
            self.row(0)
        except Exception as error:  # The data set's configuration raises AssertionError and TypeError.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"data.options: {dict(options or {})} do not fit {self.name}: {reason}") from error

    def row(self, index: int) -> PromptRow:
        """Return the task at `index`, with its metadata as fields."""
        entry = self._tasks[index]
        return PromptRow(entry["question"], entry["answer"] or "", dict(entry["metadata"]))

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        """Return the tasks `start` to `stop - 1`."""
        return [self.row(index) for index in range(start, stop)]


def _library(what: str) -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "reasoning_gym", f"data: {what}", "reasoning-gym") from None
