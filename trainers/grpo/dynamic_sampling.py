"""Leaves groups without a training signal out of a step (dynamic sampling, as in DAPO)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...actors.rewards.rubric import reward_tag
from ...dataplane.meta import KVBatchMeta
from .row_tags import episodes_of

ALIKE = 1e-6
"""Smallest range of rewards (largest minus smallest) that gives a group a training signal."""


def flat_groups(meta: KVBatchMeta, components: Sequence[tuple[str, float]]) -> list[int]:
    """Return the group numbers of the groups in `meta` without a training signal, in order of appearance. A group has
    no signal if all its valid episodes have the same raw reward (the weighted sum of `components`), or if it has fewer
    than two valid episodes. components: name and weight of each reward in the sum."""
    episodes = episodes_of(meta)
    raw, groups = np.zeros(len(episodes.first)), meta.groups[episodes.first]
    for name, weight in components:
        raw += weight * meta.tags[reward_tag(name)][episodes.first]
    flat = []
    for group in dict.fromkeys(meta.groups.tolist()):
        rewards = raw[(groups == group) & episodes.valid]
        if len(rewards) < 2 or np.ptp(rewards) < ALIKE:
            flat.append(group)
    return flat


def useful_rows(meta: KVBatchMeta, components: Sequence[tuple[str, float]], most_dropped: int) -> np.ndarray:
    """Return which rows to train on, bool `[N]`. The rows of the first `most_dropped` groups without a training signal
    are left out. components: as in `flat_groups`."""
    keep = np.ones(len(meta), dtype=bool)
    for group in flat_groups(meta, components)[: max(0, most_dropped)]:
        keep &= meta.groups != group
    return keep
