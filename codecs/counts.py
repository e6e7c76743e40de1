"""Adds and subtracts counts field by field."""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Counts:
    """Base of dataclasses all of whose fields are numbers that can be added."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(operator.sub, astuple(self), astuple(other)))
