"""Finds another place for the actors of a host that has left the Ray cluster, and waits for room at a restart.

Ray declares a node dead about 30 s after its last sign of life. A node that comes back has a new id.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.util.placement_group import remove_placement_group

from ..errors import UserError
from .calls import ActorFailed
from .gpu_bundles import BY_START_TIMEOUT, Reservation, read_hosts, reserve_apart
from .places.placement import Host, Placement, Seat

T = TypeVar("T")
LOOK_S = 1.0
"""Seconds between two looks at the Ray cluster, and largest number of seconds for a connection to a node."""
NEWS_S = 45.0
"""Largest number of seconds until Ray reports that a host is gone which does not answer."""


class NoRoom(RuntimeError):
    """A run has lost a host or a process, and could not start again on what is left. If the Ray cluster got no room
    within `resources.start_timeout_s`, the message names the host."""


class HostGone(ActorFailed):
    """An actor cannot be replaced now, because its host has left the Ray cluster and no other host has room for it."""


def used_hosts(placement: Placement) -> tuple[Host, ...]:
    """Return the hosts of a run that are nodes of the Ray cluster."""
    return tuple(host for host in placement.hosts if host.node and host.node in placement.nodes)


def host_of(placement: Placement, name: str) -> Host | None:
    """Return the host of the actor `name`; None if Ray chooses it, as in a cluster of one node."""
    seat = next((seat for seat in placement.seats if seat.name == name), None)
    if seat is None or seat.host is None or (placement.layout == "cpu" and len(placement.hosts) == 1):
        return None
    return placement.hosts[seat.host]


def gone(hosts: Sequence[Host]) -> list[Host]:
    """Return those of `hosts` whose node has left the Ray cluster of this process. Waits up to NEWS_S until Ray says so
    of a node that accepts no connection, because an actor that started there meanwhile would fail."""
    until_s = time.monotonic() + NEWS_S
    while True:
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        known = [alive[host.node] for host in hosts if host.node in alive]
        if all(map(_answers, known)) or time.monotonic() >= until_s:
            return [host for host in hosts if host.node not in alive]
        time.sleep(LOOK_S)


def lost_nodes() -> list[str]:
    """Return Ray's ids of the nodes that have left the Ray cluster of this process."""
    return [node["NodeID"] for node in ray.nodes() if not node["Alive"]]


def _answers(node: dict[str, Any]) -> bool:
    """Return whether a node's raylet accepts a connection."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), LOOK_S):
            return True
    except OSError:
        return False


def in_words(hosts: Sequence[Host]) -> str:
    """Return a clause that names hosts which have left, or says that others use the cluster if there are none."""
    names = sorted({host.name for host in hosts})
    if not names:
        return "others use the rest of the Ray cluster"
    return f"host {names[0]} is gone" if len(names) == 1 else f"hosts {', '.join(names)} are gone"


def moved(
    reservation: Reservation, names: Sequence[str], timeout_s: float, fits: Callable[[str], bool] = lambda node: True
) -> Reservation | None:
    """Return `reservation` with new places for the actors `names`, whose hosts are gone. Their places are on hosts with
    free CPUs and GPUs, those that the run uses already first.

    Returns None if there is no room for all of them, and for actors that share a GPU, which only a new start can place.
    timeout_s: seconds within which Ray must give free GPUs. fits: returns whether the run can use a host that it does
    not use yet, given by Ray's id.
    """
    placement = reservation.placement
    hosts, used = list(placement.hosts), set(placement.nodes)
    found = {host.node: host for host in read_hosts()}
    cpus = {node: host.free_cpus for node, host in found.items()}
    gpus = {node: len(host.free_gpus) for node, host in found.items()}
    seats = dict[str, Seat]()
    for seat in placement.seats:
        if seat.name not in names:
            continue
        need = len(seat.gpus)
        rooms = [node for node in found if cpus[node] >= seat.cpus and gpus[node] >= need]
        rooms.sort(key=lambda node: (node not in used, -cpus[node]))
        node = None if need and placement.shared else next((one for one in rooms if one in used or fits(one)), None)
        if node is None:
            return None
        cpus[node], gpus[node] = cpus[node] - seat.cpus, gpus[node] - need
        if node not in [host.node for host in hosts]:
            hosts.append(found[node])
        seats[seat.name] = replace(seat, host=[host.node for host in hosts].index(node))
    try:
        groups = reserve_apart(hosts, seats, time.monotonic() + timeout_s)
    except (UserError, ActorFailed):  # Another job has taken the GPUs meanwhile.
        return None
    for name in seats.keys() & reservation.groups.keys():
        remove_placement_group(reservation.groups[name])  # Ray would give it the GPUs of the host when that returns.
    kinds = ("engines", "ranks", "rollouts", "teachers")
    changed = {kind: tuple(seats.get(seat.name, seat) for seat in getattr(placement, kind)) for kind in kinds}
    return replace(
        reservation,
        placement=replace(placement, hosts=tuple(hosts), **changed),
        bundles={name: index for name, index in reservation.bundles.items() if name not in seats}
        | dict.fromkeys(groups, 0),
        groups={name: group for name, group in reservation.groups.items() if name not in seats} | groups,
    )


@dataclass(frozen=True, slots=True)
class Patience:
    """Waits for room in the Ray cluster when a run starts again, because hosts come back within minutes."""

    hosts: Sequence[Host]
    """Hosts of the start before."""
    limit_s: float
    """Largest number of seconds of the wait (`resources.start_timeout_s`)."""
    tell: Callable[[str], None]
    """Function that shows the user a sentence."""

    def wait(self, attempt: Callable[[], T], num_cpus: int) -> T:
        """Return the result of `attempt`, which is repeated while it raises UserError. num_cpus: number of logical CPUs
        that the run needs. Raises NoRoom when the time is over."""
        began, told = time.monotonic(), ""
        if ray.is_initialized():
            gone(self.hosts)
        while True:
            try:
                return attempt()
            except UserError as error:
                sentence = self._sentence(num_cpus) if ray.is_initialized() else f"waiting for the Ray cluster: {error}"
                if time.monotonic() - began >= self.limit_s:
                    raise NoRoom(
                        f"{BY_START_TIMEOUT}: {sentence} in vain for {self.limit_s:g} s; --resume goes on when there "
                        f"is room ({error})"
                    ) from error
                if sentence != told:
                    self.tell(sentence)
                told = sentence
            time.sleep(LOOK_S)

    def _sentence(self, num_cpus: int) -> str:
        missing = num_cpus - ray.available_resources().get("CPU", 0.0)
        back = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        lost = [host for host in gone(self.hosts) if host.name not in back]
        return f"waiting for {f'{missing:g} logical CPU(s)' if missing > 0 else 'room'}: {in_words(lost)}"
