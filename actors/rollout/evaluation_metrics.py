"""Computes the metrics of an evaluation: means over samples, best of K and majority vote over those of a prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # The configuration imports this module, and must report mistakes without loading torch.
    from ..protocols import Sample, Score

VALIDATION = "val"
"""First part of the metric keys of validation."""
REWARD = "val/reward"
"""Metric key of the mean total reward. With `/NAME` appended, it is the key of the mean unweighted value of one reward
function."""
EXACT_MATCH = "val/exact_match"
"""Metric key of the share of samples whose response equals the expected answer, apart from surrounding white space."""
RESPONSE_LENGTH = "response_length_mean"
"""Name of the metric of the mean number of response tokens, without the prefix of its evaluation set."""
RIGHT = 1.0
"""Smallest value of the judging reward function at which a sample counts as correct."""


@dataclass(frozen=True, slots=True)
class FigureScheme:
    """The metric names of one evaluation set, and the rule by which a sample counts as correct."""

    prefix: str = VALIDATION
    """First part of every metric key: `val` for validation, `eval/NAME` for the evaluation set NAME."""
    correct: str | None = None
    """Name of the reward function that judges samples; a sample with a value of at least 1 is correct. None: a sample
    is correct if its response equals the expected answer, apart from surrounding white space."""

    def key(self, name: str) -> str:
        """Return the metric key of the metric `name`."""
        return f"{self.prefix}/{name}"

    def mean_key(self, n: int) -> str:
        """Return the key of the share of correct samples, avg@n. n: number of samples of each prompt."""
        return self.key(f"avg@{n}") if self.correct is not None else EXACT_MATCH

    def best_key(self, name: str, count: int) -> str:
        """Return the key of the best-of-K variant of the reward metric `name` (`reward` or `reward/NAME`). K is
        `count`."""
        return self.key(f"best@{count}" if name == "reward" else f"{name}/best@{count}")


def figure_names(rewards: Sequence[str], n: int) -> list[str]:
    """Return the keys of all validation metrics that measure the quality of a policy. They are means and best-of-K
    values of rewards and exact match, and the majority vote.

    rewards: names of the reward functions. n: number of samples of each prompt.
    """
    scheme, means = FigureScheme(), ["reward", *(f"reward/{name}" for name in rewards)]
    keys = [scheme.key(means[0]), EXACT_MATCH, *map(scheme.key, means[1:])]
    keys += [scheme.best_key(name, count) for name in means for count in best_counts(n)]
    keys += [scheme.key(f"pass@{count}") for count in best_counts(n)]
    return keys + ([scheme.key(f"maj@{n}")] if n > 1 else [])


def find_figure(name: str, known: Collection[str]) -> str | None:
    """Return the metric key in `known` that a user means by `name`, or None if there is none. `name` may be the key
    itself, the key without `val/`, or the name of a reward function."""
    return next((key for key in (name, f"val/{name}", f"{REWARD}/{name}") if key in known), None)


def best_counts(n: int) -> list[int]:
    """Return the values of K for the best-of-K metrics of a prompt with `n` samples: powers of two up to `n`, and `n`.
    There are none when `n` is 1."""
    return sorted({2**power for power in range(1, n.bit_length()) if 2**power <= n} | ({n} if n > 1 else set()))


def needs_answers(key: str) -> bool:
    """Return whether the metric `key` measures exact matches. Its values are shares, and it exists only if prompts have
    expected answers."""
    return key == EXACT_MATCH or key.startswith(("val/pass@", "val/maj@"))


def expected_best(values: Sequence[float], count: int) -> float:
    """Return the expected maximum of `count` values that are drawn from `values` without replacement.

    When all values are 0 or 1, this is the unbiased pass@k (Chen et al. 2021, arXiv:2107.03374).
    """
    ascending, draws = sorted(values), math.comb(len(values), count)
    return sum(math.comb(index, count - 1) / draws * value for index, value in enumerate(ascending))


def majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Return the probability that the most frequent answer of a prompt's samples is correct (maj@n). It is the
    self-consistency of Wang et al. 2022, arXiv:2203.11171. If several answers are equally frequent, one of them is
    drawn.

    votes: answer and correctness of each sample; an answer of None does not vote. Returns 0.0 if nothing votes.
    """
    counts = Counter(answer for answer, _ in votes if answer is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    # The first sample of an answer decides whether it is correct.
    judged = dict(reversed([(answer, correct) for answer, correct in votes]))
    tied = [float(judged[answer]) for answer, count in counts.items() if count == most]
    return sum(tied) / len(tied)


class FigureSums:
    """Sums of the metrics of one evaluation over prompts. Unlike means, the sums of several actors can simply be
    added."""

    def __init__(self, scheme: FigureScheme = FigureScheme()) -> None:  # noqa: B008 - frozen
        self._scheme = scheme
        self._totals: dict[str, list[float]] = {}
        self.counts: dict[str, int] = {}
        """Number of samples or prompts in each sum, by metric key. A metric to which nothing was added has no entry."""

    def add_group(self, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        """Add the scored samples of one prompt. Metrics of rewards do not include failed samples.

        Exact match includes every sample whose prompt has an answer, even if its rewards failed. A metric of K samples
        leaves out prompts with fewer than K samples that count; the majority vote includes all n samples.
        """
        scheme, n = self._scheme, len(samples)
        for sample in samples:
            self.add(scheme.key(RESPONSE_LENGTH), float(np.count_nonzero(sample.response_mask)), 1)
        values: dict[str, list[float]] = {}
        for score in scores:
            if score.valid:
                values.setdefault("reward", []).append(score.reward)
                for name, value in score.components.items():
                    values.setdefault(f"reward/{name}", []).append(value)
        for name, found in values.items():
            self.add(scheme.key(name), sum(found), len(found))
            for count in best_counts(n):
                if len(found) >= count:
                    self.add(scheme.best_key(name, count), expected_best(found, count), 1)
        votes = self._votes(samples, scores)
        if votes:
            correct = [float(right) for _, right in votes]
            self.add(scheme.mean_key(n), sum(correct), len(correct))
            for count in best_counts(n):
                if len(correct) >= count:
                    self.add(scheme.key(f"pass@{count}"), expected_best(correct, count), 1)
            if len(votes) == n > 1:
                self.add(scheme.key(f"maj@{n}"), majority(votes), 1)

    def _votes(self, samples: Sequence[Sample], scores: Sequence[Score]) -> list[tuple[str | None, bool]]:
        judge = self._scheme.correct
        if judge is None:
            texts = [(sample.text.strip(), sample.prompt.answer.strip()) for sample in samples]
            return [(text, text == answer) for text, answer in texts if answer]
        return [(score.answer, score.components.get(judge, 0.0) >= RIGHT) for score in scores if score.valid]

    @property
    def sums(self) -> dict[str, float]:
        """Sum of each metric, by metric key. Metrics of K samples (best, pass, majority) are summed over prompts, all
        others over samples. The sums do not depend on the order in which prompts were added."""
        return {key: math.fsum(totals) for key, totals in self._totals.items()}

    def add(self, key: str, total: float, count: int) -> None:
        """Add `total`, the sum of `count` values, to the metric `key`."""
        self._totals.setdefault(key, []).append(total)
        self.counts[key] = self.counts.get(key, 0) + count

    def means(self) -> dict[str, float]:
        """Return the mean of each metric, by metric key."""
        return {key: total / self.counts[key] for key, total in self.sums.items()}
