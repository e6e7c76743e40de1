"""Gives the train workers of a tenant their GPUs while they compute, and returns the GPUs to the pool otherwise.

    to_training   the pool grants the train GPUs (engines there fall asleep) -> workers onload
    sync          new version into host memory and to the engines that are awake -> workers offload -> GPUs go back

stage       waits for                                unblocked by
grant       the pool, for as long as it answers      the shrinks of all engines on the train GPUs
onload      all train workers                        their last answer
sync        all engines that are awake               every bucket being verified
offload     all train workers, their memory to fall  the last answer, or an error that names the worker

Engines fall asleep and wake in a separate thread (shards.py). A train worker never waits for rollouts while it holds
GPUs: the rollouts may need the GPUs of another tenant that waits in the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from ....dataplane.client.client import DataPlaneClient
from ...cluster.calls import ActorFailed, gather_each
from ...cluster.engine_pool import Engine
from ...cluster.run_actors import RunActors
from ...grpo.gpu_turns import HasDemand, TrainerMemory
from ...grpo.pool_demand import Demand
from ...grpo.stages import Stages
from ...grpo.weight_sync import HEALTH_S, SyncReport, WeightSync
from ..state.plan import Priority
from .shards import Shards
from .tenant import Tenant

VALIDATE = "validate"
"""Name of the stage in which a run waits for an evaluation."""


class BorrowsGpus:
    """The operations on the memory of GPUs that a pool lends; implements `Roles`. Begins with engines asleep and train
    workers offloaded."""

    lends = True

    def __init__(
        self,
        actors: RunActors,
        weights: WeightSync,
        stages: Stages,
        tenant: Tenant,
        shards: Shards,
        memory: TrainerMemory,
        client: DataPlaneClient,
        *,
        step_groups: int,
    ) -> None:
        """client: data-plane client that no other object uses. step_groups: number of groups of a step."""
        self._actors = actors
        self._weights = weights
        self._stages = stages
        self._tenant = tenant
        self._shards = shards
        self._memory = memory
        self._client = client
        self._step_groups = step_groups
        self._training = False
        self._finished = 0
        """Newest version that was synced."""
        self._looked = time.monotonic()

    @property
    def training(self) -> bool:
        return self._training

    def to_training(self) -> None:
        if self._training:
            return
        self._take_gpus()
        gpus = self._tenant.map.train_gpus
        with self._stages.timed("onload", apart=True):
            began = time.monotonic()
            self._memory.onload()
            self._tenant.note([self._shards.timed("onload", "train", gpus, began)])
        self._training = True

    def end_generation(self) -> None:
        gather_each([rollout.end_rollouts() for rollout in self._actors.rollouts], "surplus", HEALTH_S)
        self._training = False
        self._take_gpus()

    def sync(self, version: int, engines: Sequence[Engine] | None = None) -> SyncReport:
        self.to_training()
        with self._shards.kept():
            report = self._weights.sync(version, engines)
            self._weights.keep(version)
        self._training = False
        gpus = self._tenant.map.train_gpus
        with self._stages.timed("offload", apart=True):
            began = time.monotonic()
            self._memory.offload()
            self._tenant.note([self._shards.timed("offload", "train", gpus, began)])
        self._tenant.release("train")
        if version > self._finished:
            self._tenant.step_finished()
        self._finished = version
        return report

    def sync_engine(self, engine: Engine, version: int) -> bool:
        if not version:
            return True  # The engine has loaded version 0 from the model's folder.
        if self._weights.kept is None:
            return False  # The train workers were replaced, and will sync the engine soon.
        try:
            self._weights.catch_up(engine)
        except ActorFailed:
            return False
        return True

    def open_rollouts(self, feed: Callable[[], HasDemand]) -> None:
        def demand() -> Demand:
            if self._weights.kept is None:
                return Demand(0, 0)  # No engine can wake until new train workers keep a version.
            left = feed().demand(self._client)
            if self._stages.current != VALIDATE:
                return left
            return Demand(left.target + self._step_groups, left.completed)  # An evaluation counts as a step.

        self._tenant.serve(self._shards.carry_out, demand)
        if self._tenant.map.shards:
            self._tenant.open_rollouts(self._step_groups)

    def engines_kept(self) -> AbstractContextManager[object]:
        return self._shards.kept()

    def check(self) -> None:
        self._tenant.check()
        self._shards.check()

    def metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        count, engines = self._shards.count, len(self._actors.engines.engines)
        now = time.monotonic()
        passed_s, self._looked = now - self._looked, now
        asleep_s = self._shards.take_asleep_s()
        return {
            "pool/train_wait_s": seconds.get("grant", 0.0),
            "pool/onload_s": seconds.get("onload", 0.0),
            "pool/offload_s": seconds.get("offload", 0.0),
            "pool/asleep_share": min(1.0, asleep_s / (engines * passed_s)) if passed_s else 0.0,
            "pool/resizes": float(count.resizes),
            "pool/moved_requests": float(count.moved),
            "pool/kept_tokens": float(count.kept_tokens),
            "pool/lost_tokens": float(count.lost_tokens),
            "pool/engine_gib_asleep": count.asleep_bytes / 2**30,
            **{f"pool/{name}": value for name, value in self._memory.figures.items()},
        }

    def _take_gpus(self) -> None:
        with self._stages.timed("grant", math.inf, apart=True):
            self._tenant.hold("train", Priority.TRAINING, self._stages.report_progress)
