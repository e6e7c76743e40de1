"""Builds the trackers that section `logging` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...config.config import LoggingConfig
from ...config.trackers import TrackerConfig, options_section
from .mlflow_tracker import MlflowTracker
from .protocol import Tracker
from .tensorboard_tracker import TensorboardTracker
from .trackio_tracker import TrackioTracker
from .wandb_tracker import WandbTracker


def wanted_trackers(config: LoggingConfig) -> Sequence[TrackerConfig]:
    """Return the trackers of a run: those in `logging.trackers`, and TensorBoard while `logging.tensorboard` is
    true."""
    named = any(tracker.kind == "tensorboard" for tracker in config.trackers)
    return config.trackers if named or not config.tensorboard else (*config.trackers, TrackerConfig(kind="tensorboard"))


def build_tracker(config: TrackerConfig) -> Tracker:
    """Build one tracker. It imports its package when it is started."""
    options: Any = options_section(config.kind, config.options)
    match config.kind:
        case "wandb":
            return WandbTracker(options)
        case "trackio":
            return TrackioTracker(options)
        case "mlflow":
            return MlflowTracker(options)
        case "tensorboard":
            return TensorboardTracker(options)
    raise AssertionError(config.kind)
