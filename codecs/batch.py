"""A batch in memory: rows x fields, one contiguous column a field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .schema import Schema


@dataclass(frozen=True, slots=True)
class Jagged:
    """A PER_TOKEN column."""

    values: torch.Tensor
    """`[sum(lengths), *trailing]`, contiguous, CPU, no grad: the rows one after another, nothing padded."""
    lengths: np.ndarray
    """int64 `[N]`: tokens of each row."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """A RAGGED column."""

    values: torch.Tensor
    """`[sum(prod(shape))]`, contiguous, CPU, no grad: the rows' elements one after another, row-major."""
    shapes: np.ndarray
    """int64 `[N, ndim]`."""


Column = Jagged | Ragged | torch.Tensor | list[Any]
"""PER_TOKEN: Jagged; RAGGED: Ragged; PER_SAMPLE: Tensor `[N, *trailing]`, contiguous; OBJECT: list of N."""


class Batch(Mapping[str, Column]):
    """Immutable columns that agree with `schema` and in their number of rows.

    Build one with `headrace.codecs.jagged.pack`, which checks and converts what users hold.
    """

    __slots__ = ("schema", "num_rows", "_columns")

    def __init__(self, schema: Schema, num_rows: int, columns: Mapping[str, Column]) -> None:
        assert set(schema) == set(columns), (list(schema), list(columns))
        self.schema = schema
        self.num_rows = num_rows
        self._columns = {name: columns[name] for name in schema}

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of fields (it is a mapping); rows are `num_rows`."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Batch({self.num_rows} rows, fields {list(self._columns)})"

    def jagged(self, name: str) -> Jagged:
        """The PER_TOKEN column `name`. Raises TypeError for another kind."""
        return self._typed(name, Jagged)

    def tensor(self, name: str) -> torch.Tensor:
        """The PER_SAMPLE column `name`. Raises TypeError for another kind."""
        return self._typed(name, torch.Tensor)

    def ragged(self, name: str) -> Ragged:
        """The RAGGED column `name`. Raises TypeError for another kind."""
        return self._typed(name, Ragged)

    def objects(self, name: str) -> list[Any]:
        """The OBJECT column `name`. Raises TypeError for another kind."""
        return self._typed(name, list)

    def _typed(self, name: str, kind: type) -> Any:
        column = self._columns[name]
        if not isinstance(column, kind):
            raise TypeError(f"field {name!r} is {self.schema[name].kind.value}, not what {kind.__name__} holds")
        return column

    @property
    def lengths(self) -> np.ndarray | None:
        """int64 `[N]`: tokens of each row; None when the batch has no PER_TOKEN field."""
        for column in self._columns.values():
            if isinstance(column, Jagged):
                return column.lengths
        return None

    def subset(self, names: Iterable[str]) -> Batch:
        """The named columns, in the order given; nothing is copied. Raises KeyError naming an unknown field."""
        schema = self.schema.subset(names)
        return Batch(schema, self.num_rows, {name: self._columns[name] for name in schema})

    def merge(self, other: Batch) -> Batch:
        """These columns and `other`'s, of the same rows; nothing is copied. No field may stand in both."""
        if self.num_rows != other.num_rows:
            raise ValueError(f"merge: got batches of {self.num_rows} and {other.num_rows} rows, expected equal numbers")
        schema = Schema([*self.schema.values(), *other.schema.values()])
        return Batch(schema, self.num_rows, {**self._columns, **other._columns})
