"""Provides integer arithmetic for sizes, and sums and distinct values of integer arrays.

They are fastest on sorted arrays, because arrays of row numbers, group numbers and block ids are mostly sorted.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

Number = TypeVar("Number", int, np.ndarray)
ALIGN = 64
"""Alignment in bytes of the parts of blocks and of the tensors in weight buckets, so that they can be viewed as any
dtype."""

FEW = 32
"""Largest number of values that plain Python handles, because numpy takes longer for so few."""


def ceil_div(number: Number, divisor: int) -> Number:
    """Return `number / divisor`, rounded up to an integer."""
    return -(-number // divisor)


def round_up(number: Number, multiple: int) -> Number:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def exclusive_cumsum(counts: np.ndarray) -> np.ndarray:
    """Return, for each entry of `counts`, the sum of all entries before it, int64 `[N]`."""
    ends = np.cumsum(counts, dtype=np.int64)
    return ends - counts


def cut_up(values: np.ndarray, counts: Any) -> list[np.ndarray]:
    """Return one piece of `values` for each entry of `counts`, of so many entries; no piece for no counts."""
    return np.split(values, np.cumsum(counts, dtype=np.int64))[:-1]


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values of an integer array `[N]` in ascending order. It is `values` itself if `values` is
    sorted without repeats.

    For 4096 row numbers this takes 10 us; numpy's `unique` uses a hash table and takes 350 us.
    """
    if len(values) <= FEW:
        items = values.tolist()
        found = sorted(set(items))
        return values if found == items else np.array(found, values.dtype)
    ordered, heads = _heads(values)
    return ordered if np.count_nonzero(heads) == len(heads) else ordered[heads]


def distinct_counts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the distinct values in ascending order, how often each of them occurs in `values` as int64)."""
    if len(values) <= FEW:
        counted: dict[int, int] = {}
        for value in values.tolist():
            counted[value] = counted.get(value, 0) + 1
        found = sorted(counted)
        return np.array(found, values.dtype), np.array([counted[value] for value in found], np.int64)
    ordered, heads = _heads(values)
    first = heads.nonzero()[0]
    counts = np.empty_like(first)
    np.subtract(first[1:], first[:-1], out=counts[:-1])
    counts[-1:] = len(values) - first[-1:]
    return ordered[first], counts


def _heads(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (`values` in ascending order, bool `[N]` that is true where a value occurs for the first time)."""
    heads = np.ones(len(values), dtype=bool)
    if len(values) > 1 and np.count_nonzero(values[1:] < values[:-1]):
        values = np.sort(values)
    np.not_equal(values[1:], values[:-1], out=heads[1:])
    return values, heads


distinct(np.zeros(2, np.int64))  # numpy imports code at its first use, which fails when the interpreter ends.
