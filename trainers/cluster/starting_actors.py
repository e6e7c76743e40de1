"""Starts all actors of a run, builds them in parallel, and connects engines with rollout actors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

from ...dataplane.factory import DataPlane
from ..config.config import ResourcesConfig
from .actor_starter import ActorStarter, Started, build, identify, introduce_teachers, started
from .calls import ActorFailed, Call, gather_each
from .engine_pool import Engine, EnginePool
from .handles import EngineHandle, RolloutHandle, TrainHandle
from .run_actors import RunActors
from .start_times import StartTimes


class Loan(Protocol):
    """Borrows the GPUs of a run from a pool while its actors are built."""

    @property
    def sleep_level(self) -> int:
        """Level at which engines sleep after they are built; see `Sleeper.sleep`."""
        ...

    @property
    def shares_engines(self) -> bool:
        """True if the engines are those of the pool, which never sleep."""
        ...

    def holding(self, role: Literal["train", "rollout"]) -> AbstractContextManager[None]:
        """Context manager that waits for all GPUs of a role, and returns them at the end of its block."""
        ...

    def expect_freed(self, handles: Sequence[EngineHandle | TrainHandle]) -> None:
        """Wait until sleeping engines, or offloaded train workers, have freed their GPU memory. Raises ActorFailed with
        the name of a process that keeps too much memory."""
        ...


class StartingActors:
    """The actors of a run from the start of their processes until they are built. The processes start and import
    modules while the data plane starts and the model is prepared."""

    def __init__(
        self,
        starter: ActorStarter,
        resources: ResourcesConfig,
        max_replaced: int,
        on_started: Started = lambda infos: None,
        first_version: int = 0,
    ) -> None:
        """max_replaced: largest number of rollout actors and engines that may be replaced. on_started: receives all
        processes of actors, now and later, before they are built. first_version: version that engines serve when they
        start.
        """
        self._starter = starter
        self._on_started = on_started
        self._timeout_s = resources.start_timeout_s
        self._first_version = first_version
        self._max_replaced = max_replaced
        self._take_turns = resources.switch_roles == "always"
        placement = starter.placement
        self._embedded = not placement.rollouts
        self.hosts: Sequence[EngineHandle]
        """Actors with an engine: engine actors, or rollout actors that embed one."""
        if self._embedded:
            self.hosts = self.rollouts = [starter.embedding_rollout(i) for i in range(len(placement.engines))]
        else:
            self.hosts = [starter.engine(index) for index in range(len(placement.engines))]
            self.rollouts = [starter.rollout(index) for index in range(len(placement.rollouts))]
        self.teachers = [starter.teacher(index) for index in range(len(placement.teachers))]
        self.workers = [starter.worker(rank) for rank in range(len(placement.ranks))]

    def build(self, model: str, plane: DataPlane, times: StartTimes, loan: Loan | None = None) -> RunActors:
        """Build all actors, side by side. model: a local folder or hub id. times: records when each actor is built.
        loan: borrows the GPUs from a pool; None if the run has its own GPUs.

        With `resources.switch_roles=always`, the train workers are built first, and are offloaded when the call
        returns. With a loan, the engines also sleep when it returns. Raises UserError for a mistake that only an actor
        can detect (a path, a dataset, a reward), and ActorFailed if an actor does not start.
        """
        timeout_s, placement = self._timeout_s, self._starter.placement
        self._starter.configure(model, plane.handle)
        generators = list(dict.fromkeys([*self.hosts, *self.rollouts, *self.teachers]))
        identify([*generators, *self.workers], "start", timeout_s, placement, self._on_started)
        times.mark("processes")
        if loan is not None or self._take_turns:
            self._build_in_turns(generators, times, loan)
        else:
            build(generators, self.workers, timeout_s, times)
        counts = [host.num_workers() for host in self.hosts]
        notes: list[Call[tuple[str, ...]]] = [self.rollouts[0].data_notes(), self.workers[0].notes()]
        pictures = self.rollouts[0].picture_schema()
        pairs = zip(self.hosts, started(counts, "start", timeout_s), strict=True)
        slept = loan is not None and not loan.shares_engines
        dropped = slept and loan is not None and loan.sleep_level == 2
        first = self._first_version
        found = [Engine(host, count, first, first, asleep=slept, broken=dropped) for host, count in pairs]
        engines = EnginePool(found, self._embedded)
        if not self._embedded:
            _introduce(engines, self.rollouts, timeout_s)
        introduce_teachers(self.teachers, self.workers, timeout_s)
        lines = tuple(line for lines in started(notes, "start", timeout_s) for line in lines)
        [schema] = started([pictures], "start", timeout_s)
        actors = RunActors(engines, self.rollouts, self.workers, self._max_replaced, lines, timeout_s, placement)
        actors.pictures = next(iter(schema.values()), None)
        actors.on_started, actors.teachers, actors.move = self._on_started, self.teachers, self._starter.move
        actors.starter = self._starter
        actors.ensure_unit = plane.ensure_unit
        return actors

    def _build_in_turns(self, generators: Sequence[EngineHandle], times: StartTimes, loan: Loan | None) -> None:
        """Build and offload the train workers, and then build the actors with engines, which need the freed memory. See
        `build`."""
        timeout_s = self._timeout_s
        with nullcontext() if loan is None else loan.holding("train"):
            build([], self.workers, timeout_s, times)
            if self._starter.route.keeps_in_host:
                started([worker.cache_weights(0) for worker in self.workers], "start", timeout_s)
            started([worker.offload() for worker in self.workers], "start", timeout_s)
            if loan is not None:
                loan.expect_freed(self.workers)
        if loan is not None and loan.shares_engines:
            loan = None
        with nullcontext() if loan is None else loan.holding("rollout"):
            build(generators, [], timeout_s, times)
            if loan is not None:
                # The first wake of engines can need more memory than later ones, and the whole GPU is free for them
                # now.
                started([host.sleep(loan.sleep_level) for host in self.hosts], "start", timeout_s)
                started([host.wake() for host in self.hosts], "start", timeout_s)
                started([host.sleep(loan.sleep_level) for host in self.hosts], "start", timeout_s)
                loan.expect_freed(self.hosts)


def _introduce(engines: EnginePool, rollouts: Sequence[RolloutHandle], timeout_s: float) -> None:
    """Pass the engines to the request router of every rollout actor. From then on, report excluded and readmitted
    engines to the routers."""
    handles = [engine.handle for engine in engines.engines]
    started([rollout.set_engines(handles) for rollout in rollouts], "start", timeout_s)
    asleep = [engine.handle for engine in engines.engines if engine.asleep]
    started([rollout.suspend_engine(one, True) for rollout in rollouts for one in asleep], "start", timeout_s)

    def tell(engine: Engine) -> None:
        if engine.left_out:
            # A suspended engine comes back or the run ends, so requests wait for it without a limit of their own.
            calls: list[Call[Any]] = [rollout.remove_engine(engine.handle) for rollout in rollouts]
            calls += [rollout.suspend_engine(engine.handle, False) for rollout in rollouts]
        else:
            calls = [rollout.add_engine(engine.handle) for rollout in rollouts]
        for answer in gather_each(calls, "engines", timeout_s):
            if not isinstance(answer, ActorFailed):
                continue
            if answer.cause is not None:
                # The engine died again before a router could connect to it.
                engines.exclude(engine, str(answer.cause))
            elif not answer.died:
                raise answer
            # A rollout actor that died gets the engines when it is replaced.

    engines.on_change.append(tell)
