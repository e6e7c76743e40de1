"""`Scorer` computes the rewards of samples in a thread, and decides what becomes of samples that failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..environments.config import OnFailure
from ..failures import FailureStopsRun
from ..process.user_function_timeouts import UserThreads
from ..protocols import Sample, Score
from ..rewards.apart import ApartValues
from ..rewards.rubric import Rubric


class Scorer:
    """Scores samples. Users' reward functions may be slow or hang, so they run in a thread while the event loop
    continues."""

    def __init__(self, on_failure: OnFailure, retries: int, scored: Callable[[], None]) -> None:
        """on_failure, retries: see `EnvironmentConfig`. scored: callback that the thread calls after each sample."""
        self._threads = UserThreads("rewards", 1)
        self._on_failure = on_failure
        self._retries = retries
        self._scored = scored

    async def score(self, samples: list[Sample], rubric: Rubric, timeout_s: float) -> list[Score]:
        """Return the scores of samples, of which failed ones are treated as `environment.on_failure` says. The samples
        of a prompt are scored again together, because a reward can compare them.

        timeout_s: time limit in seconds for the reward functions of one sample. Raises FailureStopsRun.
        """
        scores = await self._score_once(samples, rubric, timeout_s)
        for _ in range(self._retries if self._on_failure.judge == "retry" else 0):
            uids = {s.prompt.uid for s, score in zip(samples, scores, strict=True) if score.failure == "judge"}
            again = [at for at, sample in enumerate(samples) if sample.prompt.uid in uids]
            fresh = await self._score_once([samples[at] for at in again], rubric, timeout_s) if again else []
            for at, score in zip(again, fresh, strict=True):
                scores[at] = score
        return [self._treated(score) for score in scores]

    def _treated(self, score: Score) -> Score:
        treatment = "mask" if score.failure is None else self._on_failure.treatments[score.failure]
        if treatment == "stop":
            raise FailureStopsRun(str(score.failure), score.error)
        return replace(score, valid=True, components={}) if treatment == "zero" else score

    async def _score_once(self, samples: list[Sample], rubric: Rubric, timeout_s: float) -> list[Score]:
        """Score samples one after another, after the rewards that are computed apart. If the rewards of a sample take
        longer than `timeout_s` seconds, the sample counts as failed, and another thread continues with the next
        sample."""
        apart = rubric.apart
        known = [None] * len(samples) if apart is None else await apart.values(samples)
        scores: list[Score] = []
        while len(scores) < len(samples):
            work = _Scoring(rubric, samples[len(scores) :], known[len(scores) :], self._scored)
            try:
                await self._threads.call(work.name, work.run, timeout_s, lambda work=work: work.since)
            except TimeoutError:
                scores += work.given_up(f"reward.timeout_s={timeout_s:g}")
            else:
                scores += work.scores
        return scores


class _Scoring:
    """Scores samples one after another in a thread. The event loop can read the thread's progress."""

    def __init__(
        self, rubric: Rubric, samples: Sequence[Sample], known: Sequence[ApartValues | None], scored: Callable[[], None]
    ) -> None:
        """known: values of the rewards of each sample that were computed apart. scored: callback that the thread calls
        after each sample."""
        self._rubric = rubric
        self._samples = samples
        self._known = known
        self._scored = scored
        self._reward = ""
        self.scores: list[Score] = []
        self.since = time.monotonic()
        """Value of `time.monotonic()` when the scoring of the current sample began."""

    @property
    def name(self) -> str:
        """Description of this work in error messages: the rewards of the first sample's prompt."""
        return f"the rewards of prompt {self._samples[0].prompt.uid!r}"

    def run(self) -> None:
        for sample, known in zip(self._samples, self._known, strict=True):
            self.since = time.monotonic()
            self.scores.append(score_sample(self._rubric, sample, known, self._begin))
            self._scored()

    def _begin(self, reward: str) -> None:
        self._reward = reward

    def given_up(self, bound: str) -> list[Score]:
        """Return the scores so far, followed by a failed score for the sample whose reward has not returned. bound: the
        time limit, as text for the error message."""
        scores = list(self.scores)
        if len(scores) == len(self._samples):
            return scores
        uid = self._samples[len(scores)].prompt.uid
        error = f"prompt {uid!r}: reward {self._reward!r} did not return within {bound} s"
        return [*scores, Score(reward=0.0, components={}, valid=False, error=error, failure="judge")]


def score_sample(rubric: Rubric, sample: Sample, known: ApartValues | None, begin: Callable[[str], None]) -> Score:
    if sample.error:
        error = f"prompt {sample.prompt.uid!r}: the episode failed: {' '.join(sample.error.split())}"
        return Score(reward=0.0, components={}, valid=False, error=error, failure=sample.failure or "environment")
    if sample.finish_reason == "abort":
        # The run cut this response off, so its reward says nothing about the policy.
        error = f"prompt {sample.prompt.uid!r}: generation aborted"
        return Score(reward=0.0, components={}, valid=False, error=error, failure="engine")
    tokens = int(np.count_nonzero(sample.response_mask))
    score = rubric.score(sample.prompt, sample.text, sample.finish_reason, tokens, sample, begin, known)
    return score if score.valid else replace(score, failure="judge")
