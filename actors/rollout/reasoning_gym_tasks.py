"""Prompts of the library reasoning-gym: procedural tasks with a scorer each, of which nothing is downloaded."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from ...dataplane.imports import MissingExtra
from ..protocols import PromptRow

PREFIX = "reasoning-gym:"
"""Prefix of sources that are data sets of reasoning-gym, such as `reasoning-gym:chain_sum`."""
DATASET = "source_dataset"
"""Field of a prompt with the name of its data set, by which the reward function `reasoning_gym` finds the scorer."""
_ENDLESS = 10**9
_HELD_OUT_SEED = 1_000_003
"""Number that is added to the seed for the held-out part, which is drawn from other random numbers."""


class ReasoningGymTasks:
    """PromptSource of one data set of reasoning-gym, endless; prompt i is a function of (seed, part, i).

    The held-out part has another seed. Tasks of small data sets may therefore be in both parts.
    """

    size = None

    def __init__(
        self, dataset: str, *, held_out: bool, seed: int = 0, options: Mapping[str, Any] | None = None
    ) -> None:
        """dataset: name of the data set. options: its configuration. Raises ValueError with a one-sentence message for
        an unknown data set or options that do not fit, and MissingExtra if the library is not installed."""
        self.name = PREFIX + dataset
        gym = _library(self.name)
        known = list(gym.factory.DATASETS)
        if dataset not in known:
            near = difflib.get_close_matches(dataset, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data: reasoning-gym has no data set {dataset!r}{hint}")
        try:
            self._tasks = gym.create_dataset(
                dataset, seed=seed + _HELD_OUT_SEED * held_out, size=_ENDLESS, **dict(options or {})
            )
            self.row(0)
        except Exception as error:  # assertions and TypeErrors of the data set's configuration
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"data.options: {dict(options or {})} do not fit {self.name}: {reason}") from error

    def row(self, index: int) -> PromptRow:
        """Return the task at `index`, with its metadata as fields."""
        entry = self._tasks[index]
        return PromptRow(entry["question"], entry["answer"] or "", dict(entry["metadata"]))

    def texts(self, start: int, stop: int) -> list[str]:
        """Return the questions of the tasks `start` to `stop - 1`."""
        return [self.row(index).text for index in range(start, stop)]


def _library(what: str) -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "reasoning_gym", f"data: {what}", "reasoning-gym") from None
