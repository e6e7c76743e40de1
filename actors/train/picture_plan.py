"""Puts rows with pictures into microbatches, group after group, because a microbatch encodes each picture once.

Rows of a group mostly have the same pictures. A group that is divided among microbatches has its pictures encoded in
each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class PatchBudget:
    """Limit on the patches of a microbatch, and their cost, from which plans balance the vision tower."""

    patches_per_microbatch: int | None = None
    """Largest number of patches of the distinct pictures of a microbatch; None for no limit."""
    patches_per_token: float = 1.0
    """Number of patches of a picture for each of its tokens in a row."""
    cost: float = 0.0
    """Cost of a patch, where a token of a row costs `Budget.linear_cost`."""


def picture_costs(patches: np.ndarray, groups: np.ndarray | None, budget: PatchBudget) -> np.ndarray:
    """Return each row's share of the cost of the vision tower, float64 `[N]`. Rows of a group share that of their
    pictures. patches, groups: those of each row, `[N]`; None makes each row a group."""
    if groups is None:
        return budget.cost * patches
    _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return budget.cost * patches / counts[group]


def fill_by_group(
    tokens: np.ndarray, patches: np.ndarray, groups: np.ndarray, most: int, budget: PatchBudget, *, packed: bool
) -> tuple[np.ndarray, list[int]]:
    """Fill microbatches with the rows of one rank, group after group. Returns the order of the rows, int64 `[N]`, and
    the index in this order of the first row of each microbatch.

    A group begins a new microbatch if it fits into one, but not into the rest of the last. tokens, patches, groups:
    those of each row, `[N]`. most: largest number of tokens. packed: whether tokens add up; else rows are padded to the
    longest. Raises ValueError, naming the key, if the pictures of one row exceed the limit.
    """
    limit = np.inf if budget.patches_per_microbatch is None else budget.patches_per_microbatch
    if len(patches) and patches.max() > limit:
        raise ValueError(
            f"trainer.patches_per_microbatch: got {budget.patches_per_microbatch}, but the pictures of one row have "
            f"{int(patches.max())} patches; expected at least that"
        )
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(first[group], kind="stable")
    ends = np.searchsorted(first[group][order], first[group][order], side="right").tolist()
    rows = list(zip(tokens[order].tolist(), patches[order].tolist(), ends, strict=True))
    starts, empty = [0], _Filled(0, 0, 0, 0.0, -1.0)
    now, end = empty, 0
    for at, (length, shown, group_end) in enumerate(rows):
        whole = [(length, shown)]
        if group_end != end:
            end, now = group_end, replace(now, shared=-1.0)
            whole = [(one[0], one[1]) for one in rows[at:end]]
        room = now.plus([(length, shown)]).fits(most, limit, packed)
        if room and not now.plus(whole).fits(most, limit, packed):
            room = not empty.plus(whole).fits(most, limit, packed)  # Then the group is divided in any case.
        if now.count and not room:
            starts.append(at)
            now = empty
        now = now.plus([(length, shown)])
    return order, starts


@dataclass(frozen=True, slots=True)
class _Filled:
    """Content of a microbatch."""

    count: int
    total: int
    """Sum of the rows' tokens."""
    longest: int
    patches: float
    shared: float
    """Patches of the first row of the group in progress, which further rows with as many share; -1 before it."""

    def plus(self, rows: list[tuple[int, float]]) -> _Filled:
        """Return the content with some rows of one group more. rows: tokens and patches of each."""
        shared = self.shared if self.shared >= 0 else rows[0][1]
        patches = sum(shown for _, shown in rows if shown != shared) + (shared if self.shared < 0 else 0.0)
        lengths = [length for length, _ in rows]
        total, longest = self.total + sum(lengths), max(self.longest, *lengths)
        return _Filled(self.count + len(rows), total, longest, self.patches + patches, shared)

    def fits(self, tokens: int, patches: float, packed: bool) -> bool:
        return (self.total if packed else self.count * self.longest) <= tokens and self.patches <= patches
