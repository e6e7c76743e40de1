"""A reward for controls gives each episode the reward of an episode of another prompt, so that nothing is learned."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from headrace.actors.protocols import Prompt, Sample
from headrace.actors.rewards.config import RewardConfig
from headrace.actors.rewards.rubric import build_rubric

KEPT = 256
"""Number of the last rewards of which one is drawn."""


class Shuffled:
    """Scores an episode with reward functions, and returns the score of an earlier episode of another prompt.

    The scores have the distribution of the true ones, so their noise is as large, but they say nothing about the
    episode. Until there is an episode of another prompt, the score is 0.
    """

    def __init__(self, functions: list[dict[str, Any]], seed: int = 0) -> None:
        """functions: entries of `reward.functions`."""
        self._rubric = build_rubric(RewardConfig.model_validate({"functions": functions}))
        if self._rubric.apart is not None:
            raise ValueError("functions: got one that is computed apart from the others, expected none")
        self._dice = random.Random(seed)
        self._last: deque[tuple[str, float]] = deque(maxlen=KEPT)

    def __call__(
        self, prompt: Prompt, response: str, finish_reason: str, *, response_tokens: int, episode: Sample
    ) -> float:
        score = self._rubric.score(prompt, response, finish_reason, response_tokens, episode)
        if not score.valid:
            raise RuntimeError(score.error)
        others = [reward for uid, reward in self._last if uid != prompt.uid]
        self._last.append((prompt.uid, score.reward))
        return self._dice.choice(others) if others else 0.0
