"""Reserves whole GPUs for a run in Ray, and derives the Ray options that give each actor its GPUs.

    read_hosts -> plan_placement -> a placement group with a bundle for each GPU -> which GPU is each bundle? -> seats

Ray never reports which GPU it has assigned to a bundle, so a short task inside each bundle finds out. An actor takes a
small fraction of one bundle's GPU, so that an engine and a train worker can share the GPU, and sees all GPUs assigned
to it (`actors/process/own_process.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ...actors.process.own_process import ActorInfo
from ..errors import UserError
from .calls import ActorFailed
from .places.placement import Host, Placement, Seat, used_gpus, with_reserved_gpus
from .places.placement_plan import PlacementRequest, plan_placement

GPU_SHARE = 0.01
"""Fraction of a bundle's GPU that each actor in the bundle requests from Ray."""
SETTLE_S = 15.0
"""Seconds within which Ray must register that the GPUs of an ended run are free."""
LOOK_S = 0.25
"""Seconds between two queries to Ray for free resources."""
NODE_LABEL = "ray.io/node-id"
"""Ray's node label that ties a bundle to a node."""
BY_START_TIMEOUT = "resources.start_timeout_s"
"""Config key of the time limit for the whole reservation, as error messages name it."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The places of a run's actors, reserved in Ray."""

    placement: Placement
    group: PlacementGroup | None = None
    """Ray's placement group with all bundles; None for a run without GPUs, which reserves nothing."""
    bundles: Mapping[str, int] = field(default_factory=dict)
    """Name of each actor -> index of its bundle in `group`. An actor without a bundle is placed outside the group."""
    groups: Mapping[str, PlacementGroup] = field(default_factory=dict)
    """Name of each actor with a placement group of its own, in place of `group` -> that group. These are actors that
    were moved from a lost host, engines that joined later, and all engines of an elastic run."""

    def options(self, seat: Seat) -> dict[str, Any]:
        """Return Ray's options for the actor of `seat`. A process that replaces the actor's process gets the same
        options."""
        strategy: Any
        if self.group is None:
            if seat.host is None or len(self.placement.hosts) == 1:
                return {"num_cpus": seat.cpus}
            # The affinity is soft, so that an actor whose host is lost is replaced on another one.
            strategy = NodeAffinitySchedulingStrategy(self.placement.hosts[seat.host].node, soft=True)
            return {"num_cpus": seat.cpus, "scheduling_strategy": strategy}
        if seat.name in self.bundles:
            bundle = self.bundles[seat.name]
            strategy = PlacementGroupSchedulingStrategy(
                self.groups.get(seat.name, self.group), placement_group_bundle_index=bundle
            )
        else:
            assert seat.host is not None, "in a run with GPUs every actor has a host"
            strategy = NodeAffinitySchedulingStrategy(self.placement.hosts[seat.host].node, soft=False)
        return {"num_cpus": seat.cpus, "num_gpus": GPU_SHARE if seat.gpus else 0, "scheduling_strategy": strategy}

    def devices(self, seat: Seat) -> tuple[str, ...] | None:
        """Return CUDA's names of the GPUs that the actor of `seat` can see. The result is None in a run without GPUs,
        which leaves the environment unchanged."""
        return seat.devices if self.placement.num_gpus else None

    def without(self, name: str) -> Reservation:
        """Return the places of the other actors after the engine in actor `name` has ended. Its GPUs are given back if
        they were reserved for it alone."""
        if (group := self.groups.get(name)) is not None:
            remove_placement_group(group)
        engines = tuple(seat for seat in self.placement.engines if seat.name != name)
        groups = {other: group for other, group in self.groups.items() if other != name}
        return replace(self, placement=replace(self.placement, engines=engines), groups=groups)

    def with_engines(self, seats: Sequence[Seat], deadline: float) -> Reservation:
        """Return the places with further engines. seats: their seats, whose GPUs can be any of their hosts. Raises
        UserError or ActorFailed if Ray does not give the GPUs before the deadline."""
        placed = {seat.name: seat for seat in seats}
        groups = reserve_apart(self.placement.hosts, placed, deadline)
        placement = replace(self.placement, engines=(*self.placement.engines, *placed.values()))
        bundles = {**self.bundles, **dict.fromkeys(groups, 0)}
        return replace(self, placement=placement, bundles=bundles, groups={**self.groups, **groups})

    def with_host(self, host: Host) -> tuple[Reservation, int]:
        """Return the places with `host` among the hosts, and its index."""
        hosts = self.placement.hosts
        index = next((index for index, one in enumerate(hosts) if one.node == host.node), len(hosts))
        if index < len(hosts):
            return self, index
        return replace(self, placement=replace(self.placement, hosts=(*hosts, host))), index


def reserve_places(
    request: PlacementRequest, timeout_s: float, usable: Callable[[str], bool] = lambda node: True
) -> Reservation:
    """Place all actors on the GPUs that are free in Ray, and reserve these until this process leaves Ray. Ray then
    frees the GPUs by itself, even after a crash. They are not freed earlier, because a call to a Ray that has ended
    would not return. usable: returns whether the run can use a node, given by Ray's id. Raises UserError if the run
    cannot be placed or Ray does not give the GPUs within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    placement = _plan(request, deadline, usable)
    if placement.layout == "cpu":
        return Reservation(placement)
    reservation = _reserve(placement, deadline, exact=request.mapped, elastic=request.elastic)
    if reservation is not None:
        return reservation
    # Ray assigned GPUs other than those that the user has named. With all other GPUs blocked, Ray can only assign the
    # named ones.
    with ExitStack() as blocked:
        _block_others(placement, deadline, blocked)
        reservation = _reserve(placement, deadline, exact=True)
    if reservation is None:
        raise UserError(
            "resources.trainer_gpus: another job took some of these GPUs, or of those in resources.rollout_gpus, "
            "during the start, expected all to stay free"
        )
    return reservation


def check_reports(placement: Placement, infos: Sequence[ActorInfo]) -> None:
    """Raise ActorFailed if an actor reports a host or GPUs that differ from those of its seat. A no-op for a run
    without GPUs."""
    if placement.layout == "cpu":
        return
    seats = {seat.name: seat for seat in placement.seats}
    for info in infos:
        seat = seats[info.name]
        assert seat.host is not None, "in a run with GPUs every actor has a host"
        host = placement.hosts[seat.host].name
        if (info.host, info.gpus) != (host, seat.devices):
            raise ActorFailed(
                f"start: {info} reports the GPUs {list(info.gpus)} of {info.host}, expected {list(seat.devices)} of "
                f"{host}, where the run has placed it"
            )


def read_hosts() -> tuple[Host, ...]:
    """Return the live nodes of the Ray cluster with the free GPUs and CPUs of each, the driver's node first."""
    free = ray_state.available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]),
    )
    return tuple(
        Host(
            name=node["NodeManagerHostname"],
            num_gpus=int(node["Resources"].get("GPU", 0)),
            # Ray reports only how many GPUs are free. Their numbers are corrected after the GPUs are reserved.
            free_gpus=tuple(range(int(free.get(node["NodeID"], {}).get("GPU", 0)))),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            node=node["NodeID"],
            has_driver=node["NodeID"] == here,
        )
        for node in nodes
    )


# ---------------- These functions plan the placement.


def _plan(request: PlacementRequest, deadline: float, usable: Callable[[str], bool]) -> Placement:
    """Return a placement on the free GPUs and CPUs. If the run would fit on an idle cluster, retries for SETTLE_S
    seconds, because Ray notices late that actors have ended. Raises UserError if the run does not fit."""
    deadline = min(deadline, time.monotonic() + SETTLE_S)
    while True:
        hosts = [host for host in read_hosts() if usable(host.node)]
        try:
            return _plan_on(request, hosts)
        except UserError:
            if time.monotonic() > deadline or not _fits_when_idle(request, hosts):
                raise
            time.sleep(LOOK_S)


def _plan_on(request: PlacementRequest, hosts: Sequence[Host]) -> Placement:
    """Return a placement on `hosts`. GPUs that the user's map names count as free if their host has at least that many
    free GPUs. Whether exactly these are free shows when they are reserved."""
    if not request.mapped:
        return plan_placement(request, hosts)
    placement = plan_placement(request, [replace(host, free_gpus=tuple(range(host.num_gpus))) for host in hosts])
    for index, gpus in used_gpus(placement).items():
        free = len(hosts[index].free_gpus)
        if len(gpus) > free:
            raise UserError(
                f"resources.trainer_gpus: got, together with resources.rollout_gpus, {len(gpus)} GPU(s) of "
                f"{hosts[index].name}, expected at most {free}, because other jobs hold the rest of its "
                f"{hosts[index].num_gpus}"
            )
    return placement


def _fits_when_idle(request: PlacementRequest, hosts: Sequence[Host]) -> bool:
    total = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes()}
    try:
        plan_placement(
            request,
            [replace(host, free_gpus=tuple(range(host.num_gpus)), free_cpus=total[host.node]) for host in hosts],
        )
    except UserError:
        return False
    return True


# ---------------- These functions reserve GPUs in placement groups.


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle of a placement group."""

    host: int
    """Index of the host that the bundle is tied to."""
    resources: dict[str, float]
    """Resources that the bundle reserves: Ray's name -> amount."""


def _reserve(placement: Placement, deadline: float, *, exact: bool, elastic: bool = False) -> Reservation | None:
    """Reserve the places of all actors in one placement group, so that Ray gives all of them or none.

    exact: whether exactly the GPUs of the placement must be reserved. If Ray then assigns other GPUs, they are freed
    and None is returned. If false, the actors use whichever GPUs Ray assigns. elastic: whether engines whose GPUs are
    theirs alone get a group each, so that these GPUs are given back when an engine leaves the run.
    """
    lone = placement.engines if elastic and not placement.shared else ()
    placement = replace(placement, engines=()) if lone else placement
    used = used_gpus(placement)
    places = [(host, gpu) for host, gpus in used.items() for gpu in gpus]
    cpus = dict.fromkeys(places, 0)
    for seat in placement.seats:
        if seat.host is not None and seat.gpus:
            cpus[seat.host, seat.gpus[0]] += seat.cpus
    bundles = [Bundle(host, {"GPU": 1, "CPU": cpus[host, gpu]}) for host, gpu in places]
    bundles += [Bundle(seat.host or 0, {"CPU": seat.cpus}) for seat in placement.rollouts]
    with ExitStack() as kept:
        group = create_group(placement.hosts, bundles, deadline, kept)
        told = tell_gpus([(group, index) for index in range(len(places))], deadline)
        given: dict[int, dict[int, str]] = {host: {} for host in used}
        index_of: dict[tuple[int, int], int] = {}
        for index, ((host, _), (number, device)) in enumerate(zip(places, told, strict=True)):
            given[host][number] = device
            index_of[host, number] = index
        if exact and {host: sorted(numbers) for host, numbers in given.items()} != used:
            return None
        placed = with_reserved_gpus(placement, given)
        seats = {seat.name: seat for seat in (*placed.engines, *placed.teachers, *placed.ranks)}
        found = {name: index_of[seat.host, seat.gpus[0]] for name, seat in seats.items() if seat.host is not None}
        found |= {seat.name: len(places) + index for index, seat in enumerate(placed.rollouts)}
        reservation = Reservation(placed, group, found).with_engines(lone, deadline)
        kept.pop_all()  # The group outlives this block.
        return reservation


def reserve_apart(hosts: Sequence[Host], seats: dict[str, Seat], deadline: float) -> dict[str, PlacementGroup]:
    """Reserve the GPUs of `seats` in a placement group for each, and enter the GPUs that Ray gives into the seats.
    Returns the groups by the actors' names. Raises UserError or ActorFailed at the deadline."""
    groups = dict[str, PlacementGroup]()
    with ExitStack() as stack:
        for name, seat in seats.items():
            if not seat.gpus:
                continue
            assert seat.host is not None, "every moved actor has a host"
            bundles = [Bundle(seat.host, {"GPU": 1, "CPU": 0 if n else seat.cpus}) for n in range(len(seat.gpus))]
            groups[name] = create_group(hosts, bundles, deadline, stack)
            told = sorted(tell_gpus([(groups[name], index) for index in range(len(bundles))], deadline))
            seats[name] = replace(
                seat, gpus=tuple(number for number, _ in told), devices=tuple(device for _, device in told)
            )
        stack.pop_all()  # The groups outlive this block.
    return groups


def _block_others(placement: Placement, deadline: float, stack: ExitStack) -> None:
    """Take all free GPUs of the placement's hosts that the placement does not use. Closing `stack` frees them.

    Raises UserError if another job holds a GPU that the placement uses.
    """
    wanted = {(host, gpu) for host, gpus in used_gpus(placement).items() for gpu in gpus}
    given: dict[tuple[int, int], ExitStack] = {}
    settled = min(deadline, time.monotonic() + SETTLE_S)
    while missing := sorted(wanted - given.keys()):
        taken = []
        free = {host.node: len(host.free_gpus) for host in read_hosts()}
        for host in used_gpus(placement):
            for _ in range(free.get(placement.hosts[host].node, 0)):
                kept = stack.enter_context(ExitStack())
                group = create_group(placement.hosts, [Bundle(host, {"GPU": 1})], deadline, kept)
                taken.append((host, kept, group))
        told = tell_gpus([(group, 0) for _, _, group in taken], deadline)
        given |= {(host, number): kept for (host, kept, _), (number, _) in zip(taken, told, strict=True)}
        if not taken and time.monotonic() > settled:
            host, gpu = missing[0]
            raise UserError(
                f"resources.trainer_gpus or resources.rollout_gpus: got GPU {gpu} of {placement.hosts[host].name}, "
                "expected a free one, but another job holds it"
            )
        time.sleep(LOOK_S)
    for place in wanted:
        given[place].close()


def create_group(
    hosts: Sequence[Host],
    bundles: Sequence[Bundle],
    deadline: float,
    stack: ExitStack,
    *,
    name: str = "",
    key: str = "resources.layout",
    bound: str = BY_START_TIMEOUT,
) -> PlacementGroup:
    """Create a placement group, each bundle on its host, and wait until Ray has reserved it. Closing `stack` removes
    the group; Ray also removes it when this process disconnects.

    name: name of the group in this process's Ray namespace, for other processes; "" for none. key, bound: config keys
    or options that request the GPUs and set the deadline, for the error message. Raises UserError at the deadline.
    """
    began = time.monotonic()
    group = placement_group(
        [{name: amount for name, amount in bundle.resources.items() if amount} for bundle in bundles],
        strategy="PACK",
        name=name,
        bundle_label_selector=[{NODE_LABEL: hosts[bundle.host].node} for bundle in bundles],
    )
    stack.callback(remove_placement_group, group)
    while not group.wait(1):  # The waits are short, because Ray blocks signals during each wait.
        if time.monotonic() > deadline:
            count = sum(bundle.resources.get("GPU", 0) for bundle in bundles)
            raise UserError(
                f"{key}: Ray did not give {count:g} whole GPU(s) with their logical CPUs within "
                f"{time.monotonic() - began:.0f} s ({bound}), expected them to be free; "
                "`ray status` shows which are in use"
            )
    return group


def tell_gpus(bundles: Sequence[tuple[PlacementGroup, int]], deadline: float) -> list[tuple[int, str]]:
    """Return the GPU of each bundle, as (number on its host, CUDA's name). Bundles are given as (group, index). Raises
    ActorFailed if Ray's workers do not answer before the deadline."""

    # A nested function is sent by value, so a Ray worker runs it without importing this package.
    def tell() -> tuple[int, str]:
        import ray
        from ray._private import worker

        [gpu] = ray.get_gpu_ids()
        names = worker.global_worker.original_visible_accelerator_ids.get("GPU")
        return (int(gpu) if names is None else list(names).index(str(gpu))), str(gpu)

    references = [
        ray.remote(num_cpus=0, num_gpus=1, max_calls=0, max_retries=0)(tell)
        .options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index))
        .remote()
        for group, index in bundles
    ]
    try:
        return ray.get(references, timeout=max(1.0, deadline - time.monotonic()))
    except RayError as error:
        raise ActorFailed(f"start: Ray's workers did not report their GPUs ({BY_START_TIMEOUT}): {error}") from error
