"""Turns the events of a pool into one lane per GPU: the tenants that held it, from when to when, and its switches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...errors import UserError
from ..state.plan import Role
from .calls import PoolEvent, Stage

TOGETHER_S = 0.005
"""Largest pause in seconds between two stages that are parts of one switch."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Time during which one role of one tenant held a GPU."""

    begin_s: float
    end_s: float
    tenant: str
    role: Role


@dataclass(frozen=True, slots=True)
class Switch:
    """Stages of a switch that follow each other on one GPU."""

    tenant: str
    role: Role
    stages: tuple[tuple[Stage, float], ...]
    """Each stage and its seconds, in the order of time."""
    end_s: float

    @property
    def seconds(self) -> float:
        """Seconds of all stages together."""
        return sum(seconds for _, seconds in self.stages)


@dataclass(slots=True)
class Lane:
    """What became of one GPU."""

    gpu: int
    segments: list[Segment] = field(default_factory=list)
    """Times during which it was held, in the order of time. In between, it was idle."""
    switches: list[Switch] = field(default_factory=list)

    def held_s(self, tenant: str | None = None, role: Role | None = None) -> float:
        """Return the seconds during which it was held, by a tenant's role or, with None, by any."""
        return sum(
            one.end_s - one.begin_s
            for one in self.segments
            if tenant in (None, one.tenant) and role in (None, one.role)
        )

    @property
    def switch_s(self) -> float:
        """Seconds during which it was held but neither trained nor generated."""
        return sum(switch.seconds for switch in self.switches)


@dataclass(frozen=True, slots=True)
class PoolTrace:
    """All that a pool's events tell."""

    begin_s: float
    end_s: float
    """Times of the first event and of the last one, in seconds from the pool's start."""
    tenants: tuple[str, ...]
    """Names of the tenants in the order of their first event."""
    lanes: tuple[Lane, ...]
    """One lane for each GPU that has an event, in the order of their numbers."""
    waits_s: dict[tuple[str, Role], list[float]]
    """Seconds that each grant of a tenant's role was waited for, of those that tell."""

    @property
    def seconds(self) -> float:
        """Seconds from the first event to the last one."""
        return self.end_s - self.begin_s


def pool_trace(events: Iterable[PoolEvent]) -> PoolTrace:
    """Return the lanes of a pool from its events. Events without a tenant and a role are left out.

    Raises UserError if there are no events.
    """
    ordered = sorted(events, key=lambda event: event["t"])
    if not ordered:
        raise UserError("the trace of the pool has no events, expected one line for each")
    end_s = ordered[-1]["t"]
    of_gpu: dict[int, list[PoolEvent]] = defaultdict(list)
    waits: dict[tuple[str, Role], dict[float, float]] = defaultdict(dict)
    tenants: dict[str, None] = {}
    for event in ordered:
        of_gpu[event["gpu"]].append(event)
        tenant, role = event["tenant"], event["role"]
        if tenant is not None:
            tenants.setdefault(tenant)
        if tenant is not None and role is not None and event["event"] == "grant" and "seconds" in event:
            waits[tenant, role][event["t"]] = event["seconds"]  # once for all GPUs of one grant
    lanes = tuple(Lane(gpu, _segments(own, end_s), _switches(own)) for gpu, own in sorted(of_gpu.items()))
    return PoolTrace(
        ordered[0]["t"], end_s, tuple(tenants), lanes, {key: list(found.values()) for key, found in waits.items()}
    )


def _segments(events: Sequence[PoolEvent], end_s: float) -> list[Segment]:
    """Return who held a GPU when. What is not released is held until the next grant or the last event of all."""
    found: list[Segment] = []
    begun: tuple[float, str, Role] | None = None
    for event in events:
        tenant, role = event["tenant"], event["role"]
        if event["event"] not in ("grant", "release"):
            continue
        if begun is not None:
            found.append(Segment(begun[0], event["t"], *begun[1:]))
        begun = None
        if event["event"] == "grant" and tenant is not None and role is not None:
            begun = (event["t"], tenant, role)
    if begun is not None:
        found.append(Segment(begun[0], end_s, *begun[1:]))
    return found


def _switches(events: Sequence[PoolEvent]) -> list[Switch]:
    """Return the switches of a GPU: stages of the same tenant and role that follow each other at once."""
    found: list[Switch] = []
    for event in events:
        tenant, role, stage = event["tenant"], event["role"], event["event"]
        if stage == "grant" or stage == "release" or tenant is None or role is None:
            continue
        seconds = event.get("seconds", 0.0)
        last = found[-1] if found else None
        if last and (last.tenant, last.role) == (tenant, role) and event["t"] - seconds - last.end_s <= TOGETHER_S:
            found[-1] = Switch(tenant, role, (*last.stages, (stage, seconds)), event["t"])
        else:
            found.append(Switch(tenant, role, ((stage, seconds),), event["t"]))
    return found
