"""Holds the actors of a run, and replaces those that have died."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from ...actors.process.own_process import ActorInfo
from ...actors.weight_sync.base_offer import WeightOffer
from ...codecs.schema import Field
from ...dataplane.errors import DataPlaneError
from .actor_starter import ActorStarter, Started, build, identify, introduce_teachers, started
from .calls import ActorFailed, ended, gather_each
from .engine_pool import Engine, EnginePool, NoEngineLeft
from .handles import EngineHandle, RolloutHandle, TrainHandle
from .lost_hosts import HostGone, gone, host_of, in_words
from .places.placement import ON_CPUS, Host, Placement
from .start_times import StartTimes

_log = logging.getLogger(__name__)
OFFER_S = 5.0
"""Largest number of seconds that an engine may take to answer that it sends the base of its adapters."""
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
    notes: tuple[str, ...]
    """Sentences for the user about the prompts, such as how many were left out, and about what the train workers do."""
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
    pictures: Field | None = None
    """Declaration of the rows' column of pictures; None if prompts have none."""
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
        identify([handle], "replace", self.start_timeout_s, self.placement, self.on_started)
        started([handle.build()], "replace", self.start_timeout_s)
        if not self.engines.embedded and isinstance(handle, RolloutHandle):
            engines = [engine.handle for engine in self.engines.active if not engine.dead]
            started([handle.set_engines(engines)], "replace", self.start_timeout_s)
            away = [engine.handle for engine in self.engines.engines if engine.asleep or engine.left_out]
            started([handle.suspend_engine(engine, True) for engine in away], "replace", self.start_timeout_s)
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

    def restart_workers(self) -> list[str]:
        """Kill all train workers, then start and build new ones with the run's first weights. The handles in `workers`
        then refer to the new workers. Returns sentences about where they have read the base of their adapter.

        Workers of a host that is gone start on other hosts. Raises ActorFailed if the new workers do not start, and at
        once if no other host has room.
        """
        if lost := self._without_place(self.workers):
            raise ActorFailed(f"start: {in_words(lost)}, and no other host has room for its train workers", died=True)
        for worker in self.workers:
            worker.kill("was ended, because all train workers are started again")
            worker.restart()
        identify(self.workers, "start", self.start_timeout_s, self.placement, self.on_started)
        with self._base_offered() as offer:
            build([], self.workers, self.start_timeout_s, StartTimes(), offer)
        introduce_teachers(self.teachers, self.workers, self.start_timeout_s)
        self._tell()
        return [f"{worker.info.name} {worker.built.note}" for worker in self.workers if worker.built is not None]

    @contextmanager
    def _base_offered(self) -> Iterator[WeightOffer | None]:
        """Context in which an engine sends the base of its adapters to train workers. It yields where, or None if no
        engine can, or no worker wants it."""
        first = self.workers[0]
        wanted = first.built is not None and first.setup.sync.recover != "off"
        alive = (one for one in self.engines.engines if not (one.left_out or one.dead))
        for handle in [one.handle for one in alive if wanted]:
            [offer] = gather_each([handle.offer_base()], "offer", OFFER_S)
            if isinstance(offer, WeightOffer):
                try:
                    yield offer
                finally:
                    gather_each([handle.end_offer()], "offer", OFFER_S)
                return
        yield None

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
