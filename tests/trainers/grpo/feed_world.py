"""A world for the feed's tests: rollout actors without engines that put real rows into a real data plane, and die."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headrace.actors.protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA, ActorInfo
from headrace.actors.rollout.prompts import base36
from headrace.actors.rollout.report import RolloutTally
from headrace.codecs.batch import Batch, Jagged, Ragged
from headrace.dataplane.client import DataPlaneClient
from headrace.dataplane.factory import DataPlane, connect
from headrace.dataplane.meta import POSITION, KVBatchMeta
from headrace.dataplane.traffic import Traffic
from headrace.trainers.cluster.handles import PeerFailed
from headrace.trainers.config.config import Config
from headrace.trainers.grpo import feed as feeds
from headrace.trainers.grpo import steps as grpo
from headrace.trainers.grpo.feed import Feed
from headrace.trainers.observe.trace import Tracer

_NUMBER = itertools.count()


@dataclass(eq=False)
class Actor:
    """Stands in for a rollout actor's Peer."""

    world: World
    info: ActorInfo

    def call(self, method: str, *args: Any) -> Any:
        if method == "rollout":
            return self._rollout(*args)
        assert method == "end_rollouts"
        for work in self.world.works:
            if work.peer is self:
                work.left.clear()

    def _rollout(self, positions: list[int], partition: str, params: Any, fresh: bool, traced: bool) -> Work:
        work = Work(self, dict.fromkeys(positions, self.world.version), fresh)
        self.world.works.append(work)
        return work


@dataclass(eq=False)
class Work:
    """Stands in for a Call: prompts that are being rolled out."""

    peer: Actor
    left: dict[int, int]
    """Position -> version that generates it."""
    fresh: bool
    dead: bool = False
    started: float = 0.0
    pid: int = 0


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

    def __post_init__(self) -> None:
        self.actors = [Actor(self, ActorInfo(f"rollout {n}", n, "here")) for n in range(3)]
        self.inner: DataPlaneClient = connect(self.plane.handle, name="world")

    def begin(self, state: grpo.State, monkeypatch: Any) -> tuple[Any, Feed]:
        """A new partition and feed for a run that starts, or is resumed, from `state`."""
        self.partition = f"world-{next(_NUMBER)}"
        self.works.clear()
        self.version = state.version
        monkeypatch.setattr(feeds, "ended", self.ended)
        monkeypatch.setattr(feeds, "gather_each", lambda calls, stage, timeout_s: None)
        monkeypatch.setattr(grpo, "replace_actor", self.replace_actor)
        run = SimpleNamespace(
            config=self.config, client=self, sampling=None, active_rollouts=self.actors, stage=self.stage,
            tracer=Tracer(0), engines=None,
        )  # fmt: skip
        return run, Feed(run, state, self.partition)  # pyright: ignore[reportArgumentType]

    def begin_again(self, run: Any, feed: Feed, state: grpo.State) -> Feed:
        """The feed after the one of a train group that is lost: `state` is its checkpoint's. Engines keep theirs."""
        feed.give_up()
        self.partition = f"world-{next(_NUMBER)}"
        return Feed(run, state, self.partition)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        yield

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
        working = [work for work in self.works if work.left and not work.dead]
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
                other.dead |= other.peer is work.peer
        return True

    def _put(self, position: int, version: int) -> None:
        size = self.config.algorithm.group_size
        reward = np.zeros(size, np.float32)
        if random.Random(position).random() >= self.flat:
            reward[0] = 1.0
        lengths = np.full(size, 3)
        tokens = torch.zeros(3 * size)
        spans = Ragged(torch.tensor([0, version] * size, dtype=torch.int32), np.tile([1, 2], (size, 1)))
        columns = {
            "input_ids": Jagged(tokens.int(), lengths), "response_mask": Jagged(tokens.to(torch.uint8), lengths),
            "rollout_logprobs": Jagged(tokens, lengths), "version_spans": spans,
        }  # fmt: skip
        keys = [f"{base36(position)}.{sample}" for sample in range(size)]
        tags = {"reward": reward, "valid": np.ones(size, np.float32), "response_length": lengths.astype(np.float32)}
        tags |= {"reward/exact_match": reward, POSITION: np.full(size, position)}
        batch = Batch(ROLLOUT_SCHEMA.subset(ROLLOUT_FIELDS), size, columns)
        self.inner.put(self.partition, keys, batch, versions=np.full(size, version), tags=tags)

    # ---------------------------------------------------------------- what stands in for Ray

    def ended(self, works: list[Work], stage: str, timeout_s: float) -> list[tuple[Work, Any]]:
        """As `peers.ended`; who waits makes the rollouts go on."""
        done = [work for work in works if work.dead or not work.left]
        while timeout_s and not done and self.put_one():
            done = [work for work in works if work.dead or not work.left]
        self.works = [work for work in self.works if work not in done]
        report = RolloutTally(rows=1).report(Traffic())
        return [(w, PeerFailed("it died", died=True) if w.dead else report) for w in done]

    def replace_actor(self, run: Any, peer: Actor, pid: int, failure: PeerFailed, version: int) -> None:
        """The actor works on under its name; calls of the dead process stay dead."""


def saved(state: grpo.State) -> str:
    """As a checkpoint has it."""
    return json.dumps(asdict(state))


def positions_of(meta: KVBatchMeta) -> list[int]:
    """Of the groups, in order."""
    return list(dict.fromkeys(meta.tags[POSITION].tolist()))
