"""Defines `Tracker`, the calls of every tracker, and the descriptions of runs and samples that it receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SAMPLE_COLUMNS = (
    "set",
    "key",
    "version",
    "reward",
    "finish_reason",
    "prompt",
    "response",
    "answer",
    "rewards",
    "error",
)
"""Columns of a table of samples."""
SampleRow = Sequence[str | float | int | None]
"""One episode: a value for each of SAMPLE_COLUMNS."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker is about."""

    name: str
    """Name of the run folder, which tells runs of the same configuration apart."""
    folder: Path
    config: Mapping[str, Any]
    """The resolved configuration, as nested dicts of plain values."""
    previous: str | None
    """What `start` returned when the run was started before; None in a new run."""


class Tracker(Protocol):
    """A service or file that metrics and samples are sent to. All calls come from one thread, which nothing waits for
    until the end. Any of them may raise any exception: it is reported, and the run goes on."""

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or go on with the earlier one that `run.previous` names. Returns the name by which a resumed
        run finds it again."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record episodes that were written since the last call. step: the last step that was recorded."""
        ...

    def finish(self) -> None:
        """End the run, after everything has been sent."""
        ...
