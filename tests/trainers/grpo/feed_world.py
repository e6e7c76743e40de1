"""A world for the feed's tests: rollout actors without engines that put real rows into a real data plane, and die."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA
from headrace.actors.rollout.prompts import base36
from headrace.actors.rollout.results import GroupFigures, RolloutReport, RolloutTally
from headrace.actors.rollout.rows import RouteCounts
from headrace.actors.rollout.worker import RolloutWorker
from headrace.codecs.batch import Batch, Jagged, Ragged
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.factory import DataPlane, connect
from headrace.dataplane.meta import POSITION, KVBatchMeta
from headrace.dataplane.traffic import Traffic
from headrace.trainers.cluster.calls import ActorFailed, Call, DriverMeter
from headrace.trainers.cluster.handles import RolloutHandle
from headrace.trainers.config.config import Config
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.feed import Feed
from headrace.trainers.grpo.stages import Stages
from headrace.trainers.observe.trace import Tracer
from headrace.trainers.supervision.heartbeat import Heartbeat

_NUMBER = itertools.count()


class Actor(RolloutHandle):
    """A rollout actor without a process: its work is done by the world."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(lambda: None, f"rollout {number}", DriverMeter())
        self.world = world

    def kill(self, why: str = "") -> None:
        self.world.hung.remove(self)
        self.world.num_dead += 1
        self.world.killed_at = self.world.looks
        for work in self.world.works:
            work.dead |= work.actor is self

    def rollout(
        self, positions: list[int], partition: str, params: SamplingParams, fresh: bool, traced: bool
    ) -> Call[RolloutReport]:
        call: Any = Call(self, RolloutWorker.rollout, b"", (), None, 0.0, 0)  # pyright: ignore[reportArgumentType]
        self.world.works.append(Work(self, call, dict.fromkeys(positions, self.world.version), fresh))
        return call


@dataclass(eq=False)
class Work:
    """Prompts that are being rolled out."""

    actor: Actor
    call: Call[RolloutReport]
    left: dict[int, int]
    """Position -> version that generates it."""
    fresh: bool
    dead: bool = False


@dataclass(eq=False)
class World:
    """Rows appear when the feed's client claims, one group at a time, in random order."""

    plane: DataPlane
    config: Config
    dice: random.Random
    deaths: float = 0.0
    """Chance that an actor dies when a group is put."""
    flat: float = 0.0
    """Share of prompts whose groups have no signal."""
    partition: str = ""
    version: int = 0
    works: list[Work] = field(default_factory=list)
    journal: dict[int, int] = field(default_factory=dict)
    """Position -> version of finished groups: outlives the data plane."""
    generated: list[int] = field(default_factory=list)
    """Positions, each time they are generated."""
    num_dead: int = 0
    num_lost: int = 0
    """Train groups."""
    slow_looks: int = 0
    """Number of looks at its calls for which the feed waits in vain, as all actors are at work."""
    reported_rows: int = 1
    reported_failed: int = 0
    routes: RouteCounts = RouteCounts()
    """Rows, and rows whose reward raised, that every call reports."""
    hung: list[Actor] = field(default_factory=list)
    """Actors that do nothing more, until they are killed."""
    looks: int = 0
    said: list[str] = field(default_factory=list)
    """What is said of actors that were killed."""
    killed_at: int = 0
    """Number of the look after which a hung actor was killed."""

    def __post_init__(self) -> None:
        self.active = [Actor(self, number) for number in range(3)]
        self.inner: DataPlaneClient = connect(self.plane.handle, name="world")

    def begin(self, state: State) -> Feed:
        """A new partition and feed for a run that starts, or is resumed, from `state`."""
        self.works.clear()
        self.version = state.version
        return self._feed(state)

    def begin_again(self, feed: Feed, state: State) -> Feed:
        """The feed after the one of a train group that is lost: `state` is its checkpoint's. Engines keep theirs."""
        feed.give_up()
        return self._feed(state)

    def _feed(self, state: State) -> Feed:
        self.partition = f"world-{next(_NUMBER)}"
        return Feed(
            self.config,
            state,
            client=self,  # pyright: ignore[reportArgumentType]  # the rest is the real client's, see __getattr__
            rollouts=self,
            stages=Stages(Tracer(0), Heartbeat()),
            partition=self.partition,
        )

    # ---------------------------------------------------------------- the feed's client

    def claim(self, *args: Any, **options: Any) -> KVBatchMeta:
        """Real, once enough groups were put."""
        while True:
            with contextlib.suppress(TimeoutError):
                return self.inner.claim(*args, **{**options, "timeout_s": 0.0})
            if not self.put_one():
                return self.inner.claim(*args, **{**options, "timeout_s": 0.0})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put_one(self) -> bool:
        """Some actor finishes some group; False when none is at work."""
        working = [work for work in self.works if work.left and not work.dead and work.actor not in self.hung]
        if not working:
            return False
        work = self.dice.choice(working)
        position = self.dice.choice(list(work.left))
        version = work.left.pop(position)
        if position in self.journal and not work.fresh:
            version = self.journal[position]
        else:
            self.generated.append(position)
            self.journal[position] = version
        dies = self.dice.random() < self.deaths
        if not (dies and self.dice.random() < 0.5):  # killed before or after the put
            self._put(position, version)
        if dies:
            self.num_dead += 1
            for other in self.works:
                other.dead |= other.actor is work.actor
        return True

    def _put(self, position: int, version: int) -> None:
        size = self.config.algorithm.group_size
        columns, reward, response = self._values(position, size)
        spans = Ragged(torch.tensor([0, version] * size, dtype=torch.int32), np.tile([1, 2], (size, 1)))
        keys = [f"{base36(position)}.{sample}" for sample in range(size)]
        tags = {"reward": reward, "valid": np.ones(size, np.float32), "response_length": response.astype(np.float32)}
        tags |= {"reward/exact_match": reward, POSITION: np.full(size, position)}
        batch = Batch(ROLLOUT_SCHEMA.subset(ROLLOUT_FIELDS), size, {**columns, "version_spans": spans})
        self.inner.put(self.partition, keys, batch, versions=np.full(size, version), tags=tags)

    def _values(self, position: int, size: int) -> tuple[dict[str, Jagged | Ragged], np.ndarray, np.ndarray]:
        """Columns, rewards and answers' lengths of a group."""
        reward = np.zeros(size, np.float32)
        if random.Random(position).random() >= self.flat:
            reward[0] = 1.0
        lengths, tokens = np.full(size, 3), torch.zeros(3 * size)
        parts = {"input_ids": tokens.int(), "response_mask": tokens.to(torch.uint8), "rollout_logprobs": tokens}
        return {name: Jagged(values, lengths) for name, values in parts.items()}, reward, lengths

    # ---------------------------------------------------------------- the feed's rollouts

    def ended(
        self, calls: Sequence[Call[RolloutReport]], timeout_s: float
    ) -> list[tuple[Call[RolloutReport], RolloutReport | ActorFailed]]:
        """Calls whose groups are all put, or whose actor is dead; a feed that waits makes the rollouts continue."""
        works = [work for work in self.works if work.call in calls]
        if timeout_s and self.looks < self.slow_looks:
            return []
        done = [work for work in works if work.dead or not work.left]
        while timeout_s and not done and self.put_one():
            done = [work for work in works if work.dead or not work.left]
        self.works = [work for work in self.works if work not in done]
        figures = GroupFigures(self.reported_rows, self.reported_failed, errors=("no answer",), routes=self.routes)
        report = RolloutTally([figures]).report(Traffic())
        return [(work.call, ActorFailed("it died", died=True) if work.dead else report) for work in done]

    def end_rollouts(self, actors: Iterable[RolloutHandle]) -> None:
        """Nothing more is put."""
        for work in self.works:
            if work.actor in actors:
                work.left.clear()

    def begin_watch(self) -> None:
        self.looks = 0

    def look(self, version: int) -> bool:
        """Look at the actors as if an hour had passed since the look before."""
        self.looks += 1
        return True

    def still_s(self, actor: RolloutHandle) -> float:
        """Return seconds without progress as if no actor were stuck but the `hung`."""
        return 3600.0 * self.looks if actor in self.hung else 0.0

    def end_stuck(self, handle: RolloutHandle, without: str) -> str:
        """Kill the actor as `RolloutPool` does, and note what is said of it."""
        self.said.append(without)
        handle.kill()
        return without

    def may_repeat(self, failure: ActorFailed, since_s: float, version: int) -> bool:
        """No engine of this world is ever replaced."""
        return False

    def lost_nodes(self) -> list[str]:
        """This world has no nodes of Ray."""
        return []

    def exclude(self, engine: str, reason: str, called_s: float) -> None:
        raise AssertionError("no report of this world names an engine")

    def replace(self, actor: RolloutHandle, pid: int, failure: ActorFailed, version: int) -> None:
        """The actor works on under its name; calls of the dead process stay dead."""


def saved(state: State) -> str:
    """As a checkpoint has it."""
    return json.dumps(asdict(state))


def positions_of(meta: KVBatchMeta) -> list[int]:
    """Of the groups, in order."""
    return list(dict.fromkeys(meta.tags[POSITION].tolist()))
