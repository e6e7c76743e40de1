"""Defines `PoolActor`, a named Ray actor that keeps a pool of GPUs, answers tenants, and ends distrusted ones.

    tenant -- apply(command) --> journal, state --> plan --> orders, grants
    tenant -- wait_for_orders, wait_for_grant (long polls) --> answered at the next change

The actor never calls a tenant, and none of a tenant's code runs in it. When its process dies, Ray starts it again with
the same name, and it reads its state from the journal. It gives a GPU to another tenant only after the processes that
can hold the GPU's memory are known to be dead; time alone frees nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....actors.process.remote_methods import decode_arguments
from ....codecs import messages
from ....dataplane.owned_folder import process_start
from ...errors import UserError
from ...supervision.cleanup import Family, is_alive
from ...supervision.stuck_report import read_actors
from ..state.commands import BY_NAME, Alive, Command, Order, Outcome, Processes, Tick, Unregister
from ..state.plan import Role
from ..state.planner import Gap, gaps
from ..state.pool import Pool, PoolBounds
from ..state.status import TRACE, PooledGpu, PoolFigures, PoolStatus, StageNote, TenantLine, WaitLine
from .folder import PoolJournal
from .gpu_trace import TraceWriter, holders


def driver_is_gone(processes: Processes) -> bool:
    """Return whether the driver's process has ended. Returns False for a driver on another host, which cannot be
    observed."""
    return processes.host == socket.gethostname() and process_start(processes.driver) != processes.start


def end_processes(processes: Processes) -> str:
    """Kill the driver and all processes of the run that actors.json lists, and wait until they are gone. Returns "", or
    a sentence that names the remaining processes. These have to be ended by hand or by another call."""
    if processes.host != socket.gethostname():
        return f"the tenant's driver is on {processes.host}, which this pool cannot reach: end it there"
    driver = [] if driver_is_gone(processes) else [(processes.driver, processes.start)]
    actors = read_actors(Path(processes.folder))
    far = sorted({actor.host for actor in actors if not actor.here})
    family = Family(processes.driver if driver else 0)
    family.add((actor.pid, actor.start) for actor in actors if actor.here and actor.start is not None)
    family.kill()
    everyone = [*family.members, *([family.driver] if family.driver is not None else [])]
    left = [process.pid for process in everyone if is_alive(process)]
    if left:
        return f"the tenant's processes {left} do not end"
    return f"it has processes on {', '.join(far)}, which this pool cannot reach" if far else ""


TICK_S = 1.0
"""Seconds between two checks for overdue orders and signs of life."""
END_AGAIN_S = 10.0
"""Seconds after which processes that did not end are killed again."""


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """Settings of a pool, as plain data for its process."""

    name: str
    folder: str
    """Folder of the journal and of pool_trace.jsonl."""
    num_gpus: int
    bounds: PoolBounds
    reserved: tuple[PooledGpu, ...] = ()
    """Place of each GPU; () for GPUs that are numbers only."""


class PoolActor:
    """Asynchronous Ray actor that keeps one pool."""

    def __init__(self, setup: PoolSetup) -> None:
        self._setup = setup
        folder = Path(setup.folder)
        self._began = _began(folder / "pool.json")
        self._journal = PoolJournal(folder / "pool.journal", Pool(setup.num_gpus, setup.bounds))
        self._trace = TraceWriter(folder / TRACE, self._began, holders(self._pool))
        self._changed = asyncio.Event()  # The event is replaced each time it is set.
        self._left: dict[str, str] = {}
        """Remaining processes of suspect tenants: name -> sentence."""
        self._switches: dict[str, tuple[int, float]] = {}
        self._orders = {"done": 0, "failed": 0, "void": 0}
        for name in list(self._pool.tenants):  # Tenants could not report while this process was down.
            self._apply(Alive(name))
        self._looking: asyncio.Task[None] | None = None
        """The task that lets time pass; begun by the first call, when the event loop runs."""

    @property
    def _pool(self) -> Pool:
        return self._journal.pool

    async def call(self, method: str, message: bytes) -> bytes:
        """Run the method named `method` and return its encoded result; see `actors/process/remote_methods.py`."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_after())
        function = getattr(type(self), method)
        result = function(self, *decode_arguments(function, message))
        return messages.encode(await result if inspect.isawaitable(result) else result)

    def apply(self, kind: str, body: bytes) -> str:
        """Carry out the command of type `kind`, encoded as `body`. Returns "" once the command is in the journal, or
        the reason for a refusal."""
        try:
            self._apply(messages.decode(body, BY_NAME[kind]))
        except UserError as error:
            return str(error)
        return ""

    async def wait_for_grant(self, tenant: str, role: Role, timeout_s: float) -> bool:
        """Return True as soon as a role holds the GPUs that it asked for, or False after `timeout_s` seconds."""
        return await self._until(lambda: tenant in self._pool.tenants and self._pool.has(tenant, role), timeout_s)

    async def wait_for_orders(self, tenant: str, timeout_s: float) -> list[Order]:
        """Return the orders that `tenant` has not acknowledged, as soon as there are any. Returns [] after `timeout_s`
        seconds."""
        await self._until(lambda: bool(self._pool.orders_of(tenant)), timeout_s)
        return self._pool.orders_of(tenant)

    def note(self, tenant: str, notes: list[StageNote]) -> None:
        """Write stages of switches into the trace."""
        self._trace.note_stages(tenant, notes)
        for note in notes:
            count, seconds = self._switches.get(note.event, (0, 0.0))
            self._switches[note.event] = (count + 1, seconds + note.seconds)

    def figures(self) -> PoolFigures:
        """Return the pool's figures for Prometheus."""
        now_s, pool = self._now_s(), self._pool
        return PoolFigures(
            pool.num_gpus,
            tuple((gpu, tenant, role) for gpu, (tenant, role) in sorted(holders(pool).items())),
            {name: gap.gap for name, gap in self._gaps(now_s).items()},
            tuple((one.tenant, one.priority.name.lower(), now_s - one.since_s) for one in pool.requests.values()),
            self._switches,
            self._orders,
            pool.num_rejected,
        )

    def status(self) -> PoolStatus:
        """Return a snapshot of the pool."""
        now_s, pool = self._now_s(), self._pool
        held = holders(pool)
        gpus = tuple(" ".join(held[gpu]) if gpu in held else "idle" for gpu in range(pool.num_gpus))
        return PoolStatus(
            self._setup.name,
            now_s,
            gpus,
            self._tenant_lines(now_s),
            (*self._waits(now_s), *self._orders_out(now_s)),
            tuple(pool.rejected),
            pool.num_rejected,
            os.getpid(),
            self._setup.reserved,
        )

    def _now_s(self) -> float:
        return time.time() - self._began

    def _apply(self, command: Command) -> None:
        now_s, before = self._now_s(), set(self._pool.orders)
        self._journal.apply(now_s, command)
        for number in before.difference(self._pool.orders):
            outcome = "void"
            if isinstance(command, Outcome) and command.order == number:
                outcome = "failed" if command.failed else "done"
            self._orders[outcome] += 1
        self._trace.note_state(now_s, self._pool)
        rejected = Path(self._setup.folder) / f"rejected-{self._pool.num_rejected}.msgpack"
        if self._pool.num_rejected and not rejected.exists():
            rejected.write_bytes(messages.encode(self._pool))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            return holds()
        return True

    async def _look_after(self) -> None:
        """Tell the pool the time, and end the processes of tenants that are suspect or have no living driver."""
        ending: dict[str, asyncio.Task[str]] = {}
        tried: dict[str, float] = {}
        while True:
            await asyncio.sleep(TICK_S)
            self._apply(Tick())
            for name, tenant in list(self._pool.tenants.items()):
                if name in ending or tenant.processes is None:
                    continue
                late = time.monotonic() - tried.get(name, -END_AGAIN_S) >= END_AGAIN_S
                if late and (tenant.suspect or driver_is_gone(tenant.processes)):
                    ending[name] = asyncio.create_task(asyncio.to_thread(end_processes, tenant.processes))
                    tried[name] = time.monotonic()
            for name in [name for name, task in ending.items() if task.done()]:
                self._left[name] = ending.pop(name).result()
                if not self._left[name]:
                    self._left.pop(name)
                    if name in self._pool.tenants:  # A tenant can have left by itself.
                        self._apply(Unregister(name, dead=True))

    def _tenant_lines(self, now_s: float) -> tuple[TenantLine, ...]:
        pool, found = self._pool, self._gaps(now_s)
        return tuple(
            TenantLine(
                name,
                tenant.map.train_gpus,
                tenant.map.shards,
                tuple(sorted(tenant.awake)),
                f"{name}/train" in pool.grants,
                None if tenant.demand is None else tenant.demand.remaining,
                found[name].share if name in found else 0.0,
                tenant.admitted,
                f"{tenant.suspect} {self._left.get(name, '')}".strip(),
                now_s - tenant.heard_s,
                None if tenant.processes is None else tenant.processes.driver,
            )
            for name, tenant in pool.tenants.items()
        )

    def _gaps(self, now_s: float) -> dict[str, Gap]:
        state = self._pool.state(now_s)
        awake = {name: len(tenant.awake) for name, tenant in state.tenants.items()}
        return gaps(state, awake, len(state.idle()))

    def _waits(self, now_s: float) -> list[WaitLine]:
        pool = self._pool
        lines = []
        for request in pool.requests.values():
            tenant = pool.tenants[request.tenant]
            what = f"{request.priority.name.lower()} on GPUs {list(tenant.map.gpus(request.role))}"
            if not tenant.admitted:
                freed_by = "the first step of the tenant that registered before it"
            else:
                freed_by = self._freed_by(tenant.map.gpus(request.role))
            lines.append(WaitLine(f"{request.tenant} ({request.role})", what, now_s - request.since_s, freed_by))
        return lines

    def _freed_by(self, gpus: tuple[int, ...]) -> str:
        held = holders(self._pool)
        shrinking = {
            gpu
            for order in self._pool.orders.values()
            if order.kind == "shrink"
            for shard in order.shards
            for gpu in self._pool.tenants[order.tenant].map.shards[shard]
        }
        words = []
        for gpu in gpus:
            if gpu in shrinking:
                words.append(f"GPU {gpu}: {held[gpu][0]} is putting its engine to sleep")
            elif gpu in held:
                words.append(f"GPU {gpu}: {held[gpu][0]} ({held[gpu][1]}) has to give it back")
        return "; ".join(words)

    def _orders_out(self, now_s: float) -> list[WaitLine]:
        return [
            WaitLine(
                "the pool",
                f"{order.tenant} to {order.kind} its shards {list(order.shards)}",
                now_s - order.due_s + self._pool.tenants[order.tenant].order_timeout_s,
                f"its answer, due within {order.due_s - now_s:.0f} s",
            )
            for order in self._pool.orders.values()
        ]


def _began(path: Path) -> float:
    """Return the time (`time.time()`) at which the pool was first started. A file that is written at that time contains
    it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"began": time.time()}))
    return json.loads(path.read_text())["began"]
