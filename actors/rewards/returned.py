"""Checks the values that reward functions return."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

NOT_APPLICABLE = object()
"""Value of a reward that says nothing about a sample: the sample's reward is the sum of its others."""
MOST = float(np.finfo(np.float32).max)
"""Largest number that float32 can hold."""


def finite(name: str, value: object) -> float:
    """Return the value of the reward `name` as a float. Raises ValueError unless it is a number that float32 can hold.

    Numbers include bool and numpy's numbers, but not 0-d tensors and strings that look like numbers.
    """
    if not isinstance(value, (numbers.Real, np.bool_)) or not fits(value):
        raise ValueError(f"{name!r} returned {value!r}, expected a finite number that float32 can hold")
    return float(value)


def fits(value: Any) -> bool:
    """Return whether a number is finite in float32, in which rewards are stored."""
    return abs(value) <= MOST


def listed(value: Any) -> list[Any]:
    """Return the values that one call returned for the samples of a group.

    Raises ValueError for what has no order, such as a set, and for text, of which each character would be a value.
    """
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        return value.tolist()
    if not isinstance(value, Sequence | Iterator) or isinstance(value, str | bytes | bytearray):
        raise ValueError(
            f"the function returned a value of type {type(value).__name__}, expected a list, a tuple or a "
            "one-dimensional array of one number per sample"
        )
    return list(value)
