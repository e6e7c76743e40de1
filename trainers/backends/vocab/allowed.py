"""Restricts logits to the sets of tokens from which tokens were drawn, so that log-probs are those of the engine.

Logits outside of a token's set become `OUTSIDE`. It is finite, so that its probability and its part of an entropy, a
product of 0 and a finite number, are 0 in every formula here, and no gradient reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ....codecs.batch import Batch
from ....codecs.integers import exclusive_cumsum
from ....codecs.tokens.masks import MASKS, decode_sets

OUTSIDE = -1e30


@dataclass(frozen=True, slots=True)
class Allowed:
    """The sets of T tokens, whose log-probs are taken over their sets alone."""

    rows: torch.Tensor
    """Index of the token of each id, ascending, int64 `[ids]`."""
    ids: torch.Tensor
    """Ids of all sets, the tokens themselves among them, int64 `[ids]`."""
    free: torch.Tensor
    """True for each token without a set, whose log-prob is taken over the whole vocabulary, bool `[T]`."""
    starts: np.ndarray
    """Index of the first id of each token's set in `ids`, and the number of all ids at the end, int64 `[T + 1]`."""
    most: int
    """Largest id; -1 without ids."""

    @staticmethod
    def of(
        batch: Batch,
        num_tokens: int,
        index: torch.Tensor,
        targets: torch.Tensor,
        move: Callable[[torch.Tensor], torch.Tensor],
    ) -> Allowed | None:
        """Return the sets of a microbatch's wanted tokens; None if it has none.

        batch: microbatch, whose column of masks is that of whole rows. num_tokens: number of tokens of the whole rows.
        index: positions of the T wanted tokens in packed columns of whole rows, int64 `[T]`. targets: these tokens,
        int64 `[T]`. Both are on the CPU. move: copies a tensor to the device. Raises MasksDamaged if the column is that
        of other rows.
        """
        if MASKS not in batch:
            return None
        sets = decode_sets(batch.ragged(MASKS).values.cpu().numpy(), num_tokens, MASKS).select(index.numpy())
        if not sets.restricted.any():
            return None
        sizes, own = np.maximum(sets.counts + 1, 0), np.flatnonzero(sets.restricted)
        starts = exclusive_cumsum(sizes)
        ids = np.zeros(int(sizes.sum()), np.int64)
        first = np.zeros(len(ids), bool)
        first[starts[own]] = True
        ids[first] = targets.numpy()[own]
        ids[~first] = sets.ids
        rows = np.repeat(np.arange(len(sizes)), sizes)
        moved, known, free = (move(torch.from_numpy(one)) for one in (rows, ids, ~sets.restricted))
        return Allowed(moved, known, free, np.append(starts, len(ids)), int(ids.max()))

    def part(self, start: int, stop: int) -> Allowed:
        """Return the sets of the tokens from `start` up to `stop`."""
        stop = min(stop, len(self.free))
        ids = slice(int(self.starts[start]), int(self.starts[stop]))
        starts = self.starts[start : stop + 1] - ids.start
        return Allowed(self.rows[ids] - start, self.ids[ids], self.free[start:stop], starts, self.most)

    def expect_known(self, vocab: int) -> None:
        """Raise ValueError if a set has a token that a vocabulary of `vocab` tokens lacks."""
        if self.most >= vocab:
            raise ValueError(f"{MASKS}: got the token {self.most} in a set, expected less than {vocab}, the vocabulary")

    def outside(self, logits: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return which of the logits `[T, v]` are outside of their token's set, bool `[T, v]`. start: token id of the
        first logit."""
        width = logits.shape[-1]
        # The column behind the last takes the ids of other ranks' logits, so that nothing waits for a GPU.
        inside = (~self.free)[:, None].repeat(1, width + 1)
        local = self.ids - start
        inside[self.rows, local.where((local >= 0) & (local < width), width)] = False
        return inside[:, :width]


def parts_of(allowed: Allowed | None, total: int, rows: int) -> list[Allowed | None]:
    """Return the sets of consecutive chunks of `rows` tokens of `total`; Nones without sets."""
    places = range(0, total, rows) or [0]
    return [None if allowed is None else allowed.part(place, place + rows) for place in places]
