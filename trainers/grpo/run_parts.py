"""Defines `Run`, the parts of a run that its training steps work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...dataplane.client.client import DataPlaneClient
from ..cluster.calls import DriverMeter
from ..cluster.run_actors import RunActors
from ..config.config import Config
from ..observe.data_plane_watch import DataPlaneWatch
from ..observe.reward_errors import RewardErrors
from .gpu_turns import Roles
from .rollout_pool import RolloutPool
from .stages import Stages
from .train_workers import TrainWorkers
from .weight_sync import WeightSync


@dataclass(frozen=True, slots=True)
class Observers:
    """The objects that measure a run in addition to its steps."""

    meter: DriverMeter
    """Bytes of all messages between the driver and its actors."""
    watch: DataPlaneWatch
    reward_errors: RewardErrors
    evaluated: list[Callable[[int, Mapping[str, float | None]], None]] = field(default_factory=list)
    """Functions that are called with the step and the metrics of each evaluation as soon as it has ended."""

    @classmethod
    def of(cls, client: DataPlaneClient, folder: Path, meter: DriverMeter) -> Observers:
        """Return the observers of a run in `folder`, whose driver has the data-plane client `client`."""
        return cls(meter, DataPlaneWatch(client), RewardErrors(folder))


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run that is ready to train, without any rows. Each part serves one side of the loop."""

    config: Config
    client: DataPlaneClient
    actors: RunActors
    rollouts: RolloutPool
    workers: TrainWorkers
    roles: Roles
    """Object that decides whether engines or train workers hold the memory of the GPUs that they share."""
    weights: WeightSync
    stages: Stages
    observers: Observers
    roles_note: str
    """Sentence for the user about whether both sides take turns; "" if there was nothing to decide."""

    @classmethod
    def of(
        cls,
        config: Config,
        client: DataPlaneClient,
        actors: RunActors,
        roles: Roles,
        weights: WeightSync,
        stages: Stages,
        observers: Observers,
        *,
        roles_note: str,
    ) -> Run:
        """Build a run from the given parts, and the parts that follow from them."""
        rollouts = RolloutPool(actors, roles, stages, config.resources.stage_timeout_s, config.run.dir)
        workers = TrainWorkers.of(config, actors.workers, stages, client.hosts_of)
        return cls(config, client, actors, rollouts, workers, roles, weights, stages, observers, roles_note)
