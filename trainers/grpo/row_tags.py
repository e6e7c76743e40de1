"""Reads tags by episode: several rows of the data plane may belong to one episode, which counts once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...actors.rollout.rows import EPISODE
from ...dataplane.meta import KVBatchMeta


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Which of N rows belong to which of E episodes, with E = N where each row is an episode."""

    first: np.ndarray
    """Index of one row of each episode: int64 `[E]`. All rows of an episode have the same rewards and group."""
    of_row: np.ndarray
    """Index of each row's episode: int64 `[N]`."""
    valid: np.ndarray
    """Whether each episode can be trained on: bool `[E]`. It can if one of its rows can."""

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Add up the values of N rows by episode: float64 `[E]`."""
        return np.bincount(self.of_row, weights=values, minlength=len(self.first))


def episodes_of(meta: KVBatchMeta) -> Episodes:
    """Return the episodes of the rows in the receipt `meta`."""
    valid = meta.tags["valid"] > 0
    if EPISODE not in meta.tags:
        every = np.arange(len(valid))
        return Episodes(every, every, valid)
    pairs = np.stack([meta.groups, meta.tags[EPISODE].astype(np.int64)], axis=1)
    _, first, of_row = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    of_row = of_row.reshape(-1)
    return Episodes(first, of_row, np.bincount(of_row, weights=valid) > 0)
