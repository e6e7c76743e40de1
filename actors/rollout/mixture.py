"""`MixedSource` mixes the prompts of several sources by weight, so that each block of them has each source's share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..protocols import PromptRow
from .prompts import PromptStream

SOURCE = "data_source"
"""Name of the prompt's field with the name of its source."""
BLOCK = 1000
"""Number of prompts in which each source has its share."""


class MixedSource:
    """Endless PromptSource of several streams. In each block of BLOCK prompts, a stream has as many as its weight says,
    to the nearest whole number, at places drawn from the seed; it is read in its own order, and none is left out.

    The prompt at an index is a function of the streams, the weights and the seed alone.
    """

    size = None
    name = "data.mixture"

    def __init__(self, names: Sequence[str], streams: Sequence[PromptStream], weights: Sequence[float], seed: int):
        """names: name of each stream's source. weights: weight of each stream, above 0; only their ratios count.

        Raises ValueError, which names the source, if a weight is so small that no prompt of a block would be its.
        """
        self._names = tuple(names)
        self._streams = tuple(streams)
        self._seed = seed
        self._counts = shares(weights, BLOCK)
        for name, weight, count in zip(names, weights, self._counts, strict=True):
            if not count:
                raise ValueError(
                    f"data.mixture: got weight {weight:g} for {name!r}, expected at least 1/{BLOCK} of the sum of the "
                    "weights"
                )
        self._order = lru_cache(maxsize=4)(self._block)

    def row(self, index: int) -> PromptRow:
        """Return the prompt at `index`. Its field `data_source` is its source's name, unless it has such a field."""
        block, place = divmod(index, BLOCK)
        parts, before = self._order(block)
        part = int(parts[place])
        prompt = self._streams[part][block * int(self._counts[part]) + int(before[place])]
        return PromptRow(prompt.text, prompt.answer, {SOURCE: self._names[part], **prompt.fields}, prompt.messages)

    def texts(self, start: int, stop: int) -> list[str]:
        """Return the texts of the prompts `start` to `stop - 1`."""
        return [self.row(index).text for index in range(start, stop)]

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each place of a block, its stream's index and how many earlier places have that stream. Both are
        int64 `[BLOCK]`."""
        parts = np.repeat(np.arange(len(self._counts)), self._counts)
        parts = np.random.default_rng([self._seed, block]).permutation(parts)
        before = np.zeros(BLOCK, dtype=np.int64)
        for part, count in enumerate(self._counts.tolist()):
            before[parts == part] = np.arange(count)
        return parts, before


def shares(weights: Sequence[float], total: int) -> np.ndarray:
    """Divide `total` places by weight with largest remainders, int64 `[number of weights]`, summing to `total`."""
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    rest = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[rest] += 1
    return counts
