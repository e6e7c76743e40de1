"""`Tenant` connects a run to a pool of GPUs: it sends signs of life, and carries out the pool's orders.

driver's thread   hold(role) ... release(role)         waits for GPUs, and gives them back
order thread      wait_for_orders -> carry_out -> outcome
beat thread       alive, and the rollout work that is left when it has changed
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...grpo.pool_demand import Demand
from ..server.client import PoolClient
from ..state.commands import Alive, Ask, Order, Outcome, Processes, Register, Release, Report, StepFinished, Unregister
from ..state.plan import Priority, Role, TenantMap
from ..state.status import StageNote

POLL_S = 1.0
"""Seconds for which one long poll of the pool waits."""
ASK_AGAIN = 60
"""Number of long polls after which a request that waits is repeated."""
BEAT_S = 0.5
"""Seconds between two checks of the remaining rollout work."""
ALIVE_S = 5.0
"""Seconds between two signs of life."""
END_S = 30.0
"""Seconds within which the threads of a leaving tenant must have ended."""

CarryOut = Callable[[Order], Outcome]
"""Function that carries out an order. The function must not raise exceptions; its outcome lists the failures."""

_log = logging.getLogger(__name__)


class Tenant:
    """A run as a tenant of a pool, from `join` until `leave`."""

    def __init__(self, client: PoolClient, own: TenantMap, processes: Processes, order_timeout_s: float) -> None:
        """order_timeout_s: seconds that the pool gives this run to carry out an order."""
        self._client = client
        self.map = own
        self._registration = Register(own, processes, order_timeout_s)
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._done: dict[int, Outcome] = {}
        """Outcomes of the last orders by number, in case the pool has not received one."""
        self._joined = False

    def join(self) -> None:
        """Register in the pool, and send signs of life from now on. Raises UserError if the pool refuses the run."""
        self._client.send(self._registration)
        self._joined = True
        self._start(self._beat, "pool beat")

    def serve(self, carry_out: CarryOut, demand: Callable[[], Demand | None]) -> None:
        """Carry out orders from now on, in a separate thread. demand: function that returns the remaining rollout work,
        or None while this is unknown; it is called in another thread."""
        self._start(lambda: self._carry_out_orders(carry_out), "pool orders")
        self._start(lambda: self._report(demand), "pool progress")

    def hold(self, role: Role, priority: Priority, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until the pool has granted all GPUs of a role. The wait lasts for as long as the pool answers, because
        other tenants can hold them for long. on_wait: function that is called about every POLL_S seconds during the
        wait. Idempotent."""
        for poll in itertools.count():
            if poll % ASK_AGAIN == 0:  # This repeats a request that the disk of the pool has lost.
                self._client.send(Ask(self.map.name, role, priority))
            if self._client.wait_for_grant(self.map.name, role, POLL_S):
                return
            self.check()
            on_wait()

    def open_rollouts(self, groups: int) -> None:
        """Ask for GPUs to generate on, without waiting for them. groups: number of groups that are expected."""
        self._client.send(Ask(self.map.name, "rollout", Priority.GENERATION, groups))

    def release(self, role: Role) -> None:
        """Return the GPUs of a role that `hold` has waited for."""
        self._client.send(Release(self.map.name, role))

    @contextmanager
    def holding(self, role: Role, on_wait: Callable[[], None]) -> Iterator[None]:
        """Context manager in whose block a role holds its GPUs for initialization. If the block raises an exception,
        they stay held, because the processes on them must end first."""
        self.hold(role, Priority.INITIALIZATION, on_wait)
        yield
        self.release(role)

    def step_finished(self) -> None:
        """Tell the pool that a train step is finished, which lets the next tenant begin."""
        self._client.send(StepFinished(self.map.name))

    def note(self, notes: list[StageNote]) -> None:
        """Send stages of a switch to the pool's trace."""
        self._client.note(self.map.name, notes)

    def check(self) -> None:
        """Raise the error that has ended one of the threads, if any."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the threads, and wait for an order that is being carried out. The pool then gets no more signs of life,
        so `leave` must follow soon. Idempotent."""
        self._stopping.set()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def leave(self) -> None:
        """Unregister after all processes that used GPUs have ended, so that all GPUs of the run are free.
        Idempotent."""
        self.stop()
        if self._joined:
            self._joined = False
            with contextlib.suppress(Exception):  # The pool detects by itself that this process has ended.
                self._client.send(Unregister(self.map.name, dead=True))

    # ---------------- These methods run in threads.

    def _start(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                if not self._stopping.is_set():
                    _log.error("%s: %s", name, error)
                    self._failure = error

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _beat(self) -> None:
        while not self._stopping.wait(ALIVE_S):
            self._client.send(Alive(self.map.name))

    def _report(self, demand: Callable[[], Demand | None]) -> None:
        told: tuple[int, int] | None = None
        while not self._stopping.wait(BEAT_S):
            now = demand()
            if now is not None and (now.target, now.bucket) != told:
                self._client.send(Report(self.map.name, now))
                told = now.target, now.bucket

    def _carry_out_orders(self, carry_out: CarryOut) -> None:
        while not self._stopping.is_set():
            for order in self._client.wait_for_orders(self.map.name, POLL_S):
                if self._stopping.is_set():
                    return
                if order.number not in self._done:
                    self._done = {order.number: carry_out(order)}
                self._client.send(self._done[order.number])
