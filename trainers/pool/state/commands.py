"""Defines the commands to a pool of GPUs as plain data: the calls of tenants, and the passing of time.

The pool's state changes by these commands alone, and each carries all that the change depends on. A pool that is
started again after its process has died repeats the commands of its journal, which restores its state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ....dataplane.owned_folder import pid_space
from ...grpo.pool_demand import Demand
from .plan import Priority, Role, TenantMap


@dataclass(frozen=True, slots=True)
class Processes:
    """Address of a tenant's processes. The pool uses it to end them and to check that they are dead."""

    host: str
    """Name of the driver's host."""
    driver: int
    """Process id of the driver."""
    start: int
    """Start time of the driver in clock ticks, which distinguishes it from a later process with the same id."""
    folder: str
    """Run folder, in which actors.json lists the tenant's other processes."""
    run_id: str | None = None
    """Id of the run, whose processes alone are the tenant's in that list; None for all processes of the list."""
    space: str = field(default_factory=pid_space)
    """Space of the process ids of the driver's host, as `pid_space` returns it. The driver makes this object."""


@dataclass(frozen=True, slots=True)
class Register:
    """A run becomes a tenant. The pool refuses a name that is taken, and GPUs that it does not have. Repeating the call
    changes nothing."""

    map: TenantMap
    processes: Processes | None = None
    """The tenant's processes; None for a tenant without processes, as in a simulation."""
    order_timeout_s: float | None = None
    """Seconds that the tenant has to carry out an order, at most `PoolBounds.max_order_timeout_s`; None for the pool's
    own bound."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A tenant's role asks for its GPUs. Generation gets some of the tenant's shards; any other work gets all GPUs of
    its role. Repeating the call changes nothing. A second request for other work is refused until the first is granted
    and released.
    """

    tenant: str
    role: Role
    priority: Priority
    groups: int | None = None
    """Number of groups that generation expects to make; None for other work."""


@dataclass(frozen=True, slots=True)
class Release:
    """A tenant releases the GPUs of a role that were granted for other work than generation."""

    tenant: str
    role: Role
    then: Ask | None = None
    """Request that the tenant makes at the same time; the release takes effect only if this request is not refused."""


@dataclass(frozen=True, slots=True)
class Report:
    """A tenant reports how much rollout work it has left."""

    tenant: str
    demand: Demand


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A tenant has finished a train step. The first one lets the tenant that registered next begin."""

    tenant: str


@dataclass(frozen=True, slots=True)
class Alive:
    """A tenant shows that it is alive."""

    tenant: str


@dataclass(frozen=True, slots=True)
class ShrinkToZero:
    """A tenant stops generating: all its shards are put to sleep permanently."""

    tenant: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A tenant reports the outcome of an order. A repeated outcome, or one for an order that is void, is ignored."""

    tenant: str
    order: int
    done: tuple[int, ...]
    """Numbers of the shards that carried out the order."""
    failed: dict[int, str]
    """Reason of failure of each other shard. A shard that could not be woken sleeps. A shard that could not be put to
    sleep has been ended, so its GPUs are free, too."""
    unready: tuple[int, ...] = ()
    """Failed shards that are healthy: they can wake once the tenant has weights for them."""


@dataclass(frozen=True, slots=True)
class Unregister:
    """A tenant that no longer holds anything leaves, or a tenant whose processes are all dead is removed."""

    tenant: str
    dead: bool = False
    """True if all processes of the tenant are known to be dead, so that all its GPUs are free."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The pool was away, or could not write its journal: tenants could not show that they live. All of them get a new
    lease, and all orders at least as much time."""


Command = Register | Ask | Release | Report | StepFinished | Alive | ShrinkToZero | Outcome | Unregister | Tick | Resume
BY_NAME: dict[str, type[Command]] = {
    kind.__name__: kind
    for kind in (Register, Ask, Release, Report, StepFinished, Alive, ShrinkToZero, Outcome, Unregister, Tick, Resume)
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A pool's reply to a command."""

    refusal: str = ""
    """Reason for which the command was refused, and has changed nothing; "" if it was carried out."""
    unwritten: str = ""
    """Reason for which the journal could not be written. The command has changed nothing and has to be repeated; "" if
    this is not so."""


OrderKind = Literal["shrink", "expand"]


@dataclass(frozen=True, slots=True)
class Order:
    """An instruction to a tenant for some of its shards. The tenant has to acknowledge the order with an `Outcome`."""

    number: int
    """Number of the order, ascending over all tenants. A repeated order has the same number."""
    tenant: str
    kind: OrderKind
    shards: tuple[int, ...]
    due_s: float
    """Time by the pool's clock at which the order is overdue."""
