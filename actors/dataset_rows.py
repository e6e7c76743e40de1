"""Rows of prompt files: JSONL, Hugging Face datasets on disk or on the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    import datasets  # seconds to import, and most runs need none

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
