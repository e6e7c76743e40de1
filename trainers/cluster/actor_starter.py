"""Starts the actors of a run, one per call, and waits for groups of them to start and to be built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle as RayActor

from ...actors.early_actors import EarlyEngineActor, EarlyTrainActor
from ...actors.engine_actor import CONCURRENCY, EngineActor, EngineSetup
from ...actors.process.own_process import ActorInfo
from ...actors.rollout.actor import RolloutActor
from ...actors.shared_engine import SeatOf
from ...actors.train.actor import CONCURRENCY_GROUPS
from ...actors.weight_sync.base_offer import Recovery, WeightOffer
from ...dataplane.errors import DataPlaneError
from ...dataplane.handle import DataPlaneHandle
from ...dataplane.imports import shipped_objects
from ..config.config import Config
from ..errors import UserError
from .calls import ActorFailed, ActorHandle, Call, DriverMeter, gather
from .engine_specs import engine_ahead, engine_config, teacher_engine, threads
from .gpu_bundles import BY_START_TIMEOUT, Reservation, check_reports
from .handles import EngineHandle, RolloutHandle, SeatHandle, TrainHandle
from .lost_hosts import moved
from .places.placement import TEACHER_ACTOR, Placement, Seat
from .places.placement_plan import PlacementRequest
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
        own = {"kind": self.route.kind, "device": self._device, "shares_gpus": self.placement.shared}
        spec = partial(worker_setup, self._config, rank, **own)
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

        begun = handle(start, seat.name, self._meter)
        self._specs.append((begun, spec))
        return begun


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__name__}"


def started(
    calls: Sequence[Call[T]], stage: str, timeout_s: float, on_result: Callable[[Call[T]], None] | None = None
) -> list[T]:
    """Wait for calls of the start of actors, and return their results in order. Raises ActorFailed if a call fails or
    takes longer than `timeout_s`; the latter message names `resources.start_timeout_s`. on_result: callback for each
    successful call."""
    return gather(calls, stage, timeout_s, bound=BY_START_TIMEOUT, on_result=on_result)


def identify(
    handles: Sequence[EngineHandle | TrainHandle],
    stage: str,
    timeout_s: float,
    placement: Placement,
    on_started: Started,
) -> None:
    """Send the new processes of all `handles` their settings, and store the answers. These are names, process ids,
    hosts and GPUs. `on_started` receives them, too. Raises ActorFailed if a process is on another host or other GPUs
    than in `placement`."""
    infos = started([handle.configure() for handle in handles], stage, timeout_s)
    for handle, info in zip(handles, infos, strict=True):
        handle.info = info
    on_started([handle.info for handle in handles if handle.is_own])
    check_reports(placement, infos)


def build(
    generators: Sequence[EngineHandle],
    workers: Sequence[TrainHandle],
    timeout_s: float,
    times: StartTimes,
    offer: WeightOffer | None = None,
) -> None:
    """Build actors, side by side, the workers with the records of their last start. offer: the engine that has the base
    of the workers' adapter; None if they read the model's folder."""
    # Generators build while rank 0 opens its rendezvous server.
    builds: list[Call[Any]] = [handle.build() for handle in generators]
    meeting_point = None
    if workers and workers[0].setup.has_groups:
        [meeting_point] = started([workers[0].open_rendezvous()], "start", timeout_s)
    known = [None if worker.built is None else Recovery(worker.built, offer) for worker in workers]
    builds += [worker.build(meeting_point, recovery) for worker, recovery in zip(workers, known, strict=True)]
    try:
        answers = started(builds, "start", timeout_s, lambda call: times.mark(call.actor.info.name))
    except ActorFailed as error:
        if isinstance(error.cause, ValueError) and not isinstance(error.cause, DataPlaneError):
            raise UserError(str(error.cause)) from error
        raise
    for handle, answer in zip((*generators, *workers), answers, strict=True):
        handle.built = answer


def introduce_teachers(teachers: Sequence[EngineHandle], workers: Sequence[TrainHandle], timeout_s: float) -> None:
    """Pass the actors with engines of teachers to all train workers."""
    if teachers:
        started([worker.set_teachers(teachers) for worker in workers], "start", timeout_s)
