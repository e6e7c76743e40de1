"""Loads rows of prompts from JSONL files and Hugging Face datasets, and chooses the split that validation reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dataplane.imports import MissingExtra
from .config import DataConfig

JSONL_SUFFIXES = (".jsonl", ".ndjson")
HELD_OUT_SPLITS = ("validation", "test")
"""Names of the splits that validation reads when `data.validation_split` is unset, in order of preference."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a file or of one split of a dataset."""

    name: str
    """Path or id of the source."""
    rows: Any
    """Sequence of rows, each a dict from column name to value: a list, or a `datasets.Dataset`."""
    split: str | None = None
    """Name of the split that was read; None when the source has no splits."""

    def __len__(self) -> int:
        return len(self.rows)

    def dicts(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the rows `start` to `stop - 1` as dicts, in one read of the source."""
        part = self.rows[start:stop]
        if isinstance(part, list):
            return part
        names = list(part)  # a dict of columns
        return [dict(zip(names, values, strict=True)) for values in zip(*part.values(), strict=True)]


def load_rows(config: DataConfig, *, validation: bool = False) -> PromptRows:
    """Load all rows of the training source, or of the validation source if `validation` is True.

    Raises ValueError with a one-sentence message when the source cannot be read or does not fit the configuration.
    """
    source = config.source(validation=validation)
    path = Path(source).expanduser()
    if path.suffix in JSONL_SUFFIXES:
        for key in ("validation_subset", "validation_split") if validation else ("subset",):
            if getattr(config, key) is not None:
                raise ValueError(
                    f"data.{key}: got {getattr(config, key)!r}, but {source!r} is a file, expected it unset"
                )
        return PromptRows(source, read_jsonl(path))
    if not path.exists() and (source.startswith(("/", ".", "~")) or source.count("/") != 1):
        raise ValueError(
            f"data: got {source!r}, expected task:NAME, a .jsonl file or a folder that exists, or a hub id"
        )
    if path.is_file():
        raise ValueError(f"data: got file {source!r}, expected one that ends in {' or '.join(JSONL_SUFFIXES)}")
    return _load_split(config, source, path, validation)


def subset_of(config: DataConfig, *, validation: bool) -> str | None:
    """Return the name of the dataset configuration (subset) that training reads; None if none is configured. With
    `validation`, it is that of the validation prompts."""
    if not validation or (config.validation_subset is None and config.source(validation=True) == config.train):
        return config.subset
    return config.validation_subset


def validation_note(config: DataConfig, rows: PromptRows, name: str = "validation") -> str | None:
    """Return a sentence on the prompts that the evaluation `name` reads, if the user should know; else None. The user
    should if the split was chosen automatically, or if the prompts are also trained on."""
    same = config.source(validation=True) == config.train
    if rows.split is not None and config.validation_split is None:
        return f"{name} reads the split {rows.split!r} of {rows.name} (data.validation_split is not set)"
    if same and rows.split in (None, config.split) and config.subset == subset_of(config, validation=True):
        return f"{name} reads the prompts that are trained on, those of {rows.name}"
    return None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object from each line; blank lines are skipped. Raises ValueError if the file cannot be read or a
    line is not a JSON object; the message names the file and the line."""
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


def _load_split(config: DataConfig, source: str, path: Path, validation: bool) -> PromptRows:
    loaded, datasets = _load_dataset(config, source, path, validation)
    if isinstance(loaded, datasets.DatasetDict):
        splits = [str(split) for split in loaded]
        split = _validation_split(config, source, splits) if validation else config.split
        if split not in splits:
            key = "data.validation_split" if validation and config.validation_split else "data.split"
            raise ValueError(f"{key}: {source!r} has no split {split!r}, expected one of {', '.join(splits)}")
        return PromptRows(source, loaded[split], split)
    if not isinstance(loaded, datasets.Dataset):
        raise ValueError(f"data: {source!r} is a {type(loaded).__name__}, expected a dataset with random access")
    if validation and config.validation_split is not None:
        raise ValueError(
            f"data.validation_split: got {config.validation_split!r}, but {source!r} has no splits, expected it unset"
        )
    return PromptRows(source, loaded)


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
        import datasets  # takes seconds to import, and most runs do not need it
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
    except Exception as error:  # builders raise whatever their parsers raise
        reason = " ".join(str(error).split()) or type(error).__name__
        if "Config name is missing" in reason:
            raise ValueError(f"{key}: not set, but {source!r} has several configurations: {reason}") from error
        if subset is not None and "not found" in reason:
            raise ValueError(f"{key}: got {subset!r}, which {source!r} does not have: {reason}") from error
        raise ValueError(f"data: {source!r} cannot be loaded as a dataset: {reason[:300]}") from error
