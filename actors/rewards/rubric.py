"""The rubric: named rewards and their weights, added up to one score per sample."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import numpy as np

from ..protocols import Prompt, Reward, Score


class Rubric:
    """Scores responses; a reward that raises costs its sample, never the run."""

    def __init__(self, rewards: Sequence[tuple[str, Reward, float]]) -> None:
        """rewards: (name, reward, weight). Raises ValueError when empty, for a name given twice or a NaN weight."""
        if not rewards:
            raise ValueError("reward: got no functions, expected at least one")
        names = [name for name, _, _ in rewards]
        for name, _, weight in rewards:
            if names.count(name) > 1:
                raise ValueError(f"reward: {name!r} is given twice; give one of them another name")
            if not math.isfinite(weight):
                raise ValueError(f"reward {name!r}: weight {weight}, expected a finite number")
        self._rewards = list(rewards)

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self._rewards]

    def score(self, prompt: Prompt, response: str, finish_reason: str) -> Score:
        """The weighted total. When a reward raises or returns no finite number, the sample is not valid.

        The other rewards' values are kept in `components`; the first failure is named in `error`.
        """
        components: dict[str, float] = {}
        errors: list[str] = []
        total = 0.0
        for name, reward, weight in self._rewards:
            try:
                value = _finite(name, reward(prompt, response, finish_reason))
            except Exception as error:  # users' code: the row is masked and counted, and the error is reported
                errors.append(f"reward {name!r} raised {type(error).__name__}: {' '.join(str(error).split())}")
                continue
            components[name] = value
            total += weight * value
        if errors:
            return Score(reward=0.0, components=components, valid=False, error=errors[0])
        return Score(reward=total, components=components, valid=True)


def _finite(name: str, value: object) -> float:
    # Real covers bool and numpy's numbers; a 0-d tensor is none, and a string that looks like one is a mistake.
    if not isinstance(value, (numbers.Real, np.bool_)) or not math.isfinite(value):
        raise ValueError(f"{name!r} returned {value!r}, expected a finite number")
    return float(value)
