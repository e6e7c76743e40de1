"""User-defined numeric columns, from prompts or environments to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import field_validator

from ..dataplane.config import Section


class ColumnConfig(Section):
    """A column of numbers that accompanies a row's tokens. A loss of your own can read it."""

    name: str
    """Name of the column."""
    kind: Literal["per_sample", "per_token"] = "per_sample"
    """Shape of the column. `per_sample`: one number per row, from the data set's column of the same name or from the
    environment, which can set it for its episode. `per_token`: one number per token. The environment sets these numbers
    for turns of the policy."""
    dtype: Literal["float32", "int32", "int64"] = "float32"
    """Type of the numbers."""
    default: float | None = None
    """Number used for rows or tokens without one. If it is unset, a row without a number in a `per_sample` column is
    not trained on and counts as failed, and a token without one in a `per_token` column gets 0."""

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not name.isidentifier():
            raise ValueError(f"got {name!r}, expected a name of letters, digits and _")
        return name

    def numbers(self, value: Any) -> np.ndarray:
        """Return `value`, a number or a sequence of numbers, as an array of the column's dtype. Raises ValueError if
        `value` is something else, is not finite, or does not fit the dtype."""
        wrong = f"data.columns: column {self.name!r} got {value!r}, expected {self.dtype} numbers"
        try:
            given = np.asarray(value)
            if given.dtype.kind not in "biuf" or not np.isfinite(given).all():
                raise ValueError(wrong)
            with np.errstate(over="ignore", invalid="ignore"):  # Values that do not fit are refused below.
                numbers = given.astype(self.dtype)
        except (TypeError, OverflowError):
            raise ValueError(wrong) from None
        if self.dtype != "float32" and not np.array_equal(numbers, given):
            raise ValueError(wrong)
        if not np.isfinite(numbers).all():  # Some numbers exceed the largest float32.
            raise ValueError(wrong)
        return numbers


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Numbers that an environment gave to the tokens of one turn, for a `per_token` column."""

    name: str
    """Name of the column."""
    row: int
    """Index of the turn's row among the rows of its episode."""
    start: int
    """Index of the turn's first token in its row."""
    values: np.ndarray
    """Numbers of the turn's tokens, `[n]`."""


def column_named(columns: Sequence[ColumnConfig], name: str) -> ColumnConfig:
    """Return the column `name`. Raises ValueError, which lists the columns, if there is no such column."""
    for column in columns:
        if column.name == name:
            return column
    known = ", ".join(column.name for column in columns) or "no columns"
    raise ValueError(f"data.columns: there is no column {name!r}; the run has {known}")


def made_up(column: ColumnConfig, count: int) -> np.ndarray:
    """Return `count` numbers of the column's dtype, alternately 0 and 1, for trying out a loss without rows."""
    return (np.arange(count) % 2).astype(column.dtype)
