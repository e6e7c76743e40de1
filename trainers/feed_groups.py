"""Groups as the feed sees them, by key and tag: their place in the prompt stream, and whether they have a signal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..actors.rewards.rubric import reward_tag
from ..dataplane.meta import KVBatchMeta

ALIKE = 1e-6
"""Rewards of a group that differ by less give no signal."""


def flat_groups(meta: KVBatchMeta, components: Sequence[tuple[str, float]]) -> list[int]:
    """Numbers of the groups whose valid rows all have the same raw reward (the sum of `components`, (name, weight)
    each), or of which fewer than two are valid; in the receipt's order."""
    raw = np.zeros(len(meta))
    for name, weight in components:
        raw += weight * meta.tags[reward_tag(name)]
    valid = meta.tags["valid"] > 0
    flat = []
    for group in dict.fromkeys(meta.groups.tolist()):
        rewards = raw[(meta.groups == group) & valid]
        if len(rewards) < 2 or np.ptp(rewards) < ALIKE:
            flat.append(group)
    return flat


def position_of(key: str) -> int:
    """Place in the prompt stream of the row with this key."""
    return int(key.rpartition(".")[0], 36)


def prompt_order(key: str) -> tuple[int, int]:
    """Sort key of `{prompt_uid}.{sample}`: by place in the stream, then by sample."""
    return position_of(key), int(key.rpartition(".")[2])
