"""Makes a run a tenant of a pool of GPUs: registers it, builds its actors on borrowed GPUs, and serves the pool."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from ....actors.process.memory import ProcessMemory
from ....actors.process.own_process import ActorInfo
from ....dataplane.client.client import DataPlaneClient
from ....dataplane.owned_folder import process_start
from ...cluster.calls import ActorFailed
from ...cluster.gpu_bundles import Reservation, read_hosts
from ...cluster.handles import EngineHandle, TrainHandle
from ...cluster.places.placement_plan import PlacementRequest, plan_placement
from ...cluster.run_actors import RunActors
from ...config.config import Config
from ...errors import UserError
from ...grpo.gpu_turns import TrainerMemory, residual_limit, wait_until_freed
from ...grpo.stages import Stages
from ...grpo.weight_sync import WeightSync
from ...supervision.cleanup import wait_until_ended
from ...supervision.heartbeat import Heartbeat
from ..server.bundles import places_in_pool
from ..server.client import PoolClient
from ..server.far_processes import end_far_processes
from ..state.commands import Processes
from ..state.plan import TenantMap
from .borrowed_gpus import BorrowsGpus
from .shards import Shards
from .shared_engines import find_engine, seats_of, shared_gpus
from .tenant import Tenant

STAGES_OF_AN_ORDER = 4
"""Largest number of stages in which an order waits for actors. Each stage may take `pool.order_timeout_s` divided by
this number."""
END_S = 30.0
"""Seconds within which the processes of an ending run must be gone."""


class PoolMembership:
    """A run's part in a pool, from its start to its end; implements `Loan`."""

    def __init__(self, config: Config, folder: Path, heartbeat: Heartbeat, run_id: str) -> None:
        """Register the run in its pool. Ray must be initialized, and actors.json in `folder` must be a list with this
        run's id, as `write_actors` makes it. Raises UserError if the pool does not exist or refuses the run, for
        example because its name is taken."""
        self._config = config
        self._heartbeat = heartbeat
        start = process_start(os.getpid())
        assert start is not None, "this process runs"
        processes = Processes(socket.gethostname(), os.getpid(), start, str(folder.absolute()), run_id)
        self._client = PoolClient(config.pool.name)
        train_gpus = config.resources.trainer_gpus
        assert train_gpus is not None, "pool_problems demands it, and resources.rollout_gpus"
        self.shares_engines = config.shares_engines
        self.seat_in = seats_of(config.pool.name, config.run.name, config.resources.start_timeout_s)
        """Function that waits for an engine of the pool, by its number, and returns this run's seat in it."""
        self._check_engines()
        shards = () if self.shares_engines else config.engine_gpus
        gpus = TenantMap(config.run.name, config.pool.weight, train_gpus, shards)
        self.tenant = Tenant(self._client, gpus, processes, config.pool.order_timeout_s)
        self.tenant.join()
        [own] = [tenant for tenant in self._client.status().tenants if tenant.name == config.run.name]
        self._order_timeout_s = own.order_timeout_s

    def _check_engines(self) -> None:
        """Raise UserError if the run would use the pool's engines otherwise than they are placed."""
        config, pool = self._config, self._config.pool.name
        taken = shared_gpus(self._client.status())
        if self.shares_engines:
            expected = find_engine(pool, 0, config.resources.start_timeout_s).gpus
            if config.engine_gpus != expected:
                raise UserError(
                    f"resources.rollout_gpus: got {list(map(list, config.engine_gpus))} by engine, expected "
                    f"{list(map(list, expected))}, the GPUs of the engines of pool {pool!r}"
                )
        elif both := sorted(taken.intersection((*(config.resources.trainer_gpus or ()), *sum(config.engine_gpus, ())))):
            raise UserError(
                f"resources.rollout_gpus: got GPU {both[0]}, expected other GPUs than {sorted(taken)}, which the "
                f"shared engines of pool {pool!r} never give back"
            )

    def places(self) -> Reservation:
        """Return the places of the run's actors on the GPUs that the pool has reserved. If the pool's GPUs are numbers
        without devices, Ray chooses the places. Raises UserError if the run cannot be placed."""
        reserved = self._client.status().reserved
        request = PlacementRequest.of(self._config)
        if reserved:
            return places_in_pool(self._config.pool.name, request, reserved)
        return Reservation(plan_placement(request, read_hosts()))

    @property
    def sleep_level(self) -> int:
        return self._config.pool.sleep_level

    def holding(self, role: Literal["train", "rollout"]) -> AbstractContextManager[None]:
        self._wait()
        return self.tenant.holding(role, self._wait)

    def expect_freed(self, handles: Sequence[EngineHandle | TrainHandle]) -> None:
        config, residual_bytes = self._config, self._config.residual_mib << 20

        def limit(handle: EngineHandle | TrainHandle, held: ProcessMemory) -> int | None:
            processes = config.rollout.tp if isinstance(handle, EngineHandle) else 1
            return residual_limit(held, residual_bytes, processes)

        for handle, why in wait_until_freed(handles, limit, config.resources.start_timeout_s)[1].items():
            raise ActorFailed(f"start: {handle.info} {why}")

    def _wait(self) -> None:
        self._heartbeat.enter("waiting for the pool's GPUs", math.inf)

    def roles(
        self, actors: RunActors, weights: WeightSync, stages: Stages, client: DataPlaneClient, bucket_bytes: int
    ) -> BorrowsGpus:
        """Return the operations on the memory of the borrowed GPUs. client: data-plane client that no other object
        uses. bucket_bytes: GPU memory that a train worker may keep in addition, for the buffers from which it sends
        weights."""
        config, residual_bytes = self._config, self._config.residual_mib << 20
        shards = Shards(
            actors,
            weights,
            self.tenant.map,
            self.tenant.note,
            sleep_level=config.pool.sleep_level,
            residual_bytes=residual_bytes,
            timeout_s=self._order_timeout_s / STAGES_OF_AN_ORDER,
            cut=not config.run.deterministic,
        )
        timeout_s = config.resources.stage_timeout_s
        memory = TrainerMemory(actors, timeout_s=timeout_s, most_bytes=residual_bytes + bucket_bytes)
        groups = config.algorithm.prompts_per_step
        return BorrowsGpus(actors, weights, stages, self.tenant, shards, memory, client, step_groups=groups)

    def leave(self, actors: Sequence[ActorInfo]) -> None:
        """Leave the pool once the processes of the run's actors have ended. Idempotent. actors: all of them since the
        start of the run. The pool ends those that remain when the signs of life stop."""
        deadline = time.monotonic() + END_S
        own = [(info.pid, info.start) for info in actors if info.is_here]
        far = [(info.space, info.pid, info.start) for info in actors if not info.is_here]
        if wait_until_ended(lambda: own, END_S) and not (
            far and end_far_processes(far, max(1.0, deadline - time.monotonic()))
        ):
            self.tenant.leave()
        else:
            self.tenant.stop()
