"""Assigns engines and train ranks to the GPUs of hosts, from plain data and without Ray.

    hosts (free GPUs and CPUs) + request -> plan_placement -> Placement, or UserError with the reason

Two NCCL ranks cannot be on one GPU, so a GPU holds at most one train rank and at most one engine process. An engine and
a tensor-parallel group of the trainer are always within one host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from ....actors.train.topology import Topology
from ...config.config import Config
from ...errors import UserError
from .placement import TEACHER_ACTOR, Host, Layout, Placement, Seat


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a run requests from the hosts: the number of its processes, and the user's settings for their GPUs."""

    num_engines: int
    tp: int
    """Number of processes of each engine. Each process needs a GPU, all on one host."""
    num_actors: int | None
    """Number of rollout actors without an engine; None if rollout actors embed the engines."""
    topology: Topology
    """Mesh of the train workers."""
    layout: Literal["auto", "colocated", "separate"]
    """Distribution of the GPUs over engines and train workers, as in `resources.layout`."""
    trainer_gpus: tuple[int, ...] | None
    """GPU of each train worker, numbered over all hosts; None if the placement decides."""
    rollout_gpus: tuple[int, ...] | None
    """GPUs of the engines, one engine after the other; None if the placement decides."""
    uses_gpus: bool
    """Whether engines or train workers use GPUs on hosts that have any."""
    pooled: bool
    """Whether the GPUs belong to a pool, which lends them to one run at a time."""
    shares_engines: bool = False
    """Whether the engines are those of the pool, so that the run starts none."""
    teachers: tuple[str, ...] = ()
    """Names of the actors with the engine of a teacher, each of which has `tp` processes, too."""
    elastic: bool = False
    """Whether engines can leave the run and give their GPUs back (`resources.elastic`)."""
    pictures_mib: int = 0
    """Size in MiB of the pictures that Ray's object store can hold on their way to engine actors. Ray writes further
    ones to disk."""

    @classmethod
    def of(cls, config: Config) -> PlacementRequest:
        """Return the request of the run that `config` describes."""
        rollout, trainer, resources, images = config.rollout, config.trainer, config.resources, config.data.images
        return cls(
            num_engines=rollout.num_engines,
            tp=rollout.tp,
            num_actors=rollout.num_actors,
            topology=trainer.topology,
            layout=resources.layout,
            trainer_gpus=resources.trainer_gpus,
            rollout_gpus=resources.rollout_gpus,
            uses_gpus=not (rollout.engine == "scripted" and trainer.backend == "scripted"),
            pooled=config.pool.address is not None,
            shares_engines=config.shares_engines,
            teachers=tuple(f"{TEACHER_ACTOR}{name}" for name in config.distillation.in_engines),
            elastic=resources.elastic,
            # Those of the prompts in flight come on top of those that the rollout actors keep.
            pictures_mib=2 * images.cache_mib * (rollout.num_actors or 0) if images.enabled else 0,
        )

    @property
    def all_engines(self) -> int:
        """Number of all engines, those of teachers included."""
        return self.num_engines + len(self.teachers)

    @property
    def mapped(self) -> bool:
        """True if the user has set the GPU of each process."""
        return self.trainer_gpus is not None

    @property
    def layouts(self) -> tuple[Literal["colocated", "separate"], ...]:
        """Layouts to try, the best first."""
        return ("separate", "colocated") if self.layout == "auto" else (self.layout,)

    @property
    def num_cpus(self) -> int:
        """Number of logical CPUs that all actors request from Ray if no GPU is shared: one for each process."""
        return self.engine_cpus + self.topology.world + (self.num_actors or 0)

    @property
    def engine_cpus(self) -> int:
        """Number of logical CPUs that the run's own engines, and those of teachers, request if no GPU is shared."""
        return (self.all_engines - self.num_engines * self.shares_engines) * self.tp

    def engine_seat(self, index: int, cpus: int, host: int | None, gpus: tuple[int, ...] = ()) -> Seat:
        """Return the seat of the actor with engine `index`; the teachers' engines follow the others. cpus: logical CPUs
        of each engine process."""
        kind = "rollout" if self.num_actors is None else "engine"
        teacher = index - self.num_engines
        if teacher >= 0:
            return Seat(self.teachers[teacher], cpus * self.tp, host, gpus)
        return Seat(f"{kind} {index}", 0 if self.shares_engines else cpus * self.tp, host, gpus)


def plan_placement(request: PlacementRequest, hosts: Sequence[Host]) -> Placement:
    """Return the places of all actors on `hosts`; the driver's host must be the first. Equal arguments give equal
    placements. Raises UserError with one sentence if the run cannot be placed."""
    hosts = tuple(hosts)
    num_gpus = sum(host.num_gpus for host in hosts)
    if not num_gpus and request.mapped and not request.pooled:  # The GPUs of a pool can be plain numbers without hosts.
        raise UserError(
            f"resources.trainer_gpus: got {list(request.trainer_gpus or ())}, expected it unset, because there is "
            f"no GPU on {_names(hosts)}"
        )
    if not num_gpus or not request.uses_gpus:
        why = "there is no GPU" if not num_gpus else "the engine and the backend are scripted"
        return _on_cpus(request, hosts, why)
    if request.mapped:
        return place_as_mapped(request, hosts)
    for layout in request.layouts:
        counts = _place(layout, request, hosts)
        if counts is not None:
            return _placement(request, hosts, layout, counts)
    raise UserError(_refusal(request, hosts))


def place_as_mapped(request: PlacementRequest, hosts: tuple[Host, ...]) -> Placement:
    """Return the placement that `resources.trainer_gpus` and `resources.rollout_gpus` describe. GPU numbers count over
    all `hosts` in order. Raises UserError if the run cannot be placed so."""
    size, trainer_gpus, rollout_gpus = request.tp, request.trainer_gpus, request.rollout_gpus
    assert trainer_gpus is not None and rollout_gpus is not None, "checks.py demands both"
    trainer = [_find("trainer_gpus", number, hosts) for number in trainer_gpus]
    rollout = [_find("rollout_gpus", number, hosts) for number in rollout_gpus]
    for group in list(train_groups(request.topology))[-1]:
        if len({trainer[rank][0] for rank in group}) > 1:
            raise UserError(
                f"resources.trainer_gpus: got {list(trainer_gpus)}, expected GPUs of one host for the ranks "
                f"{', '.join(map(str, group))}, which are a tensor-parallel group"
            )
    engines = []
    for start in range(0, len(rollout), size):
        part = sorted(rollout[start : start + size])
        host, first = part[0]
        if part != [(host, first + offset) for offset in range(size)]:
            raise UserError(
                f"resources.rollout_gpus: got {list(rollout_gpus[start : start + size])} for engine "
                f"{start // size}, expected {size} neighbouring GPUs of one host (rollout.tp={size})"
            )
        engines.append((host, tuple(gpu for _, gpu in part)))
    reason = "as resources.trainer_gpus and resources.rollout_gpus say"
    placement = _seated(request, hosts, [(host, (gpu,)) for host, gpu in trainer], engines, reason)
    for index, host in enumerate(hosts):
        needed = sum(seat.cpus for seat in placement.seats if seat.host == index)
        if needed > host.free_cpus:
            raise UserError(
                f"resources.trainer_gpus: got processes that need {needed} logical CPUs on {host.name}, expected at "
                f"most {host.free_cpus:g}, which are free there"
            )
    return placement


def train_groups(topology: Topology) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the ways to divide the train ranks into equal groups, best first. Each group must be on one host. Whole
    replicas come first, then the ranks of one pipeline stage, then tensor-parallel groups. Groups are always ordered by
    replica."""
    cuts: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda rank: (topology.place(rank).dp,),
        lambda rank: (topology.place(rank).dp, topology.place(rank).pp),
        lambda rank: (topology.place(rank).dp, topology.place(rank).pp, topology.place(rank).cp),
    )
    sizes = set()
    for cut in cuts:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(topology.world):
            groups.setdefault(cut(rank), []).append(rank)
        if len(groups) not in sizes:
            sizes.add(len(groups))
            yield tuple(tuple(groups[key]) for key in sorted(groups))


# ---------------- These functions choose how many ranks and engines each host gets.


@dataclass(frozen=True, slots=True)
class _Counts:
    groups: tuple[tuple[int, ...], ...]
    """Groups of train ranks, each on one host."""
    train: tuple[int, ...]
    """Number of groups of train ranks on each host."""
    engines: tuple[int, ...]
    """Number of engines on each host."""


def _place(
    layout: str, request: PlacementRequest, hosts: Sequence[Host], smallest: Sequence[tuple[int, ...]] | None = None
) -> _Counts | None:
    """Return the distribution of engines and train ranks over the hosts, or None if they do not fit. A single host for
    the whole run is preferred, then the largest possible groups of train ranks. smallest: groups of train ranks to try
    after those of `train_groups`; None if there are none."""
    distribute = _separate if layout == "separate" else _colocated
    for groups in (*train_groups(request.topology), *(() if smallest is None else (tuple(smallest),))):
        for chosen in [*([index] for index in range(len(hosts))), list(range(len(hosts)))]:
            rooms = tuple(
                (len(host.free_gpus), int(host.free_cpus)) if index in chosen else (0, 0)
                for index, host in enumerate(hosts)
            )
            counts = distribute(rooms, len(groups[0]), len(groups), request.tp, request.all_engines)
            if counts is not None:
                return _Counts(groups, *counts)
    return None


def _separate(
    rooms: tuple[tuple[int, int], ...], group: int, num_groups: int, engine: int, num_engines: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the numbers of train groups and engines on each host if each process has its own GPU and CPU. Returns None
    if they do not fit. The first hosts get as many train groups as leave enough room for the engines."""

    @cache
    def fill(host: int, groups: int, engines: int) -> tuple[tuple[int, int], ...] | None:
        if not groups and not engines:
            return ((0, 0),) * (len(rooms) - host)
        if host == len(rooms):
            return None
        room = min(rooms[host])
        for here in range(min(room // group, groups), -1, -1):
            beside = min((room - here * group) // engine, engines)
            rest = fill(host + 1, groups - here, engines - beside)
            if rest is not None:
                return ((here, beside), *rest)
        return None

    if num_groups * group + num_engines * engine > sum(min(room) for room in rooms):
        return None
    filled = fill(0, num_groups, num_engines)
    if filled is None:
        return None
    return tuple(here for here, _ in filled), tuple(beside for _, beside in filled)


def _colocated(
    rooms: tuple[tuple[int, int], ...], group: int, num_groups: int, engine: int, num_engines: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the numbers of train groups and engines on each host if both roles share GPUs. There must be CPUs for both
    roles. Returns None if they do not fit, or would share no GPU. The role with the larger groups takes the first hosts
    that fit, preferably hosts with enough CPUs for the other role, too. The other role takes the GPUs of these hosts
    first."""
    if engine > group:
        swapped = _colocated(rooms, engine, num_engines, group, num_groups)
        return swapped and (swapped[1], swapped[0])
    for roles in (2, 1):
        first, second = [], []
        groups, engines = num_groups, num_engines
        for gpus, cpus in rooms:
            first.append(min(gpus // group, cpus // (roles * group), groups))
            groups -= first[-1]
        for (_, cpus), here in zip(rooms, first, strict=True):
            second.append(min(here * group // engine, (cpus - here * group) // engine, engines))
            engines -= second[-1]
        for index, ((gpus, cpus), here) in enumerate(zip(rooms, first, strict=True)):
            more = min(gpus // engine, (cpus - here * group) // engine, engines + second[index]) - second[index]
            second[index] += more
            engines -= more
        if not groups and not engines and any(map(min, first, second)):
            return tuple(first), tuple(second)
    return None


# ---------------- These functions give ranks and engines their GPUs.


def _placement(request: PlacementRequest, hosts: tuple[Host, ...], layout: str, counts: _Counts) -> Placement:
    size, groups = request.tp, iter(counts.groups)
    ranks: list[tuple[int, int, tuple[int, ...]]] = []
    engines: list[tuple[int, tuple[int, ...]]] = []
    for index, (host, here, beside) in enumerate(zip(hosts, counts.train, counts.engines, strict=True)):
        standing = [rank for _ in range(here) for rank in next(groups)]
        ranks += [(rank, index, (gpu,)) for rank, gpu in zip(standing, host.free_gpus, strict=False)]
        gpus = host.free_gpus[len(standing) :] if layout == "separate" else host.free_gpus
        engines += [(index, gpus[start * size : (start + 1) * size]) for start in range(beside)]
    in_order = [(index, gpus) for _, index, gpus in sorted(ranks)]
    return _seated(request, hosts, in_order, engines, _reason(request, hosts, layout))


def _find(key: str, number: int, hosts: Sequence[Host]) -> tuple[int, int]:
    """Convert the number of a GPU over all hosts to (index of its host, number on that host). Raises UserError if there
    is no such GPU or another job holds it."""
    local = number
    for index, host in enumerate(hosts):
        if local < host.num_gpus:
            if local not in host.free_gpus:
                raise UserError(
                    f"resources.{key}: got GPU {number}, expected a free one, but another job holds it (GPU {local} of "
                    f"{host.name})"
                )
            return index, local
        local -= host.num_gpus
    raise UserError(f"resources.{key}: got GPU {number}, expected a number below {number - local}: {_listed(hosts)}")


def _seated(
    request: PlacementRequest,
    hosts: tuple[Host, ...],
    ranks: Sequence[tuple[int, tuple[int, ...]]],
    engines: Sequence[tuple[int, tuple[int, ...]]],
    why: str,
) -> Placement:
    """Return the placement with the given (host, GPUs on the host) of each rank and each engine. why: the reason for
    the layout, for the user."""
    # On a pool's GPUs one run computes at a time, however many runs have processes there.
    cpus = 0 if request.pooled else 1
    engine_seats = tuple(request.engine_seat(index, cpus, host, gpus) for index, (host, gpus) in enumerate(engines))
    rank_seats = tuple(Seat(f"train worker {rank}", cpus, host, gpus) for rank, (host, gpus) in enumerate(ranks))
    used = {(host, gpu) for host, gpus in (*ranks, *engines) for gpu in gpus}
    processes = len(ranks) + sum(len(gpus) for _, gpus in engines)
    layout: Layout = "separate" if len(used) == processes else "colocated"
    what = (
        "each engine process and train worker has one of its own"
        if layout == "separate"
        else (f"{processes - len(used)} of them hold(s) an engine process and a train worker")
    )
    total = sum(host.num_gpus for host in hosts)
    return Placement(
        layout,
        f"GPUs: {layout}, {why}: {what} ({len(used)} of {total} used)",
        hosts,
        engine_seats[: request.num_engines],
        rank_seats,
        _rollout_seats(request.num_actors or 0, hosts, (*engine_seats, *rank_seats)),
        engine_seats[request.num_engines :],
    )


def _rollout_seats(num_actors: int, hosts: Sequence[Host], taken: Sequence[Seat]) -> tuple[Seat, ...]:
    """Return the seats of rollout actors without an engine. Each actor gets a seat on the host with the most remaining
    CPUs, preferably a host with an engine. Raises UserError if the CPUs do not suffice."""
    left = {index: int(host.free_cpus) for index, host in enumerate(hosts)}
    for seat in taken:
        assert seat.host is not None
        left[seat.host] -= seat.cpus
    with_engine = {seat.host for seat in taken if not seat.name.startswith("train")}
    seats = []
    for index in range(num_actors):
        host = max(left, key=lambda host: (left[host] > 0, host in with_engine, left[host]))
        if left[host] < 1:
            raise UserError(
                f"rollout.num_actors: got {num_actors}, expected at most {index}, because each needs a "
                f"logical CPU beside the engines and train workers: {_listed(hosts)}"
            )
        left[host] -= 1
        seats.append(Seat(f"rollout {index}", 1, host))
    return tuple(seats)


def _on_cpus(request: PlacementRequest, hosts: tuple[Host, ...], why: str) -> Placement:
    """Return the placement of a run that uses no GPU. On several hosts, CPUs are dealt out as GPUs are, the driver's
    first. Raises UserError if they do not suffice. Ray chooses the hosts of a run with engines of a pool."""
    host, sentence = 0 if len(hosts) == 1 else None, f"GPUs: none used, because {why}"
    if host is None and not request.shares_engines:
        rooms = tuple(replace(one, num_gpus=0, free_gpus=tuple(range(int(one.free_cpus)))) for one in hosts)
        # A group of gloo can be on several hosts, even a tensor-parallel one.
        counts = _place("separate", request, rooms, [(rank,) for rank in range(request.topology.world)])
        if counts is None:
            train, rollout = _needs(request)
            raise UserError(
                f"resources.ray_address: that Ray cluster cannot hold {rollout} engine process(es) "
                f"({_engines(request)} x rollout.tp={request.tp}, each engine on one host) beside {train} train "
                f"worker(s), expected a free logical CPU for each: {_listed(hosts)}"
            )
        seated = _placement(replace(request, pooled=False), rooms, "separate", counts)
        engines, ranks, rollouts, teachers = (
            tuple(replace(seat, gpus=()) for seat in seats)
            for seats in (seated.engines, seated.ranks, seated.rollouts, seated.teachers)
        )
        return Placement("cpu", sentence, hosts, engines, ranks, rollouts, teachers)
    engines = tuple(request.engine_seat(index, 1, host) for index in range(request.all_engines))
    return Placement(
        "cpu",
        sentence,
        hosts,
        engines[: request.num_engines],
        tuple(Seat(f"train worker {rank}", 1, host) for rank in range(request.topology.world)),
        tuple(Seat(f"rollout {index}", 1, host) for index in range(request.num_actors or 0)),
        engines[request.num_engines :],
    )


# ---------------- These functions word messages for the user.


def _reason(request: PlacementRequest, hosts: Sequence[Host], layout: str) -> str:
    if request.layout != "auto":
        return f"as resources.layout={layout} asks"
    train, rollout = _needs(request)
    free = sum(len(host.free_gpus) for host in hosts)
    if layout == "separate":
        return f"because the {free} free GPU(s) hold {train} train worker(s) beside {rollout} engine process(es)"
    return f"because {train} train worker(s) beside {rollout} engine process(es) do not fit on {free} free GPU(s)"


def _needs(request: PlacementRequest) -> tuple[int, int]:
    return request.topology.world, request.all_engines * request.tp


def _refusal(request: PlacementRequest, hosts: Sequence[Host]) -> str:
    """Return the error message for a run that does not fit on the free GPUs. It names the config key and a size that
    would fit."""
    train, rollout = _needs(request)
    layout, topology = request.layout, request.topology
    needed = {
        "separate": f"{train + rollout} GPUs",
        "colocated": f"{max(train, rollout)} GPUs",
        "auto": f"{train + rollout} GPUs (or {max(train, rollout)}, each for both roles)",
    }[layout]
    together = max(request.tp, topology.tp)
    on_one = f", {together} of them together on one host" if together > 1 else ""
    return (
        f"resources.layout: got {layout!r} with {train} train worker(s) (trainer.dp={topology.dp} x "
        f"{topology.replica_size} rank(s)) and {rollout} engine process(es) "
        f"({_engines(request)} x rollout.tp={request.tp}), expected {needed} that "
        f"are free{on_one}, with a logical CPU for each process on its host: "
        f"{_listed(hosts)}; {_would_fit(request, hosts)}"
    )


def _engines(request: PlacementRequest) -> str:
    own = f"rollout.num_engines={request.num_engines}"
    return f"({own} + {len(request.teachers)} teacher(s))" if request.teachers else own


def _would_fit(request: PlacementRequest, hosts: Sequence[Host]) -> str:
    smaller = [(dp, engines) for dp in _fewer(request.topology.dp) for engines in _fewer(request.num_engines)]
    for dp, engines in sorted(smaller, key=lambda pair: (-sum(pair), -pair[0])):
        own = request.topology
        ep = math.gcd(own.ep, own.tp * own.cp * dp)  # It must divide the number of ranks of a stage.
        tried = replace(request, topology=replace(own, dp=dp, ep=ep), num_engines=engines)
        if any(_place(layout, tried, hosts) for layout in request.layouts):
            experts = "" if ep == own.ep else f" and trainer.ep={ep}"
            return f"trainer.dp={dp}{experts} with rollout.num_engines={engines} would fit"
    return "no smaller trainer.dp and rollout.num_engines would fit either"


def _fewer(count: int) -> list[int]:
    """Return the numbers up to `count` to try: its repeated halves, and all numbers up to 16."""
    return sorted({*range(1, min(count, 16) + 1), *(count >> shift for shift in range(count.bit_length()))})


def _listed(hosts: Sequence[Host]) -> str:
    shown = [
        f"{host.name} has "
        + (f"{len(host.free_gpus)} of {host.num_gpus} GPU(s) and " if any(one.num_gpus for one in hosts) else "")
        + f"{host.free_cpus:g} CPU(s) free"
        for host in hosts[:8]
    ]
    return ", ".join(shown) + (f" and {len(hosts) - 8} more host(s)" if len(hosts) > 8 else "")


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts[:8])
