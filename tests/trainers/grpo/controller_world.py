"""A world for tests of the training modes: the real loop, feed, data plane, plans and train workers, in one process.

Rollouts are those of `World`: they put rows in random order while the feed claims, and actors die. There is no engine:
a weight sync only tells the world the new version.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headrace.actors.protocols import SpanTable
from headrace.actors.train.microbatch_plan import Budget
from headrace.actors.train.step_rows import TrainShard
from headrace.actors.train.worker import TrainWorker
from headrace.actors.train.worker_setup import WorkerReport, WorkerSetup
from headrace.codecs.batch import Jagged, Ragged
from headrace.dataplane.factory import DataPlane
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.traffic import Traffic
from headrace.tests.actors.weight_sync.memory_sender import MemorySender
from headrace.tests.trainers.grpo.feed_world import World
from headrace.trainers.cluster.engine_pool import EnginePool
from headrace.trainers.cluster.worker_specs import backend_config
from headrace.trainers.config.config import Config
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.feed import Feed
from headrace.trainers.grpo.gpu_turns import BothResident
from headrace.trainers.grpo.rollout_pool import RolloutPool
from headrace.trainers.grpo.stages import Stages
from headrace.trainers.grpo.train_workers import TrainWorkers
from headrace.trainers.grpo.training_modes import AfterStep, run_steps
from headrace.trainers.grpo.weight_sync import SyncReport
from headrace.trainers.observe.trace import Tracer
from headrace.trainers.supervision.heartbeat import Heartbeat

PROMPT = 3
"""Number of prompt tokens of each row."""


class InThisProcess(TrainWorkers):
    """Train workers in this process, whose calls are the answers already."""

    def gather(self, calls: Sequence[Any], stage: str) -> list[Any]:
        return list(calls)


class Loop:
    """Runs `run_steps` in this process, on the rows of a world and with the train workers that are given."""

    def __init__(self, world: World, workers: Sequence[Any], *, budget: Budget | None = None) -> None:
        self.world = world
        self.workers = list(workers)
        self.stages = Stages(Tracer(0), Heartbeat())
        config = world.config
        nothing = SimpleNamespace(take=lambda: 0, add=lambda traffic: None, end_step=lambda size: ({}, 0))
        observers = SimpleNamespace(
            evaluated=[], meter=nothing, watch=nothing, reward_errors=SimpleNamespace(note=lambda *figures: None)
        )
        roles = BothResident(SimpleNamespace(sync=self._sync))  # pyright: ignore[reportArgumentType]
        engines = EnginePool([], embedded=True)
        actors: Any = SimpleNamespace(rollouts=world.active, replaced=0, engines=engines)
        decided = config.model_copy(update={"trainer": config.trainer.model_copy(update={"packing": "none"})})
        trainers = InThisProcess.of(decided, self.workers, self.stages)
        rules = replace(trainers.rules, budget=budget or Budget(64))
        self.run: Any = SimpleNamespace(
            config=config,
            client=world,
            actors=actors,
            rollouts=RolloutPool(actors, roles, self.stages, 30.0),
            roles=roles,
            stages=self.stages,
            observers=observers,
            workers=replace(trainers, rules=rules),
        )

    def go_on(self, state: State, feed: Feed, after_step: AfterStep) -> None:
        """Train from `state` to the last step."""
        for _ in run_steps(self.run, state, feed, after_step):
            pass

    def _sync(self, version: int, engines: object = None) -> SyncReport:
        self.world.version = max(self.world.version, version)
        return SyncReport(version, 0, 0, 1, 0.0, 0.0, 0.0, 0, 0, 1, 0, 0, ())


class Handle:
    """A train worker in this process, which is called as one in another process is."""

    info = SimpleNamespace(name="train worker 0")

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


def train_worker(config: Config, plane: DataPlane, model: str, build: Callable[..., Any]) -> TrainWorker:
    """The only rank of a mesh, with a real backend. build: makes the backend of its configuration, rank and world."""
    settings = backend_config(config, model)
    return TrainWorker(
        WorkerSetup(
            rank=0, topology=config.trainer.topology, fetch="auto", threads=1, temperature=1.0, timeout_s=30.0,
            collective_timeout_s=30.0, data_plane=plane.handle, sender=lambda host: MemorySender(), sync=config.sync,
            backend=lambda rank, world: build(settings, rank, world), bucket_bytes=1 << 20,
        )
    )  # fmt: skip


class Killed(Exception):
    """The whole run, or its train workers, were killed."""


class CountingWorker:
    """A train worker without a model, which reads the rows of its shard and counts them."""

    info = SimpleNamespace(name="train worker 0")

    def __init__(self, world: World, deaths: float = 0.0) -> None:
        """deaths: chance that a call finds the worker killed."""
        self.world = world
        self.deaths = deaths
        self.updates: list[list[str]] = []
        """Keys of the rows of each finished update."""
        self.most_bytes = 0
        """Most bytes that the data plane held while rows were trained on."""
        self._rows: list[str] = []
        self._meta: KVBatchMeta | None = None

    def begin(self, shard: TrainShard) -> None:
        self._perhaps_die()
        assert shard.meta is not None and set(shard.columns) <= {"prev_logprobs", "ref_logprobs"}
        self._meta = KVBatchMeta.from_bytes(shard.meta)

    def write_logprobs(self, column: str) -> WorkerReport:
        assert self._meta is not None
        batch = self.world.inner.get(self._meta, ["rollout_logprobs"])
        self.world.inner.write(self._meta, {column: batch.jagged("rollout_logprobs")})
        return self._report({})

    def accumulate(self) -> WorkerReport:
        assert self._meta is not None
        batch = self.world.inner.get(self._meta, ["input_ids", "rollout_logprobs"])
        assert batch.num_rows == len(self._meta)
        self.most_bytes = max(self.most_bytes, self.world.inner.status().bytes_used)
        self._rows += self._meta.keys
        return self._report({})

    def finish(self) -> WorkerReport:
        self._perhaps_die()
        self.updates.append(self._rows)
        figures = {
            "train/tokens": 1.0,
            "train/sequences": float(len(self._rows)),
            "train/lr": 0.0,
            "train/skipped": 0.0,
        }
        self._rows = []
        return self._report(figures)

    def abort(self) -> None:
        self._rows = []

    def _perhaps_die(self) -> None:
        if self.world.dice.random() < self.deaths:
            raise Killed

    def _report(self, metrics: dict[str, float]) -> WorkerReport:
        return WorkerReport(metrics, 0.0, Traffic().to_bytes(), 0, SpanTable.of(()))


class RowWorld(World):
    """A world whose rows have tokens, log-probs and rewards that depend on their prompt's position alone."""

    vocab = 23
    stretch = 1
    """Factor by which answers are longer than 2 to 8 tokens."""

    def _values(self, position: int, size: int) -> tuple[dict[str, Jagged | Ragged], np.ndarray, np.ndarray]:
        dice = np.random.default_rng(position)
        response = dice.integers(2, 9, size) * self.stretch
        lengths = PROMPT + response
        mask = np.concatenate([np.arange(length) >= PROMPT for length in lengths])
        ids = dice.integers(3, self.vocab, len(mask))
        ids[np.concatenate([np.arange(length) < PROMPT for length in lengths])] = np.tile(ids[:PROMPT], size)
        logprobs = dice.normal(-np.log(self.vocab), 0.1, len(mask)) * mask
        parts = {
            "input_ids": ids.astype(np.int32),
            "response_mask": mask.astype(np.uint8),
            "rollout_logprobs": logprobs.astype(np.float32),
        }
        columns: dict[str, Jagged | Ragged] = {
            name: Jagged(torch.from_numpy(values), lengths) for name, values in parts.items()
        }
        return columns, dice.random(size).astype(np.float32), response


def trained(
    plane: DataPlane, config: Config, model: str, build: Callable[..., Any], *, seed: int, budget: Budget
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train all steps of `config`; returns each step's metrics and the weights afterwards. seed: of the order in which
    rollouts end."""
    world = RowWorld(plane, config, random.Random(seed))
    worker = train_worker(config, plane, model, build)
    figures: list[dict[str, float]] = []
    state = State()
    Loop(world, [Handle(worker)], budget=budget).go_on(
        state, world.begin(state), lambda _, metrics: figures.append(metrics)
    )
    backend: Any = worker._backend
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in backend.weights()}
    worker.close()
    world.inner.close()
    return figures, weights
