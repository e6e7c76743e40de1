"""Starts all processes of a run in five parts, each based on the previous ones, and stops them in reverse order.

    cluster -> places -> data plane -> actors -> roles in GPU memory -> Run

Each part registers its cleanup in one common exit stack as soon as there is something to clean up. Nested generators
would not be safe: an interrupt at any instruction could leave one of them suspended, and its processes running.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...dataplane.factory import connect
from ..cluster.actor_starter import ActorStarter
from ..cluster.calls import DriverMeter
from ..cluster.gpu_bundles import Reservation, reserve_places
from ..cluster.gpu_memory import RolesDecision, decide_roles, smallest_gpu
from ..cluster.lost_hosts import Patience
from ..cluster.places.placement_plan import PlacementRequest
from ..cluster.ray_cluster import Cluster, open_cluster
from ..cluster.run_actors import RunActors
from ..cluster.start_times import StartTimes
from ..cluster.starting_actors import StartingActors
from ..cluster.transport_choice import PAIRS, WeightRoute
from ..cluster.worker_specs import with_packing
from ..config.config import Config
from ..grpo.gpu_turns import BothResident, Roles, TakeTurns
from ..grpo.run_parts import Observers, Run
from ..grpo.stages import Stages
from ..grpo.weight_sync import WeightSync
from ..observe.trace import Tracer
from ..pool.tenant.membership import PoolMembership
from ..supervision.heartbeat import Heartbeat
from .hosts.every_host import Demands, HostChecks, hosts_of
from .listed_processes import ListedProcesses
from .run_plane import Plane, opened
from .under_watchdog import WatchdogProcess

T = TypeVar("T")
CLOSE_TIMEOUT_S = 120.0
"""Seconds within which all processes of a run must have exited after it begins to close."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a run's actors, and the decisions that depend on them."""

    config: Config
    """The configuration, with the values `auto` of `resources.switch_roles` and `trainer.packing` resolved."""
    reservation: Reservation
    route: WeightRoute
    roles: RolesDecision
    membership: PoolMembership | None
    """The run's membership in a pool of GPUs; None if the run has its own GPUs."""
    one_host: bool
    """Whether all processes of the run are on one host, and always will be."""


@contextmanager
def launched(
    config: Config,
    prepare: Callable[[], str],
    tracer: Tracer,
    folder: Path,
    watch: WatchdogProcess | None = None,
    *,
    cluster: Cluster | None = None,
    check: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda line: None,
    times: StartTimes | None = None,
    patience: Patience | None = None,
) -> Iterator[Run]:
    """Context manager that starts Ray, the data plane and all actors, and yields a `Run` that is ready to train. On
    exit, even after an error, it stops everything.

    prepare: function that returns the model, a local folder or hub id; it is called while the actors' processes start.
    watch: the watchdog, which gets the list of processes; None for a run without one. cluster: an open cluster, which
    is closed at the end; None opens one. check: function that raises an error if the run cannot work; it is called once
    the actors' processes are starting. tell: receives sentences for the user. times: records when each part of the
    start has ended. patience: waits for room in the Ray cluster, in a launch that replaces another; with None,
    UserError is raised at once.
    """
    with ExitStack() as stack:
        launch = _Launch(config, folder, watch, times or StartTimes(), stack, patience, tell)
        places = launch.places(launch.cluster(cluster))
        starting = launch.start(places, launch.check_hosts(places))
        check()
        plane = launch.plane(places)
        actors = launch.actors(starting, prepare, plane, places)
        yield launch.run(actors, plane, places, Stages(tracer, launch.heartbeat))


class _Launch:
    """The start of one run's processes. Each method must be called once, in the order of the definitions."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        watch: WatchdogProcess | None,
        times: StartTimes,
        stack: ExitStack,
        patience: Patience | None,
        tell: Callable[[str], None],
    ) -> None:
        self._patience = patience
        self._checks = HostChecks(Demands(config), tell)
        self.heartbeat = Heartbeat() if watch is None else watch.heartbeat
        self._config = config
        self._request = PlacementRequest.of(config)
        self._start_s = config.resources.start_timeout_s
        self._folder = folder
        self._watch = watch
        self._times = times
        self._stack = stack
        self._run_id = uuid.uuid4().hex[:8]
        self._meter = DriverMeter()
        self._ending_actors = ExitStack()
        """Kills the actors when it is closed."""

    def cluster(self, cluster: Cluster | None) -> Cluster:
        """Open a Ray cluster, unless one is given."""
        self._listed = ListedProcesses(self._folder, self._run_id)
        self._stack.callback(self._listed.remove_shared_memory)
        self.heartbeat.enter("starting Ray", 2 * self._start_s)
        config, patient = self._config, self._patience is not None
        cluster = cluster or self._patiently(
            lambda: open_cluster(config.resources, self._request, config.dataplane, check_cpus=not patient)
        )
        self._stack.callback(cluster.close)
        return cluster

    def places(self, cluster: Cluster) -> Places:
        """Reserve the places of all actors, and make the decisions that depend on them. Raises UserError for a weight
        transport that cannot work between these places, before any actor starts."""
        config, membership = self._config, None
        if self._request.pooled:
            membership = PoolMembership(config, self._folder, self.heartbeat, self._run_id)
            self._stack.callback(membership.leave, self._listed.actors)
        self._stack.callback(self._listed.end_actors)
        self._stack.callback(self._ending_actors.close)
        self.heartbeat.enter("placing the actors", 2 * self._start_s)
        if membership is not None:
            reservation = membership.places()
        else:
            reservation = self._patiently(lambda: reserve_places(self._request, self._start_s, self._usable))
        placement = reservation.placement
        elastic, pooled, encrypted = config.resources.elastic, self._request.pooled, config.dataplane.tls
        route = WeightRoute.of(config.sync, placement, pooled=pooled, elastic=elastic, encrypted=encrypted)
        decision = decide_roles(config, placement, smallest_gpu())
        trainer = with_packing(config.trainer, config.model, gpu=placement.layout != "cpu")
        resources = decision.applied_to(config.resources)
        config = config.model_copy(update={"resources": resources, "trainer": trainer})
        return Places(config, reservation, route, decision, membership, one_host=cluster.num_nodes == 1 and not elastic)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`. In a launch after the loss of a host, it is repeated while it lacks room."""
        return attempt() if self._patience is None else self._patience.wait(attempt, self._request.num_cpus)

    def _usable(self, node: str) -> bool:
        """Return whether the run can use a host, given by Ray's id. After the loss of a host, one that the run has not
        used is compared with the others before anything is placed on it: the run would not start with one that differs.
        """
        if self._patience is None or self._config.resources.ray_address is None:
            return True  # The run's own Ray has new ids after a restart.
        return node in [host.node for host in self._patience.hosts] or self._checks.fits(node)

    def check_hosts(self, places: Places) -> HostChecks | None:
        """Compare the hosts of a joined cluster, before anything of the run starts on them. Returns None for a run that
        has its own Ray."""
        if self._config.resources.ray_address is None:
            return None
        self.heartbeat.enter("comparing the hosts", 3 * self._start_s)  # Hosts may be asked twice.
        hosts = hosts_of(places.reservation.placement)
        self._patiently(lambda: self._checks.at_start(hosts, with_notes=self._patience is None))
        return self._checks

    def start(self, places: Places, checks: HostChecks | None) -> StartingActors:
        """Start the processes of all actors, without waiting for them."""
        config, route = places.config, places.route
        membership = places.membership
        starter = ActorStarter(
            config,
            self._meter,
            self._ending_actors,
            places.reservation,
            route,
            one_host=places.one_host,
            **({} if checks is None else {"options": checks.options, "fits": checks.fits}),
            seat_in=membership.seat_in if membership is not None and membership.shares_engines else None,
        )
        return StartingActors(
            starter,
            config.resources,
            config.run.max_restarts,
            self._listed.add_actors,
            first_version=config.first_version,
        )

    def plane(self, places: Places) -> Plane:
        """Open the data plane, and the driver's client of it."""
        self.heartbeat.enter("starting the data plane", self._start_s)
        config, placement = places.config, places.reservation.placement
        listening = config.listening(one_host=places.one_host)
        dataplane = config.dataplane.with_sampler(config.resolved_sampler)
        plane = self._stack.enter_context(opened(dataplane, placement, self._run_id, listening, self._start_s))
        self._times.mark("data plane")
        client = connect(plane.handle, name="driver")
        self._stack.callback(client.close)
        # The actors use the data plane, so this later callback ends them before it.
        self._stack.callback(self._ending_actors.close)
        self._listed.add_plane(plane)
        if self._watch is not None:
            self._watch.opened(plane.handle)
        return Plane(plane, client)

    def actors(self, starting: StartingActors, prepare: Callable[[], str], plane: Plane, places: Places) -> RunActors:
        """Prepare the model, and build all actors with it."""
        model = prepare()
        self._times.mark("model")
        # The start has four consecutive waits, each with this time limit.
        self.heartbeat.enter("starting the actors", 4 * self._start_s)
        actors = starting.build(model, plane.plane, self._times, places.membership)
        actors.on_left = self._listed.remove_actor

        if self._watch is not None:
            watch = self._watch
            watch.started(actors)
            actors.on_replaced.append(lambda: watch.started(actors))
        self._meter.take()
        self._stack.callback(self.heartbeat.enter, "closing", CLOSE_TIMEOUT_S)
        return actors

    def run(self, actors: RunActors, plane: Plane, places: Places, stages: Stages) -> Run:
        """Combine the parts into a `Run`, and choose whether engines and train workers take turns in GPU memory."""
        config, route, membership = places.config, places.route, places.membership
        cached = (places.roles.take_turns or membership is not None) and route.keeps_in_host
        weights = WeightSync(
            config.sync if membership is None else config.sync.model_copy(update={"cache": True}),
            actors.workers,
            actors.engines,
            lasting=route.lasting,
            in_cache=0 if cached else None,
            adapter=config.sends_adapter,
            every_rank=route.kind == PAIRS,
        )
        roles: Roles = BothResident(weights)
        if places.roles.take_turns:
            roles = TakeTurns(
                actors,
                weights,
                stages,
                timeout_s=config.resources.stage_timeout_s,
                residual_bytes=config.residual_mib << 20,
                bucket_bytes=route.send_buffer_bytes,
            )
        if membership is not None:
            progress = connect(plane.plane.handle, name="pool")
            self._stack.callback(progress.close)
            roles = membership.roles(actors, weights, stages, progress, route.send_buffer_bytes)
            self._stack.callback(membership.tenant.stop)
        observers = Observers.of(plane.client, self._folder, self._meter)
        return Run.of(config, plane.client, actors, roles, weights, stages, observers, roles_note=places.roles.why)
