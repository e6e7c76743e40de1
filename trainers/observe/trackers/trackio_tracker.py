"""Writes metrics and samples to a trackio database, which `trackio show` presents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ....dataplane.imports import MissingExtra
from ...config.trackers import TrackioOptions
from .protocol import SAMPLE_COLUMNS, SampleRow, TrackedRun


class TrackioTracker:
    """Tracker that is a run of trackio."""

    def __init__(self, options: TrackioOptions) -> None:
        self._options = options
        self._run: Any = None
        self._library: Any = None

    def start(self, run: TrackedRun) -> str:
        if self._options.dir is not None:
            os.environ["TRACKIO_DIR"] = os.path.abspath(os.path.expanduser(self._options.dir))  # read by the import
        try:
            import trackio  # pyright: ignore[reportMissingImports] - the extra `trackers`
        except ModuleNotFoundError:
            raise MissingExtra("trackio", "the tracker trackio", "trackers") from None
        self._library = trackio
        name = run.previous or run.name
        self._run = trackio.init(
            project=self._options.project,
            name=name,
            space_id=self._options.space_id,
            config=dict(run.config),
            resume="allow",
            auto_log_gpu=False,
            auto_log_cpu=False,  # the run has metrics of its own for that
            embed=False,
        )
        return name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        import pandas

        frame = pandas.DataFrame([list(row) for row in rows], columns=list(SAMPLE_COLUMNS))
        self._run.log({"samples": self._library.Table(dataframe=frame)}, step=step)

    def finish(self) -> None:
        self._run.finish()
