"""Declares the trackers of a run, which are services and files that also receive its metrics, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from ...dataplane.config import PathText, Positive, Section

PROJECT = "headrace"
TrackerKind = Literal["wandb", "trackio", "mlflow", "tensorboard"]


class WandbOptions(Section):
    """Options of the tracker `wandb`."""

    project: str = Field(default=PROJECT, min_length=1)
    entity: str | None = None
    """User or team that owns the project. Unset: the default of the logged-in user."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes only to the run folder, from where `wandb sync` uploads it. Unset: the variable WANDB_MODE, else
    online."""
    group: str | None = None
    tags: tuple[str, ...] = ()


class TrackioOptions(Section):
    """Options of the tracker `trackio`."""

    project: str = Field(default=PROJECT, min_length=1)
    space_id: str | None = None
    """Hugging Face Space to which metrics are also sent."""
    dir: PathText | None = None
    """Folder of trackio's databases. Unset: the variable TRACKIO_DIR, else trackio's own folder in the home folder."""


class MlflowOptions(Section):
    """Options of the tracker `mlflow`."""

    experiment: str = Field(default=PROJECT, min_length=1)
    uri: PathText | None = None
    """Address of a server, or `file:` and a folder. Unset: the variable MLFLOW_TRACKING_URI, else the folder `mlruns`
    in the run folder."""


class TensorboardOptions(Section):
    """Options of the tracker `tensorboard`."""

    flush_s: Positive = 10.0
    """Largest number of seconds until written metrics can be read."""


OPTIONS: Mapping[str, type[Section]] = {
    "wandb": WandbOptions,
    "trackio": TrackioOptions,
    "mlflow": MlflowOptions,
    "tensorboard": TensorboardOptions,
}
"""Kind of a tracker -> section with its options."""


class TrackerConfig(Section):
    """One tracker, which receives the metrics of every step and the episodes of samples.jsonl. An entry of the list can
    also be just the kind."""

    kind: TrackerKind
    """Kind of the tracker. `wandb` is Weights & Biases, online or offline; `trackio` writes a database in a local
    folder; `mlflow` writes to a server or folder; `tensorboard` writes to `tensorboard/` in the run folder."""
    options: dict[str, Any] = {}
    """Options of the tracker. `wandb` takes `project`, `entity`, `mode` (`online` or `offline`), `group` and `tags`.
    `trackio` takes `project`, `space_id` and `dir`. `mlflow` takes `experiment` and `uri`. `tensorboard` takes
    `flush_s`. Project and experiment are called `headrace` if unset."""

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, given: Any) -> Any:
        return {"kind": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _known_options(self) -> TrackerConfig:
        try:
            options_section(self.kind, self.options)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(str(part) for part in problem["loc"])
            names = ", ".join(OPTIONS[self.kind].model_fields)
            raise ValueError(
                f"got the option {key!r} with {problem['input']!r} for {self.kind}, expected {names} ({problem['msg']})"
            ) from None
        return self


def options_section(kind: str, options: Mapping[str, Any]) -> Section:
    """Return the options of a tracker as an instance of its section in OPTIONS. Raises ValidationError for invalid
    options."""
    return OPTIONS[kind].model_validate(options)
