"""Defines `PoolActor`, a named Ray actor that keeps a pool of GPUs, answers tenants, and ends distrusted ones.

    tenant -- apply(command) --> journal, state --> plan --> orders, grants
    tenant -- wait_for_orders, wait_for_grant (long polls) --> answered at the next change

The actor never calls a tenant, and none of a tenant's code runs in it. When its process dies, Ray starts it again with
the same name, and it reads its state from the journal. It gives a GPU to another tenant only after the processes that
can hold the GPU's memory are known to be dead; time alone frees nothing. Its clock stands still while its process does
not run, or cannot write its journal, and then all tenants get a new lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....actors.process.json_lines import replace_file
from ....actors.process.remote_methods import decode_arguments
from ....codecs import messages
from ....dataplane.owned_folder import pid_space, process_start
from ...errors import UserError
from ...supervision.cleanup import Family, is_alive
from ...supervision.own_clock import OwnClock
from ...supervision.stuck_report import listed_actors
from ..state.commands import BY_NAME, Alive, Command, Order, Outcome, Processes, Reply, Resume, Tick, Unregister
from ..state.plan import Role
from ..state.planner import Gap, gaps
from ..state.pool import Pool, PoolBounds
from ..state.status import TRACE, PooledGpu, PoolFigures, PoolStatus, StageNote, TenantLine, WaitLine
from .far_processes import end_far_processes
from .folder import PoolJournal
from .gpu_trace import TraceWriter, holders

_log = logging.getLogger(__name__)


def driver_is_gone(processes: Processes) -> bool:
    """Return whether the driver's process has ended. Returns False for a driver on another host, which cannot be
    observed."""
    return processes.space == pid_space() and process_start(processes.driver) != processes.start


def end_processes(processes: Processes) -> str:
    """Kill the driver and all processes of the run that actors.json lists, and wait until they are gone. Returns "", or
    a sentence that names the remaining processes. These have to be ended by hand or by another call. Processes of other
    hosts are ended by the nodes of the pool's Ray cluster."""
    path = Path(processes.folder)
    here = processes.space == pid_space()
    family = Family(processes.driver if here and not driver_is_gone(processes) else 0)
    far = [] if here else [(processes.space, processes.driver, processes.start, processes.host)]
    actors = listed_actors(path, processes.run_id)
    family.add((actor.pid, actor.start) for actor in actors or () if actor.here and actor.start is not None)
    family.kill()
    everyone = [*family.members, *([family.driver] if family.driver is not None else [])]
    if left := [process.pid for process in everyone if is_alive(process)]:
        return f"the tenant's processes {left} do not end"
    # The data plane's processes on other hosts are left out: their start times are unknown, and they use no GPU.
    far += [(one.space, one.pid, one.start, one.host) for one in actors or () if not one.here and one.start]
    if far and (left := end_far_processes([process[:3] for process in far], END_AGAIN_S)):
        hosts = sorted({host for *process, host in far if tuple(process) in left})
        return f"it has processes on {', '.join(hosts)}, which no node of the pool's cluster could end: end them there"
    if actors is None:
        return (
            f"{path / 'actors.json'} is not a list of its processes, so nothing shows that they are dead: end them, "
            'and then write {"run_id": "", "actors": []} to that file'
        )
    return ""


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
        self._ending: dict[str, asyncio.Task[str]] = {}
        self._tried: dict[str, float] = {}
        """Time at which the processes of each tenant were last killed."""
        tenants = self._pool.tenants
        self._clock = OwnClock(max((tenant.heard_s for tenant in tenants.values()), default=0.0))
        self._resuming = bool(tenants)
        """True until tenants have a new lease, after a time in which the pool was away or could not write."""
        self._stopped_s: float | None = None
        """Time at which the journal could no longer be written; None while it can."""
        self._troubles: dict[str, str] = {}
        """What does not work: subject -> sentence."""
        self._switches: dict[str, tuple[int, float]] = {}
        self._orders = {"done": 0, "failed": 0, "void": 0}
        self._looking: asyncio.Task[None] | None = None
        """The task that lets time pass; begun by the first call, when the event loop runs."""

    @property
    def _pool(self) -> Pool:
        return self._journal.pool

    async def call(self, method: str, message: bytes) -> bytes:
        """Run the method named `method` and return its encoded result; see `actors/process/remote_methods.py`."""
        if self._looking is None or self._looking.done():
            if self._looking is not None:
                self._troubles["task"] = f"the look after tenants had ended and was begun again: {self._looking}"
            self._looking = asyncio.create_task(self._look_after())
        function = getattr(type(self), method)
        result = function(self, *decode_arguments(function, message))
        return messages.encode(await result if inspect.isawaitable(result) else result)

    def apply(self, kind: str, body: bytes) -> Reply:
        """Carry out the command of type `kind`, encoded as `body`, which is in the journal then. A sign of life is
        accepted even if the journal cannot be written, because no lease runs out then."""
        try:
            self._apply(messages.decode(body, BY_NAME[kind]))
        except UserError as error:
            return Reply(str(error))
        except OSError as error:
            return Reply() if kind == Alive.__name__ else Reply(unwritten=str(error))
        return Reply()

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
        now_s, pool = self._clock.now_s(), self._pool
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
        now_s, pool = self._clock.now_s(), self._pool
        held = holders(pool)
        gpus = tuple(" ".join(held[gpu]) if gpu in held else "idle" for gpu in range(pool.num_gpus))
        return PoolStatus(
            self._setup.name,
            self._trace.age_s,
            gpus,
            self._tenant_lines(now_s),
            (*self._waits(now_s), *self._orders_out(now_s)),
            tuple(pool.rejected),
            pool.num_rejected,
            os.getpid(),
            self._setup.reserved,
            tuple(self._troubles.values()),
        )

    def _apply(self, command: Command) -> None:
        now_s, before = self._clock.now_s(), set(self._pool.orders)
        self._resuming |= self._clock.was_away()
        try:
            if self._resuming:
                self._journal.apply(now_s, Resume())
                self._resuming, self._stopped_s = False, None
                self._troubles.pop("journal", None)
            self._journal.apply(now_s, command)
        except OSError as error:
            # While the journal cannot be written, no time passes for the pool: no tenant could show that it lives.
            self._stopped_s = now_s if self._stopped_s is None else self._stopped_s
            self._clock.turn_back(self._stopped_s)
            self._resuming, self._troubles["journal"] = True, str(error)
            raise
        for number in before.difference(self._pool.orders):
            outcome = "void"
            if isinstance(command, Outcome) and command.order == number:
                outcome = "failed" if command.failed else "done"
            self._orders[outcome] += 1
        self._trace.note_state(now_s, self._pool)
        rejected = Path(self._setup.folder) / f"rejected-{self._pool.num_rejected}.msgpack"
        if self._pool.num_rejected and not rejected.exists():
            try:
                replace_file(rejected, messages.encode(self._pool))
            except OSError as error:
                _log.warning("%s cannot be written: %s", rejected, error)
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
        """Watch the tenants forever. An error does not end the loop; `pool status` shows it until a look succeeds."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._look_once()
                self._troubles.pop("look", None)
            except Exception as error:
                _log.exception("the look after tenants failed")
                self._troubles["look"] = f"the look after tenants failed: {type(error).__name__}: {error}"

    def _look_once(self) -> None:
        """Tell the pool the time, and end the processes of tenants that are suspect or have no living driver."""
        with contextlib.suppress(OSError):  # Dead tenants are ended even if the journal cannot be written.
            self._apply(Tick())
        for name, tenant in list(self._pool.tenants.items()):
            if name in self._ending or tenant.processes is None:
                continue
            late = time.monotonic() - self._tried.get(name, -END_AGAIN_S) >= END_AGAIN_S
            if late and (tenant.suspect or driver_is_gone(tenant.processes)):
                self._ending[name] = asyncio.create_task(asyncio.to_thread(end_processes, tenant.processes))
                self._tried[name] = time.monotonic()
        for name in [name for name, task in self._ending.items() if task.done()]:
            ended = self._ending.pop(name)
            error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
            self._left[name] = ended.result() if error is None else f"its processes could not be ended: {error!r}"
            if not self._left[name]:
                self._left.pop(name)
                if name in self._pool.tenants:  # A tenant can have left by itself.
                    # If the journal cannot be written, a later call removes the tenant.
                    with contextlib.suppress(OSError):
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
                tenant.order_timeout_s,
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
    """Return the time (`time.time()`) at which the pool was first started. The file at `path` keeps this time. A file
    without a time, which a killed process can have left, is replaced."""
    try:
        return float(json.loads(path.read_text())["began"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        began = time.time()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"began": began}).encode())
        return began
