"""Describes hosts, and the places of a run's actors on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Layout = Literal["colocated", "separate", "cpu"]
TEACHER_ACTOR = "teacher "
"""Beginning of the name of an actor with the engine of a teacher, before the teacher's name."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host, with the GPUs and CPUs that the run can use."""

    name: str
    """Name of the host in tables and errors."""
    num_gpus: int
    """Number of the host's GPUs, including GPUs held by other jobs."""
    free_gpus: tuple[int, ...]
    """Numbers of the GPUs that the run can use, ascending; the host's GPUs are counted from 0."""
    free_cpus: float
    """Number of logical CPUs that the run can use."""
    node: str = ""
    """Ray's id of the host's node; "" in a plan without Ray."""
    has_driver: bool = False
    """Whether the driver is on this host."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Place of one actor."""

    name: str
    """Name of the actor, such as `train worker 0`."""
    cpus: int
    """Number of logical CPUs that the actor requests from Ray."""
    host: int | None = None
    """Index of the actor's host in `Placement.hosts`; None if Ray chooses the host."""
    gpus: tuple[int, ...] = ()
    """Numbers of the actor's GPUs on its host, ascending; () for an actor without GPUs."""
    devices: tuple[str, ...] = ()
    """CUDA's names of the GPUs in `gpus`, as in CUDA_VISIBLE_DEVICES; () before Ray has reserved the GPUs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Places of all actors of a run."""

    layout: Layout
    """`colocated` if any GPU holds both an engine and a train worker, `separate` if none does, `cpu` for a run without
    GPUs."""
    sentence: str
    """The layout and the reason for it, in one sentence for the user."""
    hosts: tuple[Host, ...] = ()
    """All hosts, the driver's first, or in the order of a pool. GPU numbers count over all hosts in this order."""
    engines: tuple[Seat, ...] = ()
    """Seats of the actors with an engine, in the order of the engines."""
    ranks: tuple[Seat, ...] = ()
    """Seats of the train workers, in the order of ranks."""
    rollouts: tuple[Seat, ...] = ()
    """Seats of the rollout actors without an engine; () when rollout actors embed the engines."""
    teachers: tuple[Seat, ...] = ()
    """Seats of the actors with the engine of a teacher, in the order of the teachers."""

    @property
    def shared_gpus(self) -> tuple[int, ...]:
        """Numbers of the GPUs that hold both an engine process and a train rank, counted over all hosts."""
        engines = {gpu for seat in (*self.engines, *self.teachers) for gpu in self.numbers(seat)}
        return tuple(sorted(gpu for seat in self.ranks for gpu in self.numbers(seat) if gpu in engines))

    @property
    def shared(self) -> bool:
        """True when any GPU holds both an engine process and a train rank."""
        return bool(self.shared_gpus)

    @property
    def one_host(self) -> bool:
        """True when all engines and train ranks are certain to be on one host. Teachers get no weights."""
        hosts = {seat.host for seat in (*self.engines, *self.ranks)}
        return len(self.hosts) == 1 or (len(hosts) == 1 and None not in hosts)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ray's ids of the nodes of the run, which are the driver's, then those with an actor. Other nodes of the
        cluster are not used. All nodes count as used if Ray chooses the host of an actor."""
        return self._nodes_of(self.seats, with_driver=True)

    @property
    def row_nodes(self) -> tuple[str, ...]:
        """Ray's ids of the nodes on which rows are made or read. They are those of rollout actors, of engines in
        rollout actors, and of train workers."""
        return self._nodes_of((*(self.rollouts or self.engines), *self.ranks), with_driver=False)

    @property
    def directory_node(self) -> str:
        """Ray's id of the node for the directory: the driver's, else that of train rank 0; "" if Ray chooses it."""
        drivers = [host.node for host in self.hosts if host.has_driver]
        return next(iter((*drivers, *self._nodes_of(self.ranks[:1], with_driver=False))), "")

    def _nodes_of(self, seats: Sequence[Seat], *, with_driver: bool) -> tuple[str, ...]:
        used = {seat.host for seat in seats}
        found = [
            host
            for index, host in enumerate(self.hosts)
            if index in used or None in used or with_driver and host.has_driver
        ]
        return tuple(host.node for host in sorted(found, key=lambda host: not host.has_driver) if host.node)

    @property
    def num_gpus(self) -> int:
        """Number of the GPUs of all hosts, used or not."""
        return sum(host.num_gpus for host in self.hosts)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Seats of all actors."""
        return (*self.engines, *self.teachers, *self.ranks, *self.rollouts)

    def seat(self, name: str) -> Seat:
        """Return the seat of the actor `name`. Raises KeyError if it has none."""
        return {seat.name: seat for seat in self.seats}[name]

    def numbers(self, seat: Seat) -> tuple[int, ...]:
        """Return the numbers of a seat's GPUs, counted over all hosts."""
        if seat.host is None:
            return ()
        first = sum(host.num_gpus for host in self.hosts[: seat.host])
        return tuple(first + gpu for gpu in seat.gpus)


ON_CPUS = Placement("cpu", "on CPUs")
"""Placement without hosts and seats, for a run on CPUs only."""


def with_reserved_gpus(placement: Placement, reserved: Mapping[int, Mapping[int, str]]) -> Placement:
    """Return `placement` on the reserved GPUs, whose numbers can differ from the planned ones.
    reserved: index of the host -> number of the GPU on that host -> CUDA's name of the GPU. For each host it must have
    as many GPUs as the placement uses there."""
    numbers = {
        (host, gpu): number
        for host, planned in used_gpus(placement).items()
        for gpu, number in zip(planned, sorted(reserved[host]), strict=True)
    }

    def moved(seat: Seat) -> Seat:
        if seat.host is None or not seat.gpus:
            return seat
        gpus = tuple(numbers[seat.host, gpu] for gpu in seat.gpus)
        return replace(seat, gpus=gpus, devices=tuple(reserved[seat.host][gpu] for gpu in gpus))

    kinds = {"engines": placement.engines, "teachers": placement.teachers, "ranks": placement.ranks}
    return replace(placement, **{kind: tuple(map(moved, seats)) for kind, seats in kinds.items()})


def used_gpus(placement: Placement) -> dict[int, list[int]]:
    """Return the GPUs that the placement uses: index of the host -> numbers on that host, ascending."""
    used: dict[int, set[int]] = {}
    for seat in placement.seats:
        if seat.host is not None and seat.gpus:
            used.setdefault(seat.host, set()).update(seat.gpus)
    return {host: sorted(gpus) for host, gpus in sorted(used.items())}
