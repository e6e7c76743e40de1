"""Keeps the state of a pool of GPUs: its tenants, their GPUs, their waiting requests, and the open orders.

The state is pure: it has no clock, no network and no thread.

    command + time -> Pool.apply -> changed state, orders for tenants

All shrinks of a plan are acknowledged before its grants take effect and its expands are ordered. Meanwhile other plans
begin, for GPUs that this plan does not touch and for shards of tenants without an order. A tenant that does not answer
in time is suspect. Its GPUs stay blocked until its processes are known to be dead, and no other tenant waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from ...errors import UserError
from ...grpo.pool_demand import Demand
from .commands import (
    Alive,
    Ask,
    Command,
    Order,
    OrderKind,
    Outcome,
    Processes,
    Register,
    Release,
    Report,
    Resume,
    ShrinkToZero,
    StepFinished,
    Tick,
    Unregister,
)
from .plan import (
    Grant,
    Plan,
    PoolState,
    Priority,
    Request,
    Role,
    ShardId,
    TenantMap,
    TenantState,
    apply_plan,
    broken_checks,
)
from .planner import plan_cycle

MAX_FAILURES = 3
"""Number of failed attempts to wake a shard after which it is left out permanently."""
PAID = 0.25
"""Seconds of waiting that one second of holding a shard repays. It is below 1, because a tenant that gets a shard only
briefly, between two trainings of another tenant, generates little in that time."""


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """Time limits of a pool in seconds."""

    starve_s: float = 60.0
    """Seconds of waiting after which a request comes before all others."""
    order_timeout_s: float = 180.0
    """Seconds that a tenant has to carry out an order, unless it asks for another time."""
    max_order_timeout_s: float = 600.0
    """Largest number of seconds that a tenant can have to carry out an order."""
    lease_s: float = 30.0
    """Seconds without a sign of life after which a tenant is suspect."""
    turn_s: float = 10.0
    """Value of `Tenant.owed_s` in seconds from which a tenant may take another tenant's last shard. Two tenants that
    compete for one shard thus take turns of about this length."""


@dataclass(slots=True)
class Tenant:
    """The pool's record of one tenant."""

    map: TenantMap
    number: int
    """Position in the order of registration."""
    heard_s: float
    """Time of the last sign of life."""
    admitted: bool
    """True once all earlier tenants have finished a step or left. The tenant gets GPUs only then."""
    has_finished_step: bool = False
    awake: set[int] = field(default_factory=set)
    """Shards that hold their GPUs for generation, including those that are falling asleep or waking."""
    failures: dict[int, int] = field(default_factory=dict)
    """Number of failed attempts to wake each shard."""
    demand: Demand | None = None
    estimate: int | None = None
    """Number of groups that the waiting generation request expects; None without a waiting request."""
    generates: bool = False
    ending: bool = False
    processes: Processes | None = None
    """The tenant's processes; None for a tenant without processes."""
    order_timeout_s: float = 180.0
    """Seconds that the tenant has to carry out an order."""
    suspect: str = ""
    """Reason for which the tenant is no longer trusted; "" for a trusted tenant."""
    owed_s: float = 0.0
    """Seconds for which the tenant had work but no shard awake, minus PAID times the seconds with a shard, up to
    `settled_s`."""
    settled_s: float = 0.0
    """Time up to which `owed_s` is counted."""

    @property
    def remaining(self) -> int | None:
        """Number of groups that are still to be generated; None while that is unknown."""
        return None if self.demand is None else self.demand.remaining

    @property
    def left_out(self) -> set[int]:
        """Numbers of the shards that are no longer woken."""
        return {shard for shard, count in self.failures.items() if count >= MAX_FAILURES}


@dataclass(slots=True)
class RunningPlan:
    """A plan that is being carried out."""

    plan: Plan
    waking: bool = False
    """False while the plan's shrinks are being carried out, True during its expands."""
    orders: set[int] = field(default_factory=set)
    """Numbers of the plan's orders so far."""


@dataclass(slots=True)
class Pool:
    """A pool of GPUs and its tenants. Calls of one tenant change the GPUs of another only through plans."""

    num_gpus: int
    bounds: PoolBounds = field(default_factory=PoolBounds)
    tenants: dict[str, Tenant] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)
    """Grants of other work than generation, by `tenant/role`."""
    requests: dict[str, Request] = field(default_factory=dict)
    """Requests that wait, by `tenant/role`."""
    orders: dict[int, Order] = field(default_factory=dict)
    """Orders that have not been acknowledged."""
    running: list[RunningPlan] = field(default_factory=list)
    """The plans that are being carried out. No two of them touch the same GPU, or shards of the same tenant."""
    next_order: int = 1
    next_tenant: int = 0
    rejected: list[str] = field(default_factory=list)
    """Faults of the last dropped plan; empty if no plan was dropped."""
    num_rejected: int = 0
    """Number of plans that were dropped because they broke a check."""

    def apply(self, now_s: float, command: Command) -> bool:
        """Carry out one command at time `now_s` and its consequences: plans, orders, grants. Returns whether the pool
        has changed; only a `Tick` can change nothing. Raises UserError, and changes nothing, for a command that is
        refused.
        """
        owed = self._owed(now_s)
        self._carry_out(now_s, command)
        if not isinstance(command, Tick):
            self._settle(now_s, owed)
        expired = self._expire(now_s)
        gone_on = self._go_on(now_s)
        return expired or gone_on or not isinstance(command, Tick)

    def orders_of(self, tenant: str) -> list[Order]:
        """Return the orders that a tenant has not acknowledged, oldest first."""
        return [order for _, order in sorted(self.orders.items()) if order.tenant == tenant]

    def has(self, tenant: str, role: Role) -> bool:
        """Return whether a role holds the GPUs that it last asked for (for generation: whether any shard is awake).
        Raises UserError for an unknown tenant."""
        member = self._tenant(tenant)
        if _key(tenant, role) in self.grants:
            return True
        return role == "rollout" and member.generates and member.estimate is None

    @property
    def suspects(self) -> dict[str, str]:
        """Tenants with processes that have to be ended, and the reason for each tenant."""
        return {name: tenant.suspect for name, tenant in self.tenants.items() if tenant.suspect}

    def state(self, now_s: float) -> PoolState:
        """Return the state for the planner. The GPUs of suspect tenants are blocked. The state has no suspect tenants
        and no tenants that have not been admitted."""
        trusted = {name: tenant for name, tenant in self.tenants.items() if not tenant.suspect}
        owed = self._owed(now_s)
        blocked = {gpu for name in self.suspects for gpu in self._held(name)}
        return PoolState(
            self.num_gpus,
            {name: _view(tenant, hungry=owed[name] >= self.bounds.turn_s) for name, tenant in trusted.items()},
            tuple(grant for grant in self.grants.values() if grant.tenant in trusted),
            tuple(one for one in self.requests.values() if one.tenant in trusted and trusted[one.tenant].admitted),
            now_s,
            frozenset(blocked),
        )

    def plan(self, state: PoolState) -> Plan:
        """Return the plan for `state`. A pool with another rule overrides this method."""
        return plan_cycle(state, starve_s=self.bounds.starve_s)

    def _held(self, name: str) -> set[int]:
        tenant = self.tenants[name]
        held = {gpu for shard in tenant.awake for gpu in tenant.map.shards[shard]}
        return held.union(*(grant.gpus for grant in self.grants.values() if grant.tenant == name))

    def _owed(self, now_s: float) -> dict[str, float]:
        """Return each tenant's balance in seconds. It is its time with work but no shard awake, minus PAID times its
        time with a shard or without work. The result is at least 0 and at most two turns. It does not change while the
        tenant trains."""
        trains = {grant.tenant for grant in self.grants.values()}
        owed = {}
        for name, tenant in self.tenants.items():
            passed_s = max(0.0, now_s - tenant.settled_s)
            waits = tenant.estimate is not None or (tenant.generates and bool(tenant.remaining))
            if tenant.awake or not waits:
                owed[name] = max(0.0, tenant.owed_s - PAID * passed_s)
            elif name in trains:
                owed[name] = tenant.owed_s
            else:
                owed[name] = min(2 * self.bounds.turn_s, tenant.owed_s + passed_s)
        return owed

    def _settle(self, now_s: float, owed_s: Mapping[str, float]) -> None:
        """Update `owed_s` of each tenant to this time. This method must be called before the shards or the work of a
        tenant change, or with values of `_owed` from before the change."""
        for name, seconds in owed_s.items():
            if name in self.tenants:
                self.tenants[name].owed_s, self.tenants[name].settled_s = seconds, now_s

    # ---------------- These methods carry out the commands of tenants.

    def _carry_out(self, now_s: float, command: Command) -> None:
        if isinstance(command, Tick):
            return
        if isinstance(command, Resume):
            for tenant in self.tenants.values():
                tenant.heard_s = now_s
            for number, order in self.orders.items():
                self.orders[number] = replace(order, due_s=max(order.due_s, now_s + self.bounds.lease_s))
            return
        if isinstance(command, Register):
            self._register(now_s, command)
            return
        tenant = self._tenant(command.tenant)
        match command:
            case Alive():
                pass
            case Ask():
                self._check_ask(command)
                self._ask(now_s, command)
            case Release():
                self._release(now_s, command)
            case Report():
                tenant.demand = command.demand
            case StepFinished():
                tenant.has_finished_step = True
                self._admit()
            case ShrinkToZero():
                tenant.ending, tenant.estimate = True, None
            case Outcome():
                self._acknowledge(command)
            case Unregister():
                self._unregister(command)
            case _:
                assert_never(command)
        tenant.heard_s = now_s

    def _register(self, now_s: float, command: Register) -> None:
        own, there = command.map, self.tenants.get(command.map.name)
        if there is not None:
            if command.processes is not None and (there.map, there.processes) == (own, command.processes):
                return  # The same run repeats the call, because it has missed the answer.
            raise UserError(f"pool: a tenant named {own.name!r} is registered already, expected another run name")
        beyond = sorted(gpu for gpu in {*own.train_gpus, *own.rollout_gpus} if not 0 <= gpu < self.num_gpus)
        if beyond:
            last = self.num_gpus - 1
            raise UserError(f"pool: tenant {own.name!r} names GPU {beyond[0]}, expected GPUs from 0 to {last}")
        self.tenants[own.name] = Tenant(own, self.next_tenant, now_s, admitted=False)
        tenant = self.tenants[own.name]
        tenant.processes, tenant.settled_s = command.processes, now_s
        asked_s = command.order_timeout_s or self.bounds.order_timeout_s
        tenant.order_timeout_s = min(asked_s, self.bounds.max_order_timeout_s)
        self.next_tenant += 1
        self._admit()

    def _admit(self) -> None:
        """Admit tenants in the order of registration, up to and including the first that has not finished a step."""
        for tenant in sorted(self.tenants.values(), key=lambda one: one.number):
            tenant.admitted = True
            if not (tenant.has_finished_step or tenant.suspect):
                return

    def _check_ask(self, ask: Ask) -> None:
        """Raise UserError for a request that contradicts what the role holds or waits for."""
        key = _key(ask.tenant, ask.role)
        held = self.grants.get(key) or self.requests.get(key)
        if ask.priority is Priority.GENERATION and ask.role != "rollout":
            raise UserError(
                f"pool: tenant {ask.tenant!r} asks for generation with its role {ask.role!r}, expected 'rollout'"
            )
        if held is not None and held.priority is not ask.priority:
            raise UserError(
                f"pool: {key} asks for {ask.priority.name} while it holds or waits for {held.priority.name}; "
                "release that first"
            )
        if self.tenants[ask.tenant].ending:
            raise UserError(f"pool: tenant {ask.tenant!r} asks for GPUs after its `ShrinkToZero`")

    def _ask(self, now_s: float, ask: Ask) -> None:
        key = _key(ask.tenant, ask.role)
        tenant = self.tenants[ask.tenant]
        if ask.priority is not Priority.GENERATION:
            if key not in self.grants:
                self.requests.setdefault(key, Request(ask.tenant, ask.role, ask.priority, now_s))
        elif not tenant.awake:
            tenant.estimate = ask.groups or 0
        else:
            tenant.generates = True

    def _release(self, now_s: float, release: Release) -> None:
        key = _key(release.tenant, release.role)
        if key not in self.grants and key not in self.requests:
            raise UserError(f"pool: {key} releases GPUs, but holds none and waits for none")
        grant, request = self.grants.pop(key, None), self.requests.pop(key, None)
        if release.then is None:
            return
        try:
            self._check_ask(release.then)
        except UserError:
            if grant is not None:
                self.grants[key] = grant
            if request is not None:
                self.requests[key] = request
            raise
        self._ask(now_s, release.then)

    def _acknowledge(self, outcome: Outcome) -> None:
        order = self.orders.get(outcome.order)
        if order is None or order.tenant != outcome.tenant:
            return
        told = {*outcome.done, *outcome.failed}
        if told != set(order.shards):
            raise UserError(
                f"pool: tenant {outcome.tenant!r} acknowledges shards {sorted(told)} of order {order.number}, "
                f"which is for {sorted(order.shards)}"
            )
        del self.orders[outcome.order]
        tenant = self.tenants[order.tenant]
        if order.kind == "shrink":
            tenant.awake.difference_update(order.shards)
            return
        for shard in outcome.failed:
            tenant.awake.discard(shard)
            if shard not in outcome.unready:
                tenant.failures[shard] = tenant.failures.get(shard, 0) + 1
        for shard in outcome.done:
            tenant.failures.pop(shard, None)
        if outcome.done:
            tenant.estimate, tenant.generates = None, True

    def _unregister(self, command: Unregister) -> None:
        name = command.tenant
        if not command.dead and (held := sorted(self._held(name))):
            raise UserError(f"pool: tenant {name!r} unregisters while it holds GPUs {held}")
        self._void(name)
        self.tenants.pop(name)
        for key in [key for key in (*self.grants, *self.requests) if key.rpartition("/")[0] == name]:
            self.grants.pop(key, None)
            self.requests.pop(key, None)
        self._admit()

    def _void(self, name: str) -> None:
        for number in [number for number, order in self.orders.items() if order.tenant == name]:
            del self.orders[number]

    def _tenant(self, name: str) -> Tenant:
        found = self.tenants.get(name)
        if found is None:
            raise UserError(f"pool: {name!r} is not a tenant; tenants: {', '.join(sorted(self.tenants)) or 'none'}")
        return found

    # ---------------- These methods apply the consequences of a command.

    def _expire(self, now_s: float) -> bool:
        """Mark tenants as suspect that have not answered an order or shown a sign of life for too long. Returns whether
        any tenant became suspect."""
        num_before = len(self.suspects)
        for order in list(self.orders.values()):
            if now_s > order.due_s:
                late_s = now_s - order.due_s + self.tenants[order.tenant].order_timeout_s
                shards = list(order.shards)
                self._suspect(order.tenant, f"{order.kind} of shards {shards} not answered for {late_s:.0f} s")
        for name, tenant in self.tenants.items():
            silent_s = now_s - tenant.heard_s
            if silent_s > self.bounds.lease_s:
                self._suspect(name, f"no sign of life for {silent_s:.0f} s")
        return len(self.suspects) > num_before

    def _suspect(self, name: str, reason: str) -> None:
        tenant = self.tenants[name]
        if not tenant.suspect:
            tenant.suspect = reason
            self._void(name)
            self._admit()

    def _go_on(self, now_s: float) -> bool:
        """Continue the running plans as far as acknowledgements allow, and begin others beside them. Returns whether
        anything has changed."""
        num_rejected, changed = self.num_rejected, False
        while True:
            answered = [running for running in self.running if running.orders.isdisjoint(self.orders)]
            for running in answered:
                if running.waking:
                    self.running.remove(running)
                else:
                    self._grant_and_wake(now_s, running)
            if not answered and not self._begin(now_s):
                return changed or self.num_rejected > num_rejected
            changed = True

    def _begin(self, now_s: float) -> bool:
        """Make a plan and order its shrinks. Returns False if there is nothing to do."""
        state = self._after_running(now_s)
        plan = self.plan(state)
        if not plan:
            return False
        faults = broken_checks(state, plan)
        if faults:
            self.rejected, self.num_rejected = faults, self.num_rejected + 1
            return False
        self._settle(now_s, self._owed(now_s))
        self.running.append(RunningPlan(plan))
        self._order(now_s, "shrink", plan.shrinks, self.running[-1])
        return True

    def _after_running(self, now_s: float) -> PoolState:
        """Return the state for the next plan: the one after all running plans, as far as these are still possible. The
        next plan leaves their GPUs alone, and the shards of tenants that have an order or will get one."""
        state = self.state(now_s)
        frozen = {gpu for order in self.orders.values() for gpu in self._gpus(order.tenant, order.shards)}
        busy = {order.tenant for order in self.orders.values()}
        for order in self.orders.values():
            if order.kind == "expand" and order.tenant in state.tenants:
                woken = replace(state.tenants[order.tenant], estimate=None, generates=True)
                state = replace(state, tenants=state.tenants | {order.tenant: woken})
        for running in self.running:
            if running.waking:
                continue
            plan, known = running.plan, state.tenants
            shards = [shard for shard in (*plan.shrinks, *plan.expands) if shard.tenant in self.tenants]
            busy.update(shard.tenant for shard in shards)
            frozen.update(gpu for shard in shards for gpu in self._gpus(shard.tenant, [shard.shard]))
            frozen.update(gpu for grant in plan.grants for gpu in grant.gpus)
            shrinks = tuple(shard for shard in plan.shrinks if shard.tenant in known)
            free = {*state.idle(), *(gpu for shard in shrinks for gpu in self._gpus(shard.tenant, [shard.shard]))}
            waiting = {(one.tenant, one.role) for one in state.requests}
            grants, expands = [], []
            for grant in plan.grants:
                if (grant.tenant, grant.role) in waiting and free.issuperset(grant.gpus):
                    free.difference_update(grant.gpus)
                    grants.append(grant)
            for shard in plan.expands:
                if shard.tenant in known and free.issuperset(gpus := self._gpus(shard.tenant, [shard.shard])):
                    free.difference_update(gpus)
                    expands.append(shard)
            state = apply_plan(state, Plan(shrinks, tuple(grants), tuple(expands)))
        return replace(state, frozen=frozenset(frozen), busy=frozenset(busy))

    def _gpus(self, tenant: str, shards: Iterable[int]) -> set[int]:
        return {gpu for shard in shards for gpu in self.tenants[tenant].map.shards[shard]}

    def _grant_and_wake(self, now_s: float, running: RunningPlan) -> None:
        """Carry out the plan's grants and order its expands, except those that have become impossible. While shards
        were put to sleep, a tenant can have left or become suspect, and GPUs can have failed to become free."""
        running.waking = True
        self._settle(now_s, self._owed(now_s))
        idle = set(self.state(now_s).idle())
        for grant in running.plan.grants:
            key = _key(grant.tenant, grant.role)
            if key in self.requests and not self.tenants[grant.tenant].suspect and idle.issuperset(grant.gpus):
                del self.requests[key]
                self.grants[key] = grant
                idle.difference_update(grant.gpus)
        possible = []
        for shard in running.plan.expands:
            tenant = self.tenants.get(shard.tenant)
            if tenant is None or tenant.suspect or tenant.ending:
                continue
            gpus = tenant.map.shards[shard.shard]
            if idle.issuperset(gpus):
                idle.difference_update(gpus)
                tenant.awake.add(shard.shard)
                possible.append(shard)
        self._order(now_s, "expand", possible, running)

    def _order(self, now_s: float, kind: OrderKind, shards: Sequence[ShardId], running: RunningPlan) -> None:
        for name in sorted({shard.tenant for shard in shards}):
            own = tuple(sorted(shard.shard for shard in shards if shard.tenant == name))
            due_s = now_s + self.tenants[name].order_timeout_s
            self.orders[self.next_order] = Order(self.next_order, name, kind, own, due_s)
            running.orders.add(self.next_order)
            self.next_order += 1


def _key(tenant: str, role: Role) -> str:
    return f"{tenant}/{role}"


def _view(tenant: Tenant, *, hungry: bool) -> TenantState:
    known = tenant.admitted
    return TenantState(
        tenant.map,
        frozenset(tenant.awake),
        tenant.remaining if known else None,
        tenant.estimate if known else None,
        generates=tenant.generates,
        ending=tenant.ending,
        left_out=frozenset(tenant.left_out),
        hungry=hungry,
    )
