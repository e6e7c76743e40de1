"""Defines what a pool reports: its status, the stages of switches that tenants report, and the events of its trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

from .plan import Role

Stage = Literal["shrink", "drain", "sleep", "memory", "wake", "sync", "onload", "offload"]
"""Name of a stage in the switch of a GPU from one role to another."""

Event = Literal["grant", "release"] | Stage
"""Kind of a line of pool_trace.jsonl. `grant` and `release` name the holder of a GPU; the others are stages of a
switch."""
TRACE = "pool_trace.jsonl"
"""File in a pool's folder with a line for each `PoolEvent`."""


class PoolEvent(TypedDict):
    """Something that happened on one GPU of a pool; one line of `pool_trace.jsonl`."""

    t: float
    """Seconds from the pool's start to the end of the event."""
    gpu: int
    """Number of the GPU in the pool."""
    tenant: str | None
    """Name of the tenant."""
    role: Role | None
    """Role of the tenant."""
    event: Event
    """Kind of the event. From its grant to its release, the GPU is held by the tenant's role."""
    seconds: NotRequired[float]
    """Duration in seconds of the event, which ended at `t`. For a grant, the duration of the wait. Absent if
    unknown."""


@dataclass(frozen=True, slots=True)
class StageNote:
    """One stage of a switch, as measured by its tenant."""

    event: Stage
    role: Role
    gpus: tuple[int, ...]
    """Numbers of the GPUs in the pool."""
    ended: float
    """Time (`time.time()`) at which the stage ended."""
    seconds: float


@dataclass(frozen=True, slots=True)
class PooledGpu:
    """One GPU of a pool, and the bundle of the pool's placement group that reserves it in Ray. Its number in the pool
    is its position among the pool's GPUs."""

    host: str
    """Name of the GPU's host."""
    node: str
    """Ray's id of the host's node."""
    number: int
    """Number of the GPU on its host, counted from 0."""
    device: str
    """CUDA's name of the GPU, as in CUDA_VISIBLE_DEVICES."""
    bundle: int
    """Index of the bundle in the pool's placement group."""


@dataclass(frozen=True, slots=True)
class TenantLine:
    """The figures of one tenant that `headrace pool status` shows."""

    name: str
    train_gpus: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]
    """GPUs of each engine."""
    awake: tuple[int, ...]
    """Numbers of the shards that hold their GPUs."""
    trains: bool
    """True while the tenant's train workers hold their GPUs."""
    remaining: int | None
    """Number of groups that are still to be generated; None while that is unknown."""
    work_share: float
    """Share of this tenant in the work that is left in the pool, from 0 to 1."""
    admitted: bool
    suspect: str
    """Reason for which the tenant's processes are being ended; "" for a trusted tenant."""
    silent_s: float
    """Seconds since the tenant's last sign of life."""
    driver: int | None
    """Process id of the tenant's driver on its host; None for a tenant without processes."""
    order_timeout_s: float
    """Seconds that the tenant has to carry out an order."""


@dataclass(frozen=True, slots=True)
class WaitLine:
    """One request that waits for GPUs, or an order that waits for its tenant."""

    who: str
    what: str
    """Description of the thing that the request or order waits for."""
    since_s: float
    """Number of seconds since the wait began."""
    freed_by: str
    """Description of the event that will free the GPUs; "" if no such event is under way."""


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Figures of a pool for Prometheus. The counts start at 0 with each process of the pool."""

    num_gpus: int
    holders: tuple[tuple[int, str, Role], ...]
    """Number, tenant and role of each GPU that a tenant holds."""
    gaps: dict[str, float]
    """Gap of each tenant that takes part in the gap rule; see `Gap.gap`."""
    waits: tuple[tuple[str, str, float], ...]
    """Tenant, priority in lower case, and seconds so far of each waiting request."""
    switches: dict[str, tuple[int, float]]
    """Number of the stages of switches so far, and the sum of their seconds, by event."""
    orders: dict[str, int]
    """Number of completed orders, by result: `done`, `failed` (for at least one shard), or `void` (the tenant left or
    is suspect)."""
    num_rejected: int
    """Number of plans that were dropped because they broke a check."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Snapshot of a pool."""

    name: str
    age_s: float
    """Seconds since the pool was first started."""
    gpus: tuple[str, ...]
    """Description of the holder of each GPU; "idle" for a GPU without a holder."""
    tenants: tuple[TenantLine, ...]
    waits: tuple[WaitLine, ...]
    rejected: tuple[str, ...]
    """Faults of the last plan that broke a check; empty if no plan did."""
    num_rejected: int
    pid: int
    """Id of the process that keeps the pool. It changes with a restart."""
    reserved: tuple[PooledGpu, ...]
    """Place of each GPU of the pool; () for a pool whose GPUs are numbers only."""
    troubles: tuple[str, ...] = ()
    """Sentences about what does not work in the pool itself, such as a journal on a full disk."""
