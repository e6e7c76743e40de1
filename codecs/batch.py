"""Defines a batch in memory: rows x fields, with one contiguous column for each field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .schema import Schema


@dataclass(frozen=True, slots=True)
class Jagged:
    """Column of a PER_TOKEN field: each row has its own number of tokens."""

    values: torch.Tensor
    """Values of all rows one after another, without padding: a contiguous CPU tensor `[sum(lengths), *trailing]`, no
    grad."""
    lengths: np.ndarray
    """Number of tokens of each row, int64 `[N]`."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Column of a RAGGED field: each row is a tensor of its own shape, such as an image."""

    values: torch.Tensor
    """Elements of all rows one after another, row-major: a contiguous CPU tensor `[sum(prod(shape))]`, no grad."""
    shapes: np.ndarray
    """Shape of each row, int64 `[N, ndim]`."""


Column = Jagged | Ragged | torch.Tensor | list[Any]
"""Column of a batch: Jagged for a PER_TOKEN field, Ragged for RAGGED, a contiguous Tensor `[N, *trailing]` for
PER_SAMPLE, and a list of N objects for OBJECT."""


class Batch(Mapping[str, Column]):
    """Immutable mapping from field name to column. All columns conform to `schema` and have the same number of rows.

    Build one with `headrace.codecs.jagged.pack`, which checks and converts tensors, arrays and lists.
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
        """Return the number of fields (a batch is a mapping); the number of rows is `num_rows`."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Batch({self.num_rows} rows, fields {list(self._columns)})"

    def jagged(self, name: str) -> Jagged:
        """Return the PER_TOKEN column `name`. Raises TypeError when the field is of another kind."""
        return self._typed(name, Jagged)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the PER_SAMPLE column `name`. Raises TypeError when the field is of another kind."""
        return self._typed(name, torch.Tensor)

    def ragged(self, name: str) -> Ragged:
        """Return the RAGGED column `name`. Raises TypeError when the field is of another kind."""
        return self._typed(name, Ragged)

    def objects(self, name: str) -> list[Any]:
        """Return the OBJECT column `name`. Raises TypeError when the field is of another kind."""
        return self._typed(name, list)

    def _typed(self, name: str, kind: type) -> Any:
        column = self._columns[name]
        if not isinstance(column, kind):
            raise TypeError(f"field {name!r}: got {self.schema[name].kind.value}, expected a {kind.__name__} column")
        return column

    @property
    def lengths(self) -> np.ndarray | None:
        """Number of tokens of each row, int64 `[N]`; None when the batch has no PER_TOKEN field."""
        for column in self._columns.values():
            if isinstance(column, Jagged):
                return column.lengths
        return None

    def subset(self, names: Iterable[str]) -> Batch:
        """Return a batch of the named columns, in the order given, without copying them. Raises KeyError naming an
        unknown field."""
        schema = self.schema.subset(names)
        return Batch(schema, self.num_rows, {name: self._columns[name] for name in schema})

    def merge(self, other: Batch) -> Batch:
        """Return a batch with the columns of this batch and of `other`, which holds other fields of the same rows. The
        columns are not copied. Raises ValueError when the numbers of rows differ or when a field is in both."""
        if self.num_rows != other.num_rows:
            raise ValueError(f"merge: got batches of {self.num_rows} and {other.num_rows} rows, expected equal numbers")
        schema = Schema([*self.schema.values(), *other.schema.values()])
        return Batch(schema, self.num_rows, {**self._columns, **other._columns})
