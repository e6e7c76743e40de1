"""Starts the actors of a run, builds them in parallel, connects engines with rollout actors, and replaces dead ones."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, TypeVar, cast

import ray
from ray.actor import ActorHandle as RayActor

from ...actors.early_actors import EarlyEngineActor, EarlyTrainActor
from ...actors.engine_actor import CONCURRENCY, EngineActor, EngineSetup
from ...actors.process.own_process import ActorInfo
from ...actors.rollout.actor import RolloutActor
from ...actors.shared_engine import SeatOf
from ...actors.train.actor import CONCURRENCY_GROUPS
from ...dataplane.errors import DataPlaneError
from ...dataplane.factory import DataPlane
from ...dataplane.handle import DataPlaneHandle
from ...dataplane.imports import shipped_objects
from ..config.config import Config, ResourcesConfig
from ..errors import UserError
from .calls import ActorFailed, ActorHandle, Call, DriverMeter, ended, gather, gather_each
from .engine_pool import Engine, EnginePool, NoEngineLeft
from .engine_specs import engine_ahead, engine_config, teacher_engine, threads
from .gpu_bundles import Reservation, check_reports
from .handles import EngineHandle, RolloutHandle, SeatHandle, TrainHandle
from .lost_hosts import HostGone, gone, host_of, in_words, moved
from .placement import ON_CPUS, TEACHER_ACTOR, Host, Placement, PlacementRequest, Seat
from .rollout_specs import rollout_setup
from .start_times import StartTimes
from .transport_choice import WeightRoute
from .worker_specs import worker_modules, worker_setup

H = TypeVar("H", bound=ActorHandle)
T = TypeVar("T")
Spec = Callable[..., Any]
"""Function that returns an actor's settings. Its keyword arguments are `model` (a local folder or hub id) and `handle`
(that of the data plane)."""

Started = Callable[[Sequence[ActorInfo]], None]
"""Function that receives processes which have started and use no GPU yet."""

_log = logging.getLogger(__name__)
BY_START_TIMEOUT = "resources.start_timeout_s"
"""Config key of the time limit for each wait during an actor's start, as error messages name it."""
ASK_AGAIN_S = 0.2
"""Seconds between two health queries to the same actor."""


@dataclass(slots=True)
class RunActors:
    """All actors of a run, with the means to replace them."""

    engines: EnginePool
    rollouts: list[RolloutHandle]
    """The rollout actors. If they embed the engines, they are also the actors behind `engines`."""
    workers: list[TrainHandle]
    """The train workers, in rank order."""
    max_replaced: int
    """Largest number of rollout actors and engines that may be replaced, counted together."""
    data_notes: tuple[str, ...]
    """Sentences for the user about the prompts, such as how many were left out."""
    start_timeout_s: float
    """Largest number of seconds for each part of an actor's start (`resources.start_timeout_s`)."""
    placement: Placement = ON_CPUS
    """Host and GPUs of each actor. A replacement process uses the same host and GPUs."""
    replaced: int = 0
    """Number of rollout actors and engines that died and were replaced."""
    on_replaced: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that run after the process of an actor was replaced by another."""
    on_death: list[Callable[[str], None]] = field(default_factory=list)
    """Callbacks that receive a sentence about a death, before the actor is replaced."""
    on_started: Started = lambda infos: None
    """Callback that receives the new processes of actors before they are built."""
    teachers: list[EngineHandle] = field(default_factory=list)
    """The actors with engines of teachers. None of them is replaced alone: if one dies, the run starts again."""
    move: Callable[[Sequence[str]], Placement | None] = lambda names: None
    """Function that gives actors, by name, places on hosts with room. Returns the new placement, or None if there is no
    room for all of them."""
    ensure_unit: Callable[[str], None] = lambda node: None
    """Function that starts a storage unit on a node of Ray, by its id, unless it has one; `DataPlane.ensure_unit`."""
    away: list[EngineHandle] = field(default_factory=list)
    """The rollout actors and engines whose host is gone, and for which no other host has had room yet."""
    on_away: list[Callable[[str], None]] = field(default_factory=list)
    """Callbacks that receive a sentence about an actor when it is added to `away`."""
    on_left: Callable[[str], None] = lambda name: None
    """Function that receives the name of an actor that has left the run."""
    starter: ActorStarter | None = None
    """Starts more actors while the run goes on; None in tests without processes."""

    @property
    def handles(self) -> list[EngineHandle | TrainHandle]:
        """Handles of all actors that have a process, without duplicates."""
        hosts = [] if self.engines.embedded else [engine.handle for engine in self.engines.engines]
        every: list[EngineHandle | TrainHandle] = [*hosts, *self.rollouts, *self.teachers, *self.workers]
        return [handle for handle in every if handle not in self.away]

    @property
    def active_rollouts(self) -> list[RolloutHandle]:
        """The rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        active = [engine.handle for engine in self.engines.active]
        if self.engines.embedded:
            return [rollout for rollout in self.rollouts if rollout in active]
        found = [rollout for rollout in self.rollouts if rollout not in self.away]
        if not found:
            raise NoEngineLeft(f"none of the {len(self.rollouts)} rollout actors is left, because their hosts are gone")
        return found

    @property
    def can_generate(self) -> bool:
        """True if a rollout actor and an engine are left."""
        try:
            return bool(self.active_rollouts)
        except NoEngineLeft:
            return False

    @property
    def may_replace(self) -> bool:
        """True if the limit on replacements allows another one."""
        return self.replaced < self.max_replaced

    def replace(self, handle: EngineHandle, failure: ActorFailed) -> None:
        """Start and build a new process for a rollout actor or engine that died. `handle` then refers to the new
        process.

        The old actor is killed first, because it still runs if only its engine's process died. A new engine serves
        version 0. If the actor's host is gone, the new process is on another host. Raises `failure` if `max_replaced`
        is reached, HostGone if no host has room, and ActorFailed if the new process does not start.
        """
        if not self.may_replace:
            raise failure
        if lost := self._without_place([handle]):
            self._wait_for_host(handle, lost)
        if handle in self.away:
            self.away.remove(handle)
        self.replaced += 1
        _log.warning("replaced: %s", failure)
        for tell in self.on_death:
            tell(str(failure))
        handle.kill(f"is replaced: {failure}")
        handle.restart()
        _identify([handle], "replace", self.start_timeout_s, self.placement, self.on_started)
        _started([handle.build()], "replace", self.start_timeout_s)
        if not self.engines.embedded and isinstance(handle, RolloutHandle):
            engines = [engine.handle for engine in self.engines.active if not engine.dead]
            _started([handle.set_engines(engines)], "replace", self.start_timeout_s)
            away = [engine.handle for engine in self.engines.engines if engine.asleep or engine.left_out]
            _started([handle.suspend_engine(engine, True) for engine in away], "replace", self.start_timeout_s)
        self._tell()

    def find_dead(self, wait_s: float, *, insist: bool) -> list[ActorInfo]:
        """Return the actors, on any host, that Ray reports as dead. Waits up to `wait_s` for the first death.

        insist: whether to query actors that have answered again until the time is over. If false, one answer from each
        actor ends the wait.
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
        then refer to the new workers.

        Workers of a host that is gone start on other hosts. Raises ActorFailed if the new workers do not start, and at
        once if no other host has room.
        """
        if lost := self._without_place(self.workers):
            raise ActorFailed(f"start: {in_words(lost)}, and no other host has room for its train workers", died=True)
        for worker in self.workers:
            worker.kill("was ended, because all train workers are started again")
            worker.restart()
        _identify(self.workers, "start", self.start_timeout_s, self.placement, self.on_started)
        _build([], self.workers, self.start_timeout_s, StartTimes())
        _introduce_teachers(self.teachers, self.workers, self.start_timeout_s)
        self._tell()

    def on_lost_host(self, handle: EngineHandle | TrainHandle) -> bool:
        """Return whether the host of an actor has left the Ray cluster."""
        host = host_of(self.placement, handle.info.name)
        return host is not None and bool(gone([host]))

    def _without_place(self, handles: Sequence[EngineHandle | TrainHandle]) -> list[Host]:
        """Give the actors whose host is gone places on other hosts. Returns the hosts that are gone if there is no room
        elsewhere."""
        places = {handle.info.name: host_of(self.placement, handle.info.name) for handle in handles}
        lost = gone([host for host in places.values() if host is not None])
        if not lost:
            return []
        placement = self.move([name for name, host in places.items() if host in lost])
        if placement is None:
            return lost
        self.placement = placement
        self.ensure_units()
        return []

    def ensure_units(self) -> None:
        """Start a storage unit on each node on which rows are made or read and that has none."""
        if len(self.placement.hosts) == 1:
            return
        nodes = self.placement.row_nodes
        left = [host.node for host in gone([host for host in self.placement.hosts if host.node in nodes])]
        for node in nodes:
            if node in left:
                continue
            try:
                self.ensure_unit(node)
            except (DataPlaneError, ValueError) as error:  # Rows of this host go to units of other hosts.
                _log.warning("no storage unit on node %s: %s", node, error)

    def _wait_for_host(self, handle: EngineHandle, lost: Sequence[Host]) -> NoReturn:
        """Add an actor to `away`, and raise HostGone. `on_away` is called when it is added."""
        sentence = f"{handle.info.name}: {in_words(lost)}, and no other host has room for it"
        if handle not in self.away:
            self.away.append(handle)
            for tell in self.on_away:
                tell(f"{sentence}; the run goes on without it until one has")
        raise HostGone(sentence, died=True)

    def _tell(self) -> None:
        for call in self.on_replaced:
            call()

    def add_engine(self, engine: Engine) -> None:
        """Add an engine that has been built. It gets no requests before `EnginePool.readmit`."""
        self.engines.engines.append(engine)
        if isinstance(engine.handle, RolloutHandle):
            self.rollouts.append(engine.handle)
        self._tell()

    def remove_engine(self, engine: Engine) -> None:
        """End the process of an engine that has no more requests, and free its place."""
        self.engines.engines.remove(engine)
        if engine.handle in self.away:
            self.away.remove(engine.handle)
        if isinstance(engine.handle, RolloutHandle):
            self.rollouts.remove(engine.handle)
        engine.handle.kill("has left the run")
        self.on_left(engine.name)
        if self.starter is not None:
            self.starter.free(engine.name)
            self.placement = self.starter.placement


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
        _identify([*generators, *self.workers], "start", timeout_s, placement, self._on_started)
        times.mark("processes")
        if loan is not None or self._take_turns:
            self._build_in_turns(generators, times, loan)
        else:
            _build(generators, self.workers, timeout_s, times)
        counts = [host.num_workers() for host in self.hosts]
        asked = self.rollouts[0].data_notes()
        pairs = zip(self.hosts, _started(counts, "start", timeout_s), strict=True)
        slept = loan is not None and not loan.shares_engines
        dropped = slept and loan is not None and loan.sleep_level == 2
        first = self._first_version
        found = [Engine(host, count, first, first, asleep=slept, broken=dropped) for host, count in pairs]
        engines = EnginePool(found, self._embedded)
        if not self._embedded:
            _introduce(engines, self.rollouts, timeout_s)
        _introduce_teachers(self.teachers, self.workers, timeout_s)
        [data_notes] = _started([asked], "start", timeout_s)
        actors = RunActors(engines, self.rollouts, self.workers, self._max_replaced, data_notes, timeout_s, placement)
        actors.on_started, actors.teachers, actors.move = self._on_started, self.teachers, self._starter.move
        actors.starter = self._starter
        actors.ensure_unit = plane.ensure_unit
        return actors

    def _build_in_turns(self, generators: Sequence[EngineHandle], times: StartTimes, loan: Loan | None) -> None:
        """Build and offload the train workers, and then build the actors with engines, which need the freed memory. See
        `build`."""
        timeout_s = self._timeout_s
        with nullcontext() if loan is None else loan.holding("train"):
            _build([], self.workers, timeout_s, times)
            if self._starter.route.keeps_in_host:
                _started([worker.cache_weights(0) for worker in self.workers], "start", timeout_s)
            _started([worker.offload() for worker in self.workers], "start", timeout_s)
            if loan is not None:
                loan.expect_freed(self.workers)
        if loan is not None and loan.shares_engines:
            loan = None
        with nullcontext() if loan is None else loan.holding("rollout"):
            _build(generators, [], timeout_s, times)
            if loan is not None:
                # The first wake of engines can need more memory than later ones, and the whole GPU is free for them
                # now.
                _started([host.sleep(loan.sleep_level) for host in self.hosts], "start", timeout_s)
                _started([host.wake() for host in self.hosts], "start", timeout_s)
                _started([host.sleep(loan.sleep_level) for host in self.hosts], "start", timeout_s)
                loan.expect_freed(self.hosts)


class ActorStarter:
    """Starts one actor per call. Closing the caller's exit stack kills all started actors."""

    def __init__(
        self,
        config: Config,
        meter: DriverMeter,
        stack: ExitStack,
        reservation: Reservation,
        route: WeightRoute,
        *,
        one_host: bool,
        options: Callable[[], dict[str, Any]] = dict,
        fits: Callable[[str], bool] = lambda node: True,
        seat_in: Callable[[int], SeatOf] | None = None,
    ) -> None:
        """stack: kills the actors when it is closed. reservation: places of the actors. route: route of the weights
        from train workers to engines. one_host: whether all processes of the run are on one host. options: returns
        more of Ray's options, before each start of an actor. fits: returns whether the run can use a host that it did
        not have at its start, given by Ray's id. seat_in: function that waits for an engine of the pool, by its number,
        and returns the run's seat in it; None for a run with its own engines. `resources.switch_roles` must be decided
        already, so not `auto`.
        """
        self._config = config
        self._meter = meter
        self._stack = stack
        self._specs: list[tuple[ActorHandle, Spec]] = []
        """Each actor started so far, with the function that derives its settings."""
        self.reservation = reservation
        self.placement = reservation.placement
        self.route = route
        self._listening = config.listening(one_host=one_host)
        self._more_options = options
        self.fits = fits
        self._seat_in = seat_in
        on_gpus = self.placement.layout != "cpu" and PlacementRequest.of(config).uses_gpus
        self._device = "cuda:0" if on_gpus else "cpu"
        kind = "scripted" if config.run.replay else config.rollout.engine
        self._ahead = engine_ahead(kind, config.model, self._device)
        """Preparation of an actor with an engine before it has its settings."""
        by_turns = config.resources.switch_roles == "always" or config.pool.address is not None
        self._objects = shipped_objects(config.objects)
        """Pickles of the objects of a script or notebook, by path, which every actor gets at its start."""
        self._shares = self.placement.shared and not by_turns
        """Whether engines and train workers are in the memory of a GPU at the same time."""
        self._settings: dict[str, Any] = {}
        """Arguments of each `Spec`; empty before `configure`."""

    def engine(self, index: int) -> EngineHandle:
        """Start engine actor `index`, or take a seat in that engine of the pool; returns its handle."""
        spec = partial(self._engine_setup, f"engine {index}")
        seat = self.placement.seat(f"engine {index}")
        if self._seat_in is not None:
            handle = SeatHandle(partial(self._seat_in, index), seat.name, self._meter)
            self._stack.callback(handle.kill)
            self._specs.append((handle, spec))
            return handle
        host = (_path(EngineActor), *self._ahead)
        return self._start(EngineHandle, EarlyEngineActor, host, spec, seat, max_concurrency=CONCURRENCY)

    def _engine_setup(self, name: str, model: str, handle: DataPlaneHandle) -> EngineSetup:
        config, device = self._config, self._device
        engine = engine_config(config, name, model, handle, device, shared_gpu=self._shares)
        return EngineSetup(name, threads(config.resources.threads, config.processes_per_side, device), engine)

    def teacher(self, index: int) -> EngineHandle:
        """Start the actor with the engine of the teacher with seat `index`; returns its handle."""
        seat = self.placement.teachers[index]
        host = (_path(EngineActor), *engine_ahead(self._config.rollout.engine, self._config.model, self._device))
        spec = partial(self._teacher_setup, seat.name)
        return self._start(EngineHandle, EarlyEngineActor, host, spec, seat, max_concurrency=CONCURRENCY)

    def _teacher_setup(self, name: str, model: str, handle: DataPlaneHandle) -> EngineSetup:
        own, policy = self._config.distillation, self._engine_setup(name, model, handle)
        teacher = own.in_engines[name.removeprefix(TEACHER_ACTOR)]
        return replace(policy, engine=teacher_engine(policy.engine, teacher, self._config.rollout, own.top_k))

    def embedding_rollout(self, index: int) -> RolloutHandle:
        """Start rollout actor `index`, which embeds engine `index`; returns its handle."""
        spec = partial(rollout_setup, self._config, index, device=self._device, shared_gpu=self._shares)
        host = (_path(RolloutActor), *self._ahead)
        return self._start(RolloutHandle, EarlyEngineActor, host, spec, self.placement.seat(f"rollout {index}"))

    def one_more(self, reservation: Reservation) -> EngineHandle:
        """Start the actor with one more engine while the run goes on; returns its handle. reservation: that of the run,
        whose last engine is the new one."""
        self.reservation, self.placement = reservation, reservation.placement
        rollout = self._config.rollout.model_copy(update={"num_engines": len(self.placement.engines)})
        self._config = self._config.model_copy(update={"rollout": rollout})
        index = int(self.placement.engines[-1].name.rpartition(" ")[2])
        handle = self.engine(index) if self.placement.rollouts else self.embedding_rollout(index)
        handle.setup = self._specs[-1][1](**self._settings)
        return handle

    def free(self, name: str) -> None:
        """Free the place of the engine in actor `name`, which has ended."""
        self.reservation = self.reservation.without(name)
        self.placement = self.reservation.placement

    def rollout(self, index: int) -> RolloutHandle:
        """Start rollout actor `index`, which embeds no engine; returns its handle."""
        spec = partial(rollout_setup, self._config, index, device=None)
        seat = self.placement.rollouts[index]
        return self._start(RolloutHandle, EarlyEngineActor, (_path(RolloutActor), (), False), spec, seat)

    def worker(self, rank: int) -> TrainHandle:
        """Start the train worker of `rank`; returns its handle."""
        spec = partial(worker_setup, self._config, rank, kind=self.route.kind, device=self._device)
        modules, seat = worker_modules(self._config.trainer.backend, self._config.model), self.placement.ranks[rank]
        groups = {"concurrency_groups": CONCURRENCY_GROUPS}
        return self._start(TrainHandle, EarlyTrainActor, (modules,), spec, seat, **groups)

    def configure(self, model: str, plane: DataPlaneHandle) -> None:
        """Store each actor's settings in its handle. model: a local folder or hub id."""
        self._settings = {"model": model, "handle": plane}
        for handle, spec in self._specs:
            handle.setup = spec(**self._settings)
            assert handle.setup.name == handle.info.name, "the plan and the settings number the actors alike"

    def move(self, names: Sequence[str]) -> Placement | None:
        """Give actors, by name, places on hosts with room, where their next processes start. Returns the new placement,
        or None if there is no room for all of them. An engine of a pool keeps its place, and so do actors whose weights
        go through the memory of one host."""
        reservation = (
            None
            if self._seat_in is not None or self.route.kind == "ipc"
            else moved(self.reservation, names, self._config.resources.start_timeout_s, self.fits)
        )
        if reservation is None:
            return None
        self.reservation, self.placement = reservation, reservation.placement
        return self.placement

    def _start(
        self, handle: type[H], host: type, arguments: Sequence[Any], spec: Spec, seat: Seat, **options: Any
    ) -> H:
        """Start the actor of `seat`. host: class of the early actor, with its first arguments. spec: function that
        returns the actor's settings."""

        def start() -> Any:
            place = self.placement.seat(seat.name)
            own = (*arguments, self.reservation.devices(place), os.getcwd(), self._objects, self._listening)
            wanted = {**options, **self.reservation.options(place), **self._more_options()}
            actor = ray.remote(max_restarts=0, **wanted)(host).remote(*own)
            self._stack.callback(ray.kill, cast(RayActor, actor), no_restart=True)
            return actor

        started = handle(start, seat.name, self._meter)
        self._specs.append((started, spec))
        return started


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__name__}"


def _started(
    calls: Sequence[Call[T]], stage: str, timeout_s: float, on_result: Callable[[Call[T]], None] | None = None
) -> list[T]:
    """Wait for calls of the start of actors, and return their results in order. Raises ActorFailed if a call fails or
    takes longer than `timeout_s`; the latter message names `resources.start_timeout_s`. on_result: callback for each
    successful call."""
    return gather(calls, stage, timeout_s, bound=BY_START_TIMEOUT, on_result=on_result)


def _identify(
    handles: Sequence[EngineHandle | TrainHandle],
    stage: str,
    timeout_s: float,
    placement: Placement,
    on_started: Started,
) -> None:
    """Send the new processes of all `handles` their settings, and store the answers. These are names, process ids,
    hosts and GPUs. `on_started` receives them, too. Raises ActorFailed if a process is on another host or other GPUs
    than in `placement`."""
    infos = _started([handle.configure() for handle in handles], stage, timeout_s)
    for handle, info in zip(handles, infos, strict=True):
        handle.info = info
    on_started([handle.info for handle in handles if handle.is_own])
    check_reports(placement, infos)


def _build(
    generators: Sequence[EngineHandle], workers: Sequence[TrainHandle], timeout_s: float, times: StartTimes
) -> None:
    # Generators build while rank 0 opens its rendezvous server.
    builds: list[Call[None]] = [handle.build() for handle in generators]
    meeting_point = None
    if workers and workers[0].setup.has_groups:
        [meeting_point] = _started([workers[0].open_rendezvous()], "start", timeout_s)
    builds += [worker.build(meeting_point) for worker in workers]
    try:
        _started(builds, "start", timeout_s, lambda call: times.mark(call.actor.info.name))
    except ActorFailed as error:
        if isinstance(error.cause, ValueError) and not isinstance(error.cause, DataPlaneError):
            raise UserError(str(error.cause)) from error
        raise


def _introduce_teachers(teachers: Sequence[EngineHandle], workers: Sequence[TrainHandle], timeout_s: float) -> None:
    """Pass the actors with engines of teachers to all train workers."""
    if teachers:
        _started([worker.set_teachers(teachers) for worker in workers], "start", timeout_s)


def _introduce(engines: EnginePool, rollouts: Sequence[RolloutHandle], timeout_s: float) -> None:
    """Pass the engines to the request router of every rollout actor. From then on, report excluded and readmitted
    engines to the routers."""
    handles = [engine.handle for engine in engines.engines]
    _started([rollout.set_engines(handles) for rollout in rollouts], "start", timeout_s)
    asleep = [engine.handle for engine in engines.engines if engine.asleep]
    _started([rollout.suspend_engine(one, True) for rollout in rollouts for one in asleep], "start", timeout_s)

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
