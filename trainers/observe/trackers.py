"""Sends metrics and samples to trackers: TensorBoard, Weights & Biases, MLflow and trackio, each behind one protocol.

A tracker imports its package when it is started, so a run needs only the packages of its own trackers.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...dataplane.imports import MissingExtra
from ..config.config import LoggingConfig
from ..config.tracker_options import (
    MlflowOptions,
    TensorboardOptions,
    TrackerConfig,
    TrackioOptions,
    WandbOptions,
    options_section,
)

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
    """The run that a tracker records."""

    name: str
    """Name of the run folder. It distinguishes runs of the same configuration."""
    folder: Path
    config: Mapping[str, Any]
    """The resolved configuration, as nested dicts of plain values."""
    previous: str | None
    """Value that the previous `start` of this run returned; None in a new run."""


class Tracker(Protocol):
    """A service or file that receives metrics and samples. All calls come from one thread. The run waits for this
    thread only at its end. A call can raise any exception; the exception is reported, and the run continues."""

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or continue the earlier run that `run.previous` names. Returns the tracker's name of the run,
        which is `run.previous` after a resume."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record the episodes that were written since the last call. step: the last recorded step."""
        ...

    def finish(self) -> None:
        """End the run, after everything has been sent."""
        ...


_BATCH = 1000
"""Largest number of metrics in one call to MLflow."""
_VALUE_CHARS = 6000
"""Largest number of characters of a parameter's value in MLflow."""


_KEY_CHARS = 250
"""Largest number of characters of a key in MLflow."""


def mlflow_key(name: str) -> str:
    """Return the key under which MLflow gets the metric or parameter `name`.

    MLflow accepts few characters, and stores a name with `/` in folders: `val/reward` could not be a file beside a
    folder of that name for `val/reward/exact_match`. So only the first `/` stays, which groups the charts, and others
    become dots. `@` becomes `_at_`, and any other character that MLflow refuses becomes its code.
    """
    root, slash, rest = name.partition("/")
    readable = (root + slash + rest.replace("/", ".")).replace("@", "_at_")
    return re.sub(r"[^\w.: /-]", lambda found: f"_x{ord(found[0]):x}_", readable)[:_KEY_CHARS]


class MlflowTracker:
    """Tracker that records to a run of MLflow."""

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._client: Any = None
        self._metric: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> str:
        uri = self._options.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{run.folder / 'mlruns'}"
        # MLflow 3.17 refuses a folder without this variable, because it prefers a database. A folder needs no
        # migrations, which take 9 s.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # By default MLflow retries for minutes if the server is down.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
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
        params = [Param(mlflow_key(key), str(value)[:_VALUE_CHARS]) for key, value in _flat(run.config)]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run_id, params=params[first : first + 100])
        return self._run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [self._metric(mlflow_key(key), value, now, step) for key, value in metrics.items()]
        for first in range(0, len(entries), _BATCH):
            self._client.log_batch(self._run_id, metrics=entries[first : first + _BATCH])

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        columns = {name: [row[index] for row in rows] for index, name in enumerate(SAMPLE_COLUMNS)}
        self._client.log_table(self._run_id, data=columns, artifact_file=f"samples/step-{step:06}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _flat(section: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in section.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(f"{prefix}{key}", value)]
    return found


class TensorboardTracker:
    """Tracker that writes a folder of TensorBoard events. Samples are written as text, because TensorBoard has no
    tables."""

    def __init__(self, options: TensorboardOptions) -> None:
        self._options = options
        self._writer: Any = None
        self._summary: Any = None  # `start` sets this to TensorBoard's protobuf class Summary.

    def start(self, run: TrackedRun) -> str:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise MissingExtra("tensorboard", "logging.tensorboard=true", "report") from None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), flush_secs=max(1, round(self._options.flush_s)))
        self._summary = Summary
        return ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # A step is written as one event, because an event per scalar (`add_scalar`) takes 7 ms for a hundred scalars.
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        lines = [SAMPLE_COLUMNS, ["---"] * len(SAMPLE_COLUMNS), *rows]
        cells = ([str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines)
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def finish(self) -> None:
        self._writer.close()


class _LibraryRun:
    """Common part of the trackers for packages that have tables, and runs with `log` and `finish`."""

    _library: Any
    _run: Any

    def __init__(self, options: Any) -> None:
        self._options = options

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class TrackioTracker(_LibraryRun):
    """Tracker that records to a run of trackio."""

    _options: TrackioOptions

    def start(self, run: TrackedRun) -> str:
        if self._options.dir is not None:
            # trackio reads this variable.
            os.environ["TRACKIO_DIR"] = os.path.abspath(self._options.dir)
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
            auto_log_cpu=False,  # The run has its own metrics for the CPU.
            embed=False,
        )
        return name

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        import pandas

        frame = pandas.DataFrame([list(row) for row in rows], columns=list(SAMPLE_COLUMNS))
        self._run.log({"samples": self._library.Table(dataframe=frame)}, step=step)


class WandbTracker(_LibraryRun):
    """Tracker that records to a run of Weights & Biases. The service drops steps that were logged before, which a
    resumed run repeats."""

    _options: WandbOptions

    def start(self, run: TrackedRun) -> str:
        try:
            import wandb  # pyright: ignore[reportMissingImports] - the extra `trackers`
            from wandb.sdk.lib.import_hooks import (  # pyright: ignore[reportMissingImports]
                unregister_all_post_import_hooks,
            )
        except ModuleNotFoundError:
            raise MissingExtra("wandb", "the tracker wandb", "trackers") from None
        self._library = wandb
        options, name = self._options, run.previous or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=run.name,
            id=name,
            resume="allow",
            dir=str(run.folder),
            mode=options.mode,
            group=options.group,
            tags=list(options.tags) or None,
            config=dict(run.config),
            reinit="create_new",
            # wandb must neither capture the output of the run nor measure the machine.
            settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
        )
        # wandb 0.31 installs import hooks to count the packages that a run uses. After its helper process has died,
        # these hooks raise an exception at every import of such a package (torch, tensorboard) in this process.
        unregister_all_post_import_hooks()
        return name

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._library.Table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"samples": table}, step=step)


def wanted_trackers(config: LoggingConfig) -> Sequence[TrackerConfig]:
    """Return the trackers of a run: those in `logging.trackers`, and TensorBoard with `logging.tensorboard`."""
    named = any(tracker.kind == "tensorboard" for tracker in config.trackers)
    return config.trackers if named or not config.tensorboard else (*config.trackers, TrackerConfig(kind="tensorboard"))


def build_tracker(config: TrackerConfig) -> Tracker:
    """Build one tracker. The tracker imports its package when it is started."""
    options: Any = options_section(config.kind, config.options)
    kinds = {
        "wandb": WandbTracker,
        "trackio": TrackioTracker,
        "mlflow": MlflowTracker,
        "tensorboard": TensorboardTracker,
    }
    return kinds[config.kind](options)
