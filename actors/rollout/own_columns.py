"""Puts the user's own columns into rows: numbers that come with the prompts, or that the environment set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...codecs.batch import Column, Jagged
from ...codecs.gather import exclusive_cumsum
from ..columns import ColumnConfig
from ..protocols import PromptSource, Sample, Score

_CHECKED = 1000
"""Number of prompts whose columns are checked before a run."""


def check_columns(source: PromptSource, columns: Sequence[ColumnConfig]) -> None:
    """Check that the first prompts of a source have the `per_sample` columns, for a run whose environment sets none.

    Raises ValueError, which names the prompt and the column, if one has not.
    """
    wanted = [column for column in columns if column.kind == "per_sample"]
    if not wanted:
        return
    for index in range(_CHECKED if source.size is None else min(source.size, _CHECKED)):
        fields = source.row(index).fields
        for column in wanted:
            if column.name not in fields and column.default is None:
                raise ValueError(
                    f"data.columns: row {index} of {source.name!r} has no column {column.name!r}, which has no "
                    f"default; the row has {', '.join(fields) or 'no other columns'}"
                )
            if column.name in fields:
                _number(column, fields[column.name])


def checked_scores(columns: Sequence[ColumnConfig], samples: Sequence[Sample], scores: Sequence[Score]) -> list[Score]:
    """Return the scores, those of samples that have no fitting number for a `per_sample` column as failed."""
    checked = []
    for sample, score in zip(samples, scores, strict=True):
        if score.valid:
            try:
                for column in columns:
                    sample_number(column, sample)
            except ValueError as error:
                text = f"prompt {sample.prompt.uid!r}: {error}"
                score = replace(score, reward=0.0, components={}, valid=False, error=text)
        checked.append(score)
    return checked


def sample_number(column: ColumnConfig, sample: Sample) -> float:
    """Return a sample's number for a `per_sample` column: the environment's, else the prompt's, else the default.
    Raises ValueError if it has none. For a `per_token` column it is the default, or 0."""
    if column.kind == "per_token":
        return column.default or 0.0
    for place in (sample.columns, sample.prompt.fields):
        if column.name in place:
            return _number(column, place[column.name])
    if column.default is None:
        raise ValueError(
            f"data.columns: column {column.name!r} has no default, and neither the prompt nor the environment gave a "
            "number"
        )
    return column.default


def own_columns(
    columns: Sequence[ColumnConfig],
    samples: Sequence[Sample],
    scores: Sequence[Score],
    lengths: np.ndarray,
    max_rows: int,
) -> dict[str, Column]:
    """Return the user's columns of the rows of `samples`, `max_rows` for each, by name. Rows of failed samples have 0.

    scores: those of `checked_scores`. lengths: number of tokens of each row, int64 `[N]`.
    """
    starts = exclusive_cumsum(lengths)
    made: dict[str, Column] = {}
    for column in columns:
        numbers = [sample_number(column, s) if score.valid else 0 for s, score in zip(samples, scores, strict=True)]
        values = np.repeat(np.array(numbers).astype(column.dtype), max_rows)
        if column.kind == "per_sample":
            made[column.name] = torch.from_numpy(values)
            continue
        tokens = np.repeat(values, lengths)
        for index, sample in enumerate(samples):
            for part in sample.token_values:
                if part.name == column.name and part.row < len(sample.rows):
                    start = starts[index * max_rows + part.row] + part.start
                    tokens[start : start + len(part.values)] = part.values
        made[column.name] = Jagged(torch.from_numpy(tokens), lengths)
    return made


def _number(column: ColumnConfig, value: Any) -> float:
    """Return one number. Raises ValueError if `value` is not one."""
    numbers = column.numbers(value)
    if numbers.ndim:
        raise ValueError(f"data.columns: column {column.name!r} got {value!r}, expected one number")
    return numbers.item()
