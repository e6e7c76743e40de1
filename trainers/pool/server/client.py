"""Calls a pool of GPUs from another process. If the pool's process has died, calls wait until it runs again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ....actors.process.remote_methods import decode_result, encode_arguments, submit
from ....codecs import messages
from ...errors import UserError
from ...supervision.own_clock import MOST_S, OwnClock
from ..state.commands import Command, Order, Register, Release, Unregister
from ..state.plan import Role
from ..state.status import PoolFigures, PoolStatus, StageNote
from .actor import PoolActor

NAMESPACE = "headrace-pool"
"""Ray namespace of all pools. Runs have other namespaces."""
ANSWER_S = 20.0
"""Seconds within which a pool answers a call, in addition to the wait that the call asks for."""
LOST_S = 120.0
"""Seconds without an answer after which a pool counts as lost. Ray starts its process again within a few seconds."""
UNWRITTEN_S = 600.0
"""Seconds for which a pool may be unable to write its journal before a call fails."""
AGAIN_S = 0.5
"""Seconds between two attempts."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class PoolLost(RuntimeError):
    """The pool did not answer a call in time, for example because its process died and was not restarted. The message
    names the pool and the call."""


def actor_name(pool: str) -> str:
    """Return the name of the actor that keeps the pool named `pool`. The pool's placement group has the same name."""
    return f"headrace-pool-{pool}"


class PoolClient:
    """Calls of one pool. Threads may share it. Ray must be initialized in the cluster that has the pool."""

    def __init__(self, pool: str) -> None:
        """Find the pool. Raises UserError if the cluster has no pool of this name."""
        self._pool = pool
        try:
            self._actor = ray.get_actor(actor_name(pool), namespace=NAMESPACE)
        except ValueError as error:
            raise UserError(
                f"pool.name: got {pool!r}, expected a pool of the Ray cluster at pool.address; `headrace pool start` "
                "starts one"
            ) from error

    def send(self, command: Command) -> None:
        """Make the pool carry out a command. Waits while the pool cannot write its journal, as on a full disk. Raises
        UserError if the pool refuses the command, and PoolLost if its journal cannot be written for UNWRITTEN_S."""
        kind, body, lost = type(command).__name__, messages.encode(command), 0
        clock = OwnClock()
        while True:
            reply, attempts = self._call(PoolActor.apply, kind, body)
            lost += attempts - 1
            if not reply.unwritten:
                break
            if clock.now_s() > UNWRITTEN_S:
                raise PoolLost(f"pool {self._pool!r}: {kind} was not possible for {UNWRITTEN_S:g} s: {reply.unwritten}")
            _log.warning("pool %r does not take %s yet: %s", self._pool, kind, reply.unwritten)
            time.sleep(AGAIN_S)
        if reply.refusal and lost and isinstance(command, (Register, Release, Unregister)):
            _log.info("pool: %s, after an attempt whose answer was lost", reply.refusal)
            return  # The attempt without an answer was carried out.
        if reply.refusal:
            raise UserError(reply.refusal)

    def wait_for_grant(self, tenant: str, role: Role, timeout_s: float) -> bool:
        """Return whether a role holds the GPUs that it asked for, after a wait of up to `timeout_s` seconds."""
        return self._call(PoolActor.wait_for_grant, tenant, role, timeout_s, wait_s=timeout_s)[0]

    def wait_for_orders(self, tenant: str, timeout_s: float) -> list[Order]:
        """Return the orders that `tenant` has not acknowledged; waits up to `timeout_s` seconds for the first."""
        return self._call(PoolActor.wait_for_orders, tenant, timeout_s, wait_s=timeout_s)[0]

    def note(self, tenant: str, notes: list[StageNote]) -> None:
        """Write stages of switches into the pool's trace."""
        self._call(PoolActor.note, tenant, notes)

    def status(self) -> PoolStatus:
        """Return a snapshot of the pool."""
        return self._call(PoolActor.status)[0]

    def figures(self, timeout_s: float) -> PoolFigures:
        """Return the pool's figures for Prometheus. Raises PoolLost when the pool has not answered after `timeout_s`
        seconds."""
        return self._call(PoolActor.figures, answer_s=timeout_s, lost_s=0.0)[0]

    def _call(
        self,
        method: Callable[..., Any],
        *arguments: Any,
        wait_s: float = 0.0,
        answer_s: float = ANSWER_S,
        lost_s: float = LOST_S,
    ) -> tuple[Any, int]:
        """Return the result of a call, and the number of attempts that it took. Raises PoolLost after `lost_s` seconds
        without an answer; each attempt may take `answer_s` seconds."""
        message, attempts = encode_arguments(arguments), 0
        # This clock leaves out the time during which this process was stopped.
        clock = OwnClock(most_s=wait_s + answer_s + MOST_S)
        while True:
            attempts += 1
            try:
                reply: Any = ray.get(submit(self._actor, method, message), timeout=wait_s + answer_s)
                return decode_result(method, reply), attempts
            except RayTaskError:
                raise
            except (GetTimeoutError, RayError) as error:
                waited_s = clock.now_s()
                if waited_s >= wait_s + lost_s:
                    raise PoolLost(
                        f"pool {self._pool!r}: got no answer to {method.__name__} for {waited_s:.1f} s: "
                        f"{type(error).__name__}"
                    ) from error
                _log.warning("pool %r does not answer %s: %s", self._pool, method.__name__, type(error).__name__)
                time.sleep(AGAIN_S)
