"""Writes and reads a pool's trace: the holders of each GPU over time, and the durations of each switch's stages.

note_state, note_stages -> pool_trace.jsonl, a `PoolEvent` per line -> pool_trace -> lanes
                                                                         -> perfetto_trace, pool_tables
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
from rich.table import Column, Table

from ....actors.process.json_lines import append, encoded, read_lines
from ...errors import UserError
from ..state.commands import Order
from ..state.plan import Role
from ..state.pool import Pool
from ..state.status import Event, PoolEvent, Stage, StageNote

_log = logging.getLogger(__name__)
Holder = tuple[str, Role]
"""Tenant that holds a GPU, and the role for which it holds the GPU."""


def holders(pool: Pool) -> dict[int, Holder]:
    """Return the holder of each GPU: number of the GPU -> tenant and role. Idle GPUs are left out."""
    found: dict[int, Holder] = {}
    for grant in pool.grants.values():
        found.update(dict.fromkeys(grant.gpus, (grant.tenant, grant.role)))
    for name, tenant in pool.tenants.items():
        for shard in tenant.awake:
            found.update(dict.fromkeys(tenant.map.shards[shard], (name, "rollout")))
    return found


class TraceWriter:
    """The file pool_trace.jsonl of one pool. A restarted pool continues this file. A line that cannot be written, as on
    a full disk, is left out."""

    def __init__(self, path: Path, began: float, held: Mapping[int, Holder]) -> None:
        """began: time (`time.time()`) from which times are counted. held: present holder of each GPU."""
        self._path = path
        self._began_s = time.monotonic() - (time.time() - began)  # Later changes of the system clock do not count.
        self._held = dict(held)
        self._ordered = 0
        self._asked: dict[Holder, float] = {}
        """Time at which each request that waited after the last call was made."""

    @property
    def age_s(self) -> float:
        """Seconds since the pool was first started."""
        return time.monotonic() - self._began_s

    def note_state(self, now_s: float, pool: Pool) -> None:
        """Write the changes since the last call: holders of GPUs, and orders to put shards to sleep. now_s: time by the
        pool's clock, which counts the waits of requests."""
        held, t = holders(pool), self.age_s
        for gpu in sorted(self._held.keys() | held.keys()):
            before, after = self._held.get(gpu), held.get(gpu)
            if before == after:
                continue
            if before is not None:
                self._write(t, gpu, before, "release")
            if after is not None:
                asked_s = self._asked.get(after)
                self._write(t, gpu, after, "grant", None if asked_s is None else now_s - asked_s)
        self._held = held
        self._asked = {(one.tenant, one.role): one.since_s for one in pool.requests.values()}
        self._note_orders(t, pool, pool.orders.values())

    def note_stages(self, tenant: str, notes: Iterable[StageNote]) -> None:
        """Write the stages of switches that a tenant has measured."""
        since_epoch_s = self.age_s - time.time()
        for note in notes:
            for gpu in note.gpus:
                self._write(note.ended + since_epoch_s, gpu, (tenant, note.role), note.event, note.seconds)

    def _note_orders(self, t: float, pool: Pool, orders: Iterable[Order]) -> None:
        for order in orders:
            if order.number <= self._ordered:
                continue
            self._ordered = order.number
            if order.kind == "shrink":
                shards = pool.tenants[order.tenant].map.shards
                for gpu in (gpu for shard in order.shards for gpu in shards[shard]):
                    self._write(t, gpu, (order.tenant, "rollout"), "shrink")

    def _write(self, t: float, gpu: int, holder: Holder, event: Event, seconds: float | None = None) -> None:
        line = PoolEvent(t=round(t, 4), gpu=gpu, tenant=holder[0], role=holder[1], event=event)
        if seconds is not None:
            line["seconds"] = round(seconds, 4)
        try:
            append(self._path, encoded([line]))
        except OSError as error:
            _log.warning("a line of the pool's trace is left out: %s", error)


ROLES: tuple[Role, ...] = ("train", "rollout")

TOGETHER_S = 0.005
"""Largest pause in seconds between two stages that are parts of one switch."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Period in which one role of one tenant held a GPU."""

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
    """History of one GPU."""

    gpu: int
    segments: list[Segment] = field(default_factory=list)
    """Periods in which the GPU was held, in the order of time. Between them it was idle."""
    switches: list[Switch] = field(default_factory=list)

    def held_s(self, tenant: str | None = None, role: Role | None = None) -> float:
        """Return the seconds for which the GPU was held by a tenant's role (None: by any)."""
        return sum(
            one.end_s - one.begin_s
            for one in self.segments
            if tenant in (None, one.tenant) and role in (None, one.role)
        )

    @property
    def switch_s(self) -> float:
        """Seconds for which the GPU was held but neither trained nor generated."""
        return sum(switch.seconds for switch in self.switches)


@dataclass(frozen=True, slots=True)
class PoolTrace:
    """The history of a pool, as read from its events."""

    begin_s: float
    end_s: float
    """Times of the first event and of the last one, in seconds from the pool's start."""
    tenants: tuple[str, ...]
    """Names of the tenants in the order of their first event."""
    lanes: tuple[Lane, ...]
    """One lane for each GPU that has an event, in the order of their numbers."""
    waits_s: dict[tuple[str, Role], list[float]]
    """Seconds of the wait for each grant, by tenant and role. Grants without this number are left out."""

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
        raise UserError("the trace of the pool has no events, expected one event per line")
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
            waits[tenant, role][event["t"]] = event["seconds"]  # All GPUs of a grant share one wait.
    lanes = tuple(Lane(gpu, _segments(own, end_s), _switches(own)) for gpu, own in sorted(of_gpu.items()))
    return PoolTrace(
        ordered[0]["t"], end_s, tuple(tenants), lanes, {key: list(found.values()) for key, found in waits.items()}
    )


def _segments(events: Sequence[PoolEvent], end_s: float) -> list[Segment]:
    """Return the periods in which tenants held a GPU. A GPU without a release is held until its next grant or the last
    event of the trace."""
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


# ---------------- These functions read a trace and show it.


def read_events(path: Path) -> list[PoolEvent]:
    """Return the events of a `pool_trace.jsonl`. Torn lines are left out, as by `read_lines`. Raises UserError if the
    file cannot be read."""
    try:
        return [cast(PoolEvent, line) for _, line in read_lines(path)]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected the trace of a pool") from None


def write_perfetto(trace: PoolTrace, path: Path) -> None:
    """Write a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing with one track per GPU. It has a slice
    per holder and, inside it, a slice per stage of a switch. Times are microseconds since the pool's start."""
    document = {"traceEvents": list(_slices(trace)), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


def _slices(trace: PoolTrace) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "pool"}}
    for lane in trace.lanes:
        track = {"pid": 1, "tid": lane.gpu + 1}
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": f"GPU {lane.gpu}"}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": lane.gpu}}
        for one in lane.segments:
            yield _slice(f"{one.tenant} {one.role}", one.role, track, one.begin_s, one.end_s)
        for switch in lane.switches:
            begin_s = switch.end_s - switch.seconds
            for stage, seconds in switch.stages:
                yield _slice(stage, "switch", track, begin_s, begin_s + seconds)
                begin_s += seconds


def _slice(name: str, kind: str, track: Mapping[str, int], begin_s: float, end_s: float) -> dict[str, object]:
    # The ends are rounded instead of the durations, so that adjacent slices stay adjacent.
    begin, end = round(begin_s * 1e6), round(end_s * 1e6)
    return {"ph": "X", "name": name, "cat": kind, **track, "ts": begin, "dur": end - begin}


def pool_tables(trace: PoolTrace) -> list[Table]:
    """Summarize a trace in tables: GPUs, waits for GPUs, GPU seconds per tenant, and stages of switches."""
    total = max(trace.seconds, 1e-9)
    gpus = _table(f"GPUs over {_time(trace.seconds)}", ("GPU", "held", "idle", "switching", "switches"))
    for lane in trace.lanes:
        held, switching = lane.held_s() / total, lane.switch_s / total
        shares = (f"{share:.1%}" for share in (held, 1 - held, switching))
        gpus.add_row(str(lane.gpu), *shares, str(len(lane.switches)))
    waits = _table("Waits for GPUs", ("tenant", "role", "grants", "median", "p95", "longest"))
    for (tenant, role), found in sorted(trace.waits_s.items()):
        quantiles = np.quantile(found, (0.5, 0.95, 1.0)).tolist()
        waits.add_row(tenant, role, str(len(found)), *map(_time, quantiles))
    tenants = _table("GPU seconds held", ("tenant", "train", "rollout", "share"))
    every_s = max(sum(lane.held_s() for lane in trace.lanes), 1e-9)
    for tenant in trace.tenants:
        train, rollout = (sum(lane.held_s(tenant, role) for lane in trace.lanes) for role in ROLES)
        tenants.add_row(tenant, f"{train:.0f}", f"{rollout:.0f}", f"{(train + rollout) / every_s:.0%}")
    seconds: dict[str, list[float]] = defaultdict(list)
    for stage, took_s in (stage for lane in trace.lanes for switch in lane.switches for stage in switch.stages):
        seconds[stage].append(took_s)
    stages = _table("Stages of switches", ("stage", "GPUs", "median", "longest"))
    for stage, found in seconds.items():
        stages.add_row(stage, str(len(found)), _time(statistics.median(found)), _time(max(found)))
    return [gpus, waits, tenants, stages]


def _table(title: str, headings: Sequence[str]) -> Table:
    columns = (Column(heading, justify="right" if number else "left") for number, heading in enumerate(headings))
    return Table(*columns, title=title, title_justify="left", title_style="bold")


def _time(seconds: float) -> str:
    """Return seconds as text, with a suitable unit and number of digits."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if 1 <= seconds < 100 else f"{seconds:.0f} s"
