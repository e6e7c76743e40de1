"""Computes a step's episodes and advantages from the tags of rows, which are numbers stored apart from the content.

Several rows may belong to one episode, which counts once, and several episodes to one group. Dynamic sampling, as in
DAPO, leaves groups without a training signal out of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...actors.rewards.rubric import reward_tag
from ...actors.rollout.rows import EPISODE, TRAINED_TOKENS
from ...dataplane.meta import KVBatchMeta
from ..advantages.estimators import AdvantageEstimator, RewardRows


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Assignment of N rows to E episodes, with E = N where each row is an episode."""

    first: np.ndarray
    """Index of one row of each episode: int64 `[E]`. All rows of an episode have the same rewards and group."""
    of_row: np.ndarray
    """Index of each row's episode: int64 `[N]`."""
    valid: np.ndarray
    """True for each episode that can be trained on: bool `[E]`. One valid row suffices."""

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


def with_advantages(estimate: AdvantageEstimator, meta: KVBatchMeta) -> KVBatchMeta:
    """Return the receipt `meta` with an added tag `advantage`; a tag is a number for each row. Advantages are estimated
    from the tags `reward` and `valid`, and from the tags of single rewards if the estimator needs them. An episode of
    several rows counts once, and all its rows get its advantage."""
    episodes = episodes_of(meta)
    first = episodes.first
    components = {name: meta.tags[reward_tag(name)][first] for name in estimate.components}
    advantage = estimate(RewardRows(meta.tags["reward"][first], episodes.valid, meta.groups[first], components))
    return meta.with_tags(advantage=advantage[episodes.of_row] * (meta.tags["valid"] > 0))


def group_tokens(meta: KVBatchMeta) -> np.ndarray:
    """Return, for each row, the number of response tokens that its whole group trains on, float32 `[N]`. Failed and
    masked rows contribute no tokens."""
    _, group = np.unique(meta.groups, return_inverse=True)
    return np.bincount(group, weights=trained_tokens(meta))[group].astype(np.float32)


def counted_rows(meta: KVBatchMeta) -> np.ndarray:
    """Return 1 for each row that counts in a mean over rows, else 0, float32 `[N]`. Rows that are masked because they
    were cut off count, failed rows do not."""
    return ((meta.tags["response_length"] > 0) & (meta.tags["valid"] > 0)).astype(np.float32)


def trained_tokens(meta: KVBatchMeta) -> np.ndarray:
    """Return the trained response tokens of each row, float32 `[N]`: 0 for failed and masked rows."""
    trained = meta.tags.get(TRAINED_TOKENS)
    return meta.tags["response_length"] * (meta.tags["valid"] > 0) if trained is None else trained


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
