"""Simulates tenants on a pool of GPUs as discrete events: rollouts, training, switches, and their waits.

    simulated tenant -> command -> Pool -> orders, grants -> simulated tenant, some seconds later

The pool is the real state machine with the real planner; only time, engines and trainers are simulated. An engine
generates several groups at the same time. Groups of an engine that is put to sleep continue on another engine without
loss. Tenants here never fail, and their engines and trainers are already built when they arrive.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...grpo.pool_demand import Demand
from ..state.commands import (
    Ask,
    Command,
    Order,
    OrderKind,
    Outcome,
    Register,
    Release,
    Report,
    ShrinkToZero,
    StepFinished,
    Tick,
    Unregister,
)
from ..state.plan import Priority, Role
from ..state.pool import Pool
from ..state.status import Event, PoolEvent, Stage
from .config import PhaseSeconds, SwitchSection, TenantSpec


@dataclass(slots=True)
class TenantFigures:
    """Figures of one tenant between the end of the warm-up and the end of the simulation. GPU seconds are summed over
    the GPUs."""

    name: str
    weight: float
    steps: int = 0
    """Number of train steps that ended."""
    held_gpu_s: float = 0.0
    """GPU seconds that the tenant held."""
    train_gpu_s: float = 0.0
    """GPU seconds in which the tenant trained."""
    rollout_gpu_s: float = 0.0
    """GPU seconds in which the tenant's engines generated. An engine that is not full of groups counts in
    proportion."""
    train_waits_s: list[float] = field(default_factory=list)
    """Seconds that each training waited for its GPUs, from the request to the grant."""
    rollout_waits_s: list[float] = field(default_factory=list)
    """Seconds of each period in which the tenant had groups to generate but no engine awake."""
    switches: int = 0
    """Number of times that an engine was woken or put to sleep."""
    ended_s: float | None = None
    """Simulated time in seconds at which the tenant left the pool; None if it has not left."""

    @property
    def busy_gpu_s(self) -> float:
        """GPU seconds in which the tenant trained or generated."""
        return self.train_gpu_s + self.rollout_gpu_s


@dataclass(slots=True, eq=False)
class _Group:
    step: int
    left_s: float
    """Seconds of generation that the group needs when it next gets an engine."""
    shard: int = -1
    """Number of the engine that generates the group; -1 while the group waits for one."""
    end_s: float = 0.0
    """Time in seconds at which the group is complete if its engine stays awake."""
    starts: int = 0
    """Number of engines that have generated a part of the group."""


class _Tenant:
    def __init__(self, spec: TenantSpec, seed: int) -> None:
        section = spec.section
        self.spec, self.section, self.name = spec, section, spec.name
        self.figures = TenantFigures(spec.name, section.weight)
        self.group_s = PhaseSeconds(section.group_s, section.group_sigma, seed, spec.number, 0)
        self.train_s = PhaseSeconds(section.train_s, section.train_sigma, seed, spec.number, 1)
        self.begun = self.trained = 0
        """Numbers of steps whose groups may be generated, and that have been trained on."""
        self.missing: dict[int, int] = {}
        """Number of groups that are not complete, of each step that is not."""
        self.queue: deque[_Group] = deque()
        """Groups that wait for an engine, oldest first."""
        self.active: dict[int, set[_Group]] = {}
        """Groups on each engine that accepts."""
        self.num_active = 0
        self.num_held_gpus = 0
        self.told: tuple[int, int] | None = None
        """Target of the last report to the pool, and the bucket of its progress; None before the first report."""
        self.settled_s = 0.0
        """Time up to which figures are counted."""
        self.starved_since_s: float | None = None
        """Time since which groups wait while no engine is awake; None at other times."""
        self.asked_s: float | None = None
        """Time in seconds of the waiting request for training; None without one."""
        self.training = False
        """True from the request for train GPUs to their release."""
        self.ending = False

    @property
    def generated(self) -> int:
        """Number of steps with completely generated rollouts."""
        return min(self.missing, default=self.begun)

    @property
    def may_begin(self) -> bool:
        """Return whether another step's groups may be generated."""
        ahead, steps = self.begun - self.trained, self.section.steps
        return ahead <= self.section.max_staleness and (steps is None or self.begun < steps)

    def demand(self, *, by_step: bool) -> Demand:
        """Return the demand. by_step: true for the demand of the oldest step in generation alone, false for that of all
        steps that may be generated now."""
        groups = self.section.groups
        if by_step:
            return Demand(groups, groups - self.missing.get(self.generated, 0))
        target = (self.begun - self.trained) * groups
        return Demand(target, target - sum(self.missing.values()))


class PoolSimulation:
    """One pool and its tenants, simulated from time 0."""

    def __init__(
        self,
        pool: Pool,
        specs: Sequence[TenantSpec],
        *,
        seed: int,
        warmup_s: float = 0.0,
        by_step: bool = False,
        trace: Callable[[PoolEvent], None] | None = None,
    ) -> None:
        """Prepare the simulation; no tenant has arrived yet.

        pool: an empty pool whose tenants need not show signs of life (`lease_s` infinite). seed: seed of the seconds
        that groups and training take. warmup_s: seconds at the beginning that are left out of all figures. by_step:
        true if tenants report their demand step by step, false for all work that they may do now. trace: receives the
        events of each GPU, in the order of time.
        """
        self.pool = pool
        self._warmup_s, self._by_step, self._trace = warmup_s, by_step, trace
        self._tenants = {spec.name: _Tenant(spec, seed) for spec in specs}
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._next_order = pool.next_order
        self._waiting: set[str] = set()
        """Tenants whose training waits for its GPUs."""

    def run(self, until_s: float | None = None) -> list[TenantFigures]:
        """Simulate until `until_s`, or until all tenants have left, and return the figures of each tenant."""
        for tenant in self._tenants.values():
            self._at(tenant.section.arrives_s, self._arrive, tenant)
        while self._events and (until_s is None or self._events[0][0] <= until_s):
            self._now, _, handler = heapq.heappop(self._events)
            handler()
        self._now = self._now if until_s is None else until_s
        for tenant in self._tenants.values():
            self._settle(tenant)
            self._end_waits(tenant)
        return [tenant.figures for tenant in self._tenants.values()]

    # ---------------- These methods exchange commands and orders with the pool.

    def _apply(self, command: Command) -> None:
        """Give the pool a command, and carry out the orders and grants that follow."""
        self.pool.apply(self._now, command)
        while self._next_order < self.pool.next_order:
            order = self.pool.orders.get(self._next_order)
            self._next_order += 1
            if order is not None:
                self._obey(self._tenants[order.tenant], order)
        for name in sorted(self._waiting):
            if self.pool.has(name, "train"):
                self._waiting.remove(name)
                self._granted(self._tenants[name])

    def _obey(self, tenant: _Tenant, order: Order) -> None:
        switch = tenant.section.switch
        self._settle(tenant)
        if self._counts:
            tenant.figures.switches += len(order.shards)
        gpus = [gpu for shard in order.shards for gpu in tenant.spec.map.shards[shard]]
        if order.kind == "shrink":
            self._displace(tenant, order.shards)
        else:
            tenant.num_held_gpus += len(gpus)
            since_s = tenant.starved_since_s
            self._note(tenant, "rollout", gpus, "grant", None if since_s is None else self._now - since_s)
        took_s = self._note_stages(tenant, "rollout", gpus, _stages(order.kind, switch))
        self._at(self._now + took_s, self._done, tenant, order)

    def _done(self, tenant: _Tenant, order: Order) -> None:
        self._settle(tenant)
        gpus = [gpu for shard in order.shards for gpu in tenant.spec.map.shards[shard]]
        if order.kind == "shrink":
            tenant.num_held_gpus -= len(gpus)
            self._note(tenant, "rollout", gpus, "release")
        else:
            tenant.active.update((shard, set()) for shard in order.shards)
            self._fill(tenant)
        self._apply(Outcome(tenant.name, order.number, order.shards, {}))
        if tenant.ending:
            self._leave(tenant)

    # ---------------- These methods simulate the life of a tenant.

    def _arrive(self, tenant: _Tenant) -> None:
        tenant.settled_s = self._now
        self._apply(Register(tenant.spec.map))
        # The engine exists already, so the next tenant can begin without a step.
        self._apply(StepFinished(tenant.name))
        self._begin(tenant)
        self._apply(Ask(tenant.name, "rollout", Priority.GENERATION, tenant.section.groups))
        self._report(tenant)

    def _train(self, tenant: _Tenant) -> None:
        if tenant.training or tenant.generated <= tenant.trained:
            return
        tenant.training, tenant.asked_s = True, self._now
        self._waiting.add(tenant.name)
        self._apply(Ask(tenant.name, "train", Priority.TRAINING))
        if tenant.name in self._waiting:
            self._at(self._now + self.pool.bounds.starve_s, self._starve, tenant, self._now)

    def _starve(self, tenant: _Tenant, asked_s: float) -> None:
        """Let the pool reconsider a request that has waited long."""
        if tenant.name in self._waiting and tenant.asked_s == asked_s:
            self._apply(Tick())

    def _granted(self, tenant: _Tenant) -> None:
        assert tenant.asked_s is not None
        wait_s = self._now - tenant.asked_s
        if tenant.asked_s >= self._warmup_s:
            tenant.figures.train_waits_s.append(wait_s)
        tenant.asked_s = None
        self._settle(tenant)
        gpus, switch = tenant.spec.map.train_gpus, tenant.section.switch
        tenant.num_held_gpus += len(gpus)
        self._note(tenant, "train", gpus, "grant", wait_s)
        begin_s = self._now + self._note_stages(tenant, "train", gpus, [("onload", switch.onload_s)])
        end_s = begin_s + tenant.train_s.draw() * tenant.spec.train_scale
        self._at(end_s, self._trained, tenant, begin_s)

    def _trained(self, tenant: _Tenant, begin_s: float) -> None:
        gpus, switch = tenant.spec.map.train_gpus, tenant.section.switch
        tenant.figures.train_gpu_s += len(gpus) * max(0.0, self._now - max(begin_s, self._warmup_s))
        sync_s = switch.sync_s if tenant.active else 0.0
        took_s = self._note_stages(tenant, "train", gpus, [("sync", sync_s), ("offload", switch.offload_s)])
        self._at(self._now + took_s, self._released, tenant)

    def _released(self, tenant: _Tenant) -> None:
        self._settle(tenant)
        gpus = tenant.spec.map.train_gpus
        tenant.num_held_gpus -= len(gpus)
        self._note(tenant, "train", gpus, "release")
        tenant.training = False
        tenant.trained += 1
        tenant.figures.steps += self._counts
        self._apply(Release(tenant.name, "train"))
        self._apply(StepFinished(tenant.name))
        if tenant.trained == tenant.section.steps:
            tenant.ending = True
            self._apply(ShrinkToZero(tenant.name))
            self._leave(tenant)
            return
        self._begin(tenant)
        self._report(tenant)
        self._train(tenant)

    def _leave(self, tenant: _Tenant) -> None:
        if not tenant.num_held_gpus and tenant.figures.ended_s is None:
            tenant.figures.ended_s = self._now
            self._apply(Unregister(tenant.name))

    # ---------------- These methods simulate rollouts.

    def _begin(self, tenant: _Tenant) -> None:
        while tenant.may_begin:
            step, groups = tenant.begun, tenant.section.groups
            tenant.begun += 1
            tenant.missing[step] = groups
            tenant.queue.extend(_Group(step, tenant.group_s.draw()) for _ in range(groups))
        self._fill(tenant)

    def _fill(self, tenant: _Tenant) -> None:
        self._settle(tenant)
        room = [(len(groups), shard) for shard, groups in tenant.active.items()]
        heapq.heapify(room)
        while tenant.queue and room and room[0][0] < tenant.section.engine_groups:
            count, shard = room[0]
            self._start(tenant, tenant.queue.popleft(), shard)
            heapq.heapreplace(room, (count + 1, shard))
        if not tenant.queue or tenant.active:
            self._end_waits(tenant)
        elif tenant.starved_since_s is None:
            tenant.starved_since_s = self._now

    def _start(self, tenant: _Tenant, group: _Group, shard: int) -> None:
        group.shard, group.end_s, group.starts = shard, self._now + group.left_s, group.starts + 1
        tenant.active[shard].add(group)
        tenant.num_active += 1
        self._at(group.end_s, self._ended, tenant, group, group.starts)

    def _displace(self, tenant: _Tenant, shards: Iterable[int]) -> None:
        moved = [group for shard in shards for group in tenant.active.pop(shard)]
        for group in moved:
            group.shard, group.left_s = -1, group.end_s - self._now
        tenant.num_active -= len(moved)
        tenant.queue.extendleft(sorted(moved, key=lambda group: (group.step, group.left_s), reverse=True))
        self._fill(tenant)

    def _ended(self, tenant: _Tenant, group: _Group, start: int) -> None:
        """Record that a group is complete, unless it was moved after this end was scheduled."""
        if group.shard < 0 or group.starts != start:
            return
        self._settle(tenant)
        tenant.active[group.shard].remove(group)
        tenant.num_active -= 1
        if tenant.queue:
            self._start(tenant, tenant.queue.popleft(), group.shard)
        tenant.missing[group.step] -= 1
        complete = not tenant.missing[group.step]
        if complete and self._by_step:
            self._report(tenant)  # The pool must see this step as complete before it gets the next step's demand.
        if complete:
            del tenant.missing[group.step]
        self._report(tenant)
        if complete:
            self._train(tenant)

    def _report(self, tenant: _Tenant) -> None:
        demand = tenant.demand(by_step=self._by_step)
        told = (demand.target, demand.bucket)
        if told != tenant.told:
            tenant.told = told
            self._apply(Report(tenant.name, demand))

    def _settle(self, tenant: _Tenant) -> None:
        since_s, tenant.settled_s = tenant.settled_s, self._now
        counted_s = max(0.0, self._now - max(since_s, self._warmup_s))
        section = tenant.section
        tenant.figures.held_gpu_s += tenant.num_held_gpus * counted_s
        tenant.figures.rollout_gpu_s += tenant.num_active * section.tp / section.engine_groups * counted_s

    def _end_waits(self, tenant: _Tenant) -> None:
        since_s, tenant.starved_since_s = tenant.starved_since_s, None
        if since_s is not None and since_s >= self._warmup_s:
            tenant.figures.rollout_waits_s.append(self._now - since_s)

    @property
    def _counts(self) -> bool:
        return self._now >= self._warmup_s

    def _at(self, time: float, handler: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), lambda: handler(*arguments)))

    def _note_stages(
        self, tenant: _Tenant, role: Role, gpus: Iterable[int], stages: Sequence[tuple[Stage, float]]
    ) -> float:
        """Record stages that follow each other from now on, and return the sum of their seconds."""
        took_s = 0.0
        for stage, seconds in stages:
            took_s += seconds
            if self._trace is not None:
                self._at(self._now + took_s, self._note, tenant, role, gpus, stage, seconds)
        return took_s

    def _note(
        self,
        tenant: _Tenant,
        role: Role,
        gpus: Iterable[int],
        event: Event,
        seconds: float | None = None,
    ) -> None:
        if self._trace is None:
            return
        for gpu in gpus:
            noted = PoolEvent(t=self._now, gpu=tenant.spec.first_gpu + gpu, tenant=tenant.name, role=role, event=event)
            if seconds is not None:
                noted["seconds"] = seconds
            self._trace(noted)


def _stages(kind: OrderKind, switch: SwitchSection) -> list[tuple[Stage, float]]:
    if kind == "shrink":
        return [("shrink", 0.0), ("drain", switch.drain_s), ("sleep", switch.sleep_s), ("memory", switch.memory_s)]
    return [("wake", switch.wake_s), ("sync", switch.sync_s)]
