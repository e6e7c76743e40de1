"""Selects and orders prompts by their success rates, which a column of the data has.

The rate of a prompt is the share of samples that solved it, for some model. Groups of prompts that always or never
succeed teach nothing, because their rewards are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..protocols import PromptSource
from .data_config import DataConfig

_CHUNK = 1000


def success_rates(source: PromptSource, config: DataConfig, place: Callable[[int], str]) -> np.ndarray:
    """Return the success rate of each prompt of a finite source from the column `config.success_field`, float64 `[N]`.

    place: function that returns the place of a prompt, for errors. Raises ValueError, which names the key, if a row has
    no rate from 0 to 1.
    """
    assert config.success_field is not None and source.size is not None
    return np.fromiter(_rates(source, config.success_field, place), dtype=np.float64, count=source.size)


def wanted_prompts(rates: np.ndarray, config: DataConfig, name: str) -> np.ndarray:
    """Return the indices of the prompts whose rates are in `config.success_range`, both ends included, int64 `[K]`.

    name: name of the source. Raises ValueError, which names the key, if there is none.
    """
    low, high = config.success_range
    wanted = np.flatnonzero((rates >= low) & (rates <= high))
    if not len(wanted):
        raise ValueError(
            f"data.success_range: got [{low:g}, {high:g}], but the success rates of all {len(rates)} prompts of "
            f"{name!r} are outside, they go from {rates.min():g} to {rates.max():g}"
        )
    return wanted


def _rates(source: PromptSource, column: str, place: Callable[[int], str]) -> Iterator[float]:
    assert source.size is not None
    for start in range(0, source.size, _CHUNK):
        for index, row in enumerate(source.rows(start, min(source.size, start + _CHUNK)), start):
            value = row.fields.get(column)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                found = f"is {value!r}" if column in row.fields else "does not exist"
                raise ValueError(
                    f"data.success_field: got {column!r}, but this column of {place(index)} {found}, expected a number "
                    "from 0 to 1, the share of samples that solved the prompt"
                )
            yield float(value)
