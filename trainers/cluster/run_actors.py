"""Starts the actors of a run, builds them in parallel, connects engines with rollout actors, and replaces dead ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle as RayActor

from ...actors.engine_actor import CONCURRENCY, EngineActor
from ...actors.protocols import ActorInfo
from ...actors.rollout.actor import RolloutActor
from ...actors.train.actor import CONCURRENCY_GROUPS, TrainActor
from ...dataplane.errors import DataPlaneError
from ...dataplane.factory import DataPlane
from ..config.config import Config
from ..errors import UserError
from . import actor_specs
from .calls import ActorFailed, ActorHandle, Call, DriverMeter, ended, gather
from .engine_pool import Engine, EnginePool
from .gpu_bundles import Reservation, check_reports, reserve_places
from .handles import EngineHandle, RolloutHandle, TrainHandle
from .placement import ON_CPUS, Placement, Seat
from .ray_cluster import Cluster, Demand

H = TypeVar("H", bound=ActorHandle)
T = TypeVar("T")

_log = logging.getLogger(__name__)
BY_START_TIMEOUT = "resources.start_timeout_s"
"""Config key that limits every wait for an actor to start; it is named in the error when that time is up."""
ASK_AGAIN_S = 0.2
"""Seconds between two queries to actors that may be about to die."""


@dataclass(slots=True)
class RunActors:
    """All actors of a run, with the means to replace them."""

    engines: EnginePool
    rollouts: list[RolloutHandle]
    """The rollout actors. If they embed the engines, they are also the actors behind `engines`."""
    workers: list[TrainHandle]
    """The train workers, in rank order."""
    host: str
    """Address at which train workers reach rank 0."""
    max_replaced: int
    """Largest number of rollout actors and engines that may be replaced, counted together."""
    data_notes: tuple[str, ...]
    """Sentences for the user about the prompts, such as what was chosen or left out."""
    start_timeout_s: float
    """Largest number of seconds for each part of an actor's start (`resources.start_timeout_s`)."""
    placement: Placement = ON_CPUS
    """Host and GPUs of each actor. A process that replaces another has the same."""
    replaced: int = 0
    """Number of rollout actors and engines that died and were replaced."""
    on_replaced: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that run after the process of an actor was replaced by another."""
    on_death: list[Callable[[str], None]] = field(default_factory=list)
    """Callbacks that receive a sentence about what died, before the actor is replaced."""

    @property
    def handles(self) -> list[EngineHandle | TrainHandle]:
        """Handles of all actors, without duplicates."""
        hosts = [] if self.engines.embedded else [engine.handle for engine in self.engines.engines]
        return [*hosts, *self.rollouts, *self.workers]

    @property
    def active_rollouts(self) -> list[RolloutHandle]:
        """The rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        active = [engine.handle for engine in self.engines.active]
        return [rollout for rollout in self.rollouts if rollout in active] if self.engines.embedded else self.rollouts

    @property
    def may_replace(self) -> bool:
        """True if another actor that dies may be replaced."""
        return self.replaced < self.max_replaced

    def replace(self, handle: EngineHandle, failure: ActorFailed) -> None:
        """Start and build a new process for a rollout actor or engine that died; `handle` then stands for the new
        process.

        The old actor is killed first, because it may still run if only its engine's process died. The new engine, if
        there is one, serves version 0. Raises `failure` if no more actors may be replaced or its node of the Ray
        cluster is gone, and ActorFailed if the new process does not start.
        """
        if not self.may_replace:
            raise failure
        if self._without_node([handle]):
            raise failure  # a new process would wait for a place until its time is up
        self.replaced += 1
        _log.warning("replaced: %s", failure)
        for tell in self.on_death:
            tell(str(failure))
        handle.kill()
        handle.restart()
        _identify([handle], "replace", self.start_timeout_s, self.placement)
        _started([handle.build()], "replace", self.start_timeout_s)
        if not self.engines.embedded and isinstance(handle, RolloutHandle):
            engines = [engine.handle for engine in self.engines.active]
            _started([handle.set_engines(engines)], "replace", self.start_timeout_s)
        self._tell()

    def find_dead(self, wait_s: float, *, insist: bool) -> list[ActorInfo]:
        """Return the actors, on any host, that Ray reports as dead. Waits up to `wait_s` for the first death.

        insist: whether to keep querying actors that have answered until the time is over; otherwise, one answer from
        each ends the wait.
        """
        deadline = time.monotonic() + wait_s
        asked = {handle.progress(): handle for handle in self.handles}
        while asked and (left_s := deadline - time.monotonic()) > 0:
            answers = ended(list(asked), "health", left_s)
            dead = [call.actor.info for call, answer in answers if isinstance(answer, ActorFailed) and answer.died]
            if dead:
                return dead
            answered = [asked.pop(call) for call, _ in answers]
            if insist:
                time.sleep(min(ASK_AGAIN_S, left_s))
                asked |= {handle.progress(): handle for handle in answered}
        return []

    def restart_workers(self) -> None:
        """Kill all train workers, then start and build new ones with the run's first weights. The handles in `workers`
        then stand for the new ones.

        Raises ActorFailed if the new workers do not start, which is certain when one's node of the Ray cluster is gone.
        """
        if lost := self._without_node(self.workers):
            raise ActorFailed(f"start: the host of {', '.join(lost)} is gone", died=True)
        for worker in self.workers:
            worker.kill()
            worker.restart()
        _identify(self.workers, "start", self.start_timeout_s, self.placement)
        _build(self.host, [], self.workers, self.start_timeout_s)
        self._tell()

    def _without_node(self, handles: Sequence[EngineHandle | TrainHandle]) -> list[str]:
        """Return the names of the actors for which Ray has no node left on which they may be."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [handle.info.name for handle in handles if not self.placement.nodes_for(handle.info.name, alive)]

    def _tell(self) -> None:
        for call in self.on_replaced:
            call()


def demand(config: Config) -> Demand:
    """Return the logical CPUs that the actors request from Ray."""
    rollout = config.rollout
    return Demand(rollout.num_actors or 0, rollout.num_engines * rollout.tp, config.trainer.topology.world)


def start_actors(
    config: Config, model: str, plane: DataPlane, cluster: Cluster, meter: DriverMeter, stack: ExitStack
) -> RunActors:
    """Start and build all actors. model: a local folder or hub id. stack: kills the actors when it is closed.

    Raises UserError for a user's mistake that only an actor or Ray can notice (a path, a dataset, a reward, GPUs that
    are not free), and ActorFailed when an actor does not start or is not where it was placed.
    """
    timeout_s = config.resources.start_timeout_s
    reservation = reserve_places(config, timeout_s)
    placement = reservation.placement
    actor_specs.transport(config, placement)  # refuses one that cannot work before any actor starts
    starter = _ActorStarter(config, model, plane, cluster, meter, stack, reservation)
    hosts: Sequence[EngineHandle]
    if config.rollout.num_actors is None:
        hosts = rollouts = [starter.embedding_rollout(index) for index in range(config.rollout.num_engines)]
    else:
        hosts = [starter.engine(index) for index in range(config.rollout.num_engines)]
        rollouts = [starter.rollout(index) for index in range(config.rollout.num_actors)]
    workers = [starter.worker(rank) for rank in range(config.trainer.topology.world)]
    generators = list(dict.fromkeys([*hosts, *rollouts]))
    _identify([*generators, *workers], "start", timeout_s, placement)
    _build(starter.host, generators, workers, timeout_s)
    counts = _started([host.num_workers() for host in hosts], "start", timeout_s)
    embedded = config.rollout.num_actors is None
    engines = EnginePool([Engine(host, count) for host, count in zip(hosts, counts, strict=True)], embedded)
    if not embedded:
        _introduce(engines, rollouts, timeout_s)
    [data_notes] = gather([rollouts[0].data_notes()], "start", timeout_s)
    return RunActors(
        engines, rollouts, workers, starter.host, config.run.max_restarts, data_notes, timeout_s, placement
    )


class _ActorStarter:
    """Starts actors, one per call. Closing the caller's exit stack kills them."""

    def __init__(
        self,
        config: Config,
        model: str,
        plane: DataPlane,
        cluster: Cluster,
        meter: DriverMeter,
        stack: ExitStack,
        reservation: Reservation,
    ) -> None:
        self._config = config
        self._model = model
        self._data_plane = plane.handle
        self._meter = meter
        self._stack = stack
        self._reservation = reservation
        self._placement = reservation.placement
        self._device = "cpu" if self._placement.layout == "cpu" else "cuda:0"
        self.host = host_address(cluster)
        """Address at which the run's processes reach this host."""

    def engine(self, index: int) -> EngineHandle:
        """Start engine actor `index`; returns its handle."""
        setup = actor_specs.engine_setup(self._config, index, self._model, self._data_plane, self._device)
        return self._start(
            EngineHandle, EngineActor, setup, self._placement.engines[index], max_concurrency=CONCURRENCY
        )

    def embedding_rollout(self, index: int) -> RolloutHandle:
        """Start rollout actor `index`, which embeds engine `index`; returns its handle."""
        setup = actor_specs.rollout_setup(self._config, index, self._model, self._data_plane, self._device)
        return self._start(RolloutHandle, RolloutActor, setup, self._placement.engines[index])

    def rollout(self, index: int) -> RolloutHandle:
        """Start rollout actor `index`, which embeds no engine; returns its handle."""
        setup = actor_specs.rollout_setup(self._config, index, self._model, self._data_plane, None)
        return self._start(RolloutHandle, RolloutActor, setup, self._placement.rollouts[index])

    def worker(self, rank: int) -> TrainHandle:
        """Start the train worker of `rank`; returns its handle."""
        setup = actor_specs.worker_setup(
            self._config,
            rank,
            self._model,
            self._data_plane,
            host=self.host,
            placement=self._placement,
            device=self._device,
        )
        seat = self._placement.ranks[rank]
        return self._start(TrainHandle, TrainActor, setup, seat, concurrency_groups=CONCURRENCY_GROUPS)

    def _start(self, handle: type[H], host: type, setup: Any, seat: Seat, **options: Any) -> H:
        assert seat.name == setup.name, "the plan and the settings number the actors alike"
        options |= self._reservation.options(seat)
        setup = replace(setup, gpus=self._reservation.devices(seat))

        def start() -> Any:
            actor = ray.remote(max_restarts=0, **options)(host).remote(setup)
            self._stack.callback(ray.kill, cast(RayActor, actor), no_restart=True)
            return actor

        return handle(start, setup.name, self._meter)


def host_address(cluster: Cluster) -> str:
    """Return the address at which the run's processes reach this host."""
    return ray.util.get_node_ip_address() if cluster.num_nodes > 1 else "127.0.0.1"


def _started(calls: Sequence[Call[T]], stage: str, timeout_s: float) -> list[T]:
    """Wait for calls that are part of starting actors, and return their results in order. Raises ActorFailed if a call
    fails, or after `timeout_s`; the message then names `resources.start_timeout_s`."""
    return gather(calls, stage, timeout_s, bound=BY_START_TIMEOUT)


def _identify(
    handles: Sequence[EngineHandle | TrainHandle], stage: str, timeout_s: float, placement: Placement
) -> None:
    """Wait until the processes of all `handles` answer, and store their names, process ids, hosts and GPUs. Raises
    ActorFailed if one is not where `placement` has it."""
    infos = _started([handle.ping() for handle in handles], stage, timeout_s)
    for handle, info in zip(handles, infos, strict=True):
        handle.info = info
    check_reports(placement, infos)


def _build(host: str, generators: Sequence[EngineHandle], workers: Sequence[TrainHandle], timeout_s: float) -> None:
    port = 0
    if len(workers) > 1:
        [port] = _started([workers[0].open_rendezvous(host)], "start", timeout_s)
    builds = [handle.build() for handle in generators] + [worker.build(host, port) for worker in workers]
    try:
        _started(builds, "start", timeout_s)
    except ActorFailed as error:
        if isinstance(error.cause, ValueError) and not isinstance(error.cause, DataPlaneError):
            raise UserError(str(error.cause)) from error
        raise


def _introduce(engines: EnginePool, rollouts: Sequence[RolloutHandle], timeout_s: float) -> None:
    """Pass the engines to the request router of every rollout actor, and from then on tell the routers which engines
    are left out or taken back."""
    handles = [engine.handle for engine in engines.engines]
    _started([rollout.set_engines(handles) for rollout in rollouts], "start", timeout_s)

    def tell(engine: Engine) -> None:
        if engine.left_out:
            calls = [rollout.remove_engine(engine.handle) for rollout in rollouts]
        else:
            calls = [rollout.add_engine(engine.handle) for rollout in rollouts]
        try:
            _started(calls, "engines", timeout_s)
        except ActorFailed as error:
            if error.cause is None:
                raise
            engines.leave_out(engine, str(error.cause))  # it died again before a router could reach it

    engines.on_change.append(tell)
