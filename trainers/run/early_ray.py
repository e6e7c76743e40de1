"""Starts a run's own Ray while the driver imports modules. Both take seconds, and Ray's start is mostly waiting."""

from __future__ import annotations

from pathlib import Path

from ...dataplane.imports import import_ahead
from ..cluster.places.placement_plan import PlacementRequest
from ..cluster.ray_cluster import open_cluster
from ..cluster.start_times import StartTimes
from ..config.config import Config

IMPORT_TIMEOUT_S = 120.0
"""Seconds that the imports may take beyond Ray's start."""
_MODULES = (f"{__package__}.launch", "transformers")


def train_early(config: Config, *, resume: bool) -> Path:
    """Train as `run_training` does, but start Ray first, and import the rest of the driver meanwhile.

    The command line calls this function before it has imported the driver. Ray must start in the main thread, because
    it installs signal handlers, and because its processes end with the thread that started them.
    """
    times = StartTimes.of_process()
    # Joining a cluster is fast after a check that it is reachable, and a warm-up run comes before the run's own Ray.
    if config.resources.ray_address is not None or config.warmup.on_file:
        from .launch import to_end, training

        return to_end(training(config, resume=resume, cluster=None, times=times))
    importing = import_ahead(_MODULES)
    try:
        cluster = open_cluster(config.resources, PlacementRequest.of(config), config.dataplane)
        times.mark("Ray")
    finally:
        importing.join(IMPORT_TIMEOUT_S)  # A process must not end in the middle of an import.
    try:
        from .launch import to_end, training

        times.mark("imports")
        return to_end(training(config, resume=resume, cluster=cluster, times=times))
    finally:
        cluster.close()
