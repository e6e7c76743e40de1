"""Computes the metrics of a validation: means over all samples, and best-of-K values over the samples of a prompt."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # the configuration imports this module, and a mistake in it is told without loading torch
    from ..protocols import Sample, Score

REWARD = "val/reward"
"""Metric key of the mean total reward. With `/NAME` appended, it is the key of the mean unweighted value of one reward
function."""
EXACT_MATCH = "val/exact_match"
"""Metric key of the share of samples whose response equals the expected answer, apart from surrounding white space."""
RESPONSE_LENGTH = "val/response_length_mean"
"""Metric key of the mean number of response tokens."""


def figure_names(rewards: Sequence[str], n: int) -> list[str]:
    """Return the keys of all validation metrics that measure the quality of a policy: means and best-of-K values of
    rewards and exact match.

    rewards: names of the reward functions. n: number of samples of each prompt.
    """
    means = [REWARD, EXACT_MATCH, *(f"{REWARD}/{name}" for name in rewards)]
    return means + [best_of(key, count) for key in means for count in best_counts(n)]


def find_figure(name: str, known: Collection[str]) -> str | None:
    """Return the metric key in `known` that a user means by `name`, or None if there is none. `name` may be the key
    itself, the key without `val/`, or the name of a reward function."""
    return next((key for key in (name, f"val/{name}", f"{REWARD}/{name}") if key in known), None)


def best_counts(n: int) -> list[int]:
    """Return the values of K for which best-of-K metrics are computed when a prompt has `n` samples: the powers of two
    from 2 to `n`, and `n` itself. There are none when `n` is 1."""
    return sorted({2**power for power in range(1, n.bit_length()) if 2**power <= n} | ({n} if n > 1 else set()))


def best_of(key: str, count: int) -> str:
    """Return the key of the best-of-K variant of the metric `key`, with K = `count`, such as `val/pass@4` for exact
    match."""
    return {REWARD: f"val/best@{count}", EXACT_MATCH: f"val/pass@{count}"}.get(key, f"{key}/best@{count}")


def needs_answers(key: str) -> bool:
    """Return whether the metric `key` measures exact matches. Its values are shares, and it exists only if prompts have
    expected answers."""
    return key == EXACT_MATCH or key.startswith("val/pass@")


def expected_best(values: Sequence[float], count: int) -> float:
    """Return the expected maximum of `count` values that are drawn from `values` without replacement.

    When all values are 0 or 1, this is the unbiased pass@k (Chen et al. 2021, arXiv:2107.03374).
    """
    ascending, draws = sorted(values), math.comb(len(values), count)
    return sum(math.comb(index, count - 1) / draws * value for index, value in enumerate(ascending))


class FigureSums:
    """Sums of validation metrics over prompts. Unlike means, the sums of several actors can simply be added."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        """Sum of each metric, by metric key: over prompts if it is a best-of-K metric, otherwise over samples."""
        self.counts: dict[str, int] = {}
        """Number of samples or prompts in each sum, by metric key. A metric to which nothing was added has no entry."""

    def add_group(self, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        """Add the scored samples of one prompt. Reward metrics do not include failed samples.

        Exact match includes every sample whose prompt has an answer, even if its rewards failed.
        """
        for sample in samples:
            self.add(RESPONSE_LENGTH, float(np.count_nonzero(sample.response_mask)), 1)
        values: dict[str, list[float]] = {}
        for score in scores:
            if score.valid:
                values.setdefault(REWARD, []).append(score.reward)
                for name, value in score.components.items():
                    values.setdefault(f"{REWARD}/{name}", []).append(value)
        values[EXACT_MATCH] = [
            float(sample.text.strip() == answer) for sample in samples if (answer := sample.prompt.answer.strip())
        ]
        for key, found in values.items():
            if found:
                self.add(key, sum(found), len(found))
            for count in best_counts(len(samples)):
                if len(found) >= count:
                    self.add(best_of(key, count), expected_best(found, count), 1)

    def add(self, key: str, total: float, count: int) -> None:
        """Add `total`, the sum of `count` values, to the metric `key`."""
        self.sums[key] = self.sums.get(key, 0.0) + total
        self.counts[key] = self.counts.get(key, 0) + count

    def means(self) -> dict[str, float]:
        """Return the mean of each metric, by metric key."""
        return {key: total / self.counts[key] for key, total in self.sums.items()}
