"""Sends metrics and samples to an MLflow server, or writes them to a folder that `mlflow ui` presents."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ....dataplane.imports import MissingExtra
from ...config.trackers import MlflowOptions
from .protocol import SAMPLE_COLUMNS, SampleRow, TrackedRun

_BATCH = 1000
"""Largest number of metrics that MLflow takes in one call."""
_VALUE_CHARS = 6000
"""Largest number of characters of a parameter's value."""


class MlflowTracker:
    """Tracker that is a run of MLflow."""

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._client: Any = None
        self._metric: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> str:
        uri = self._options.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{run.folder / 'mlruns'}"
        # MLflow 3.17 refuses a folder without this variable, as it would rather have a database. A folder needs no
        # migrations, which take 9 s.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # else a server that is down is tried for minutes
        try:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - the extra `trackers`
            from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise MissingExtra("mlflow", "the tracker mlflow", "trackers") from None
        self._metric, self._client = Metric, MlflowClient(tracking_uri=uri)
        if run.previous is not None:
            self._run_id = run.previous
            self._client.set_terminated(self._run_id, status="RUNNING")
            return self._run_id
        found = self._client.get_experiment_by_name(self._options.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._options.experiment)
        self._run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, str(value)[:_VALUE_CHARS]) for key, value in _flat(run.config)]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run_id, params=params[first : first + 100])
        return self._run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        # MLflow takes no @ in the key of a metric, as in val/pass@4.
        entries = [self._metric(key.replace("@", "_at_"), value, now, step) for key, value in metrics.items()]
        for first in range(0, len(entries), _BATCH):
            self._client.log_batch(self._run_id, metrics=entries[first : first + _BATCH])

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        columns = {name: [row[index] for row in rows] for index, name in enumerate(SAMPLE_COLUMNS)}
        self._client.log_table(self._run_id, data=columns, artifact_file=f"samples/step-{step:06}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _flat(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted keys and values of nested dicts."""
    found: list[tuple[str, Any]] = []
    for key, value in section.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(f"{prefix}{key}", value)]
    return found
