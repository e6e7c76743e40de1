"""`EngineStandby` is a process that imports vLLM ahead of time, and then becomes the engine process of a `VllmEngine`.

vLLM starts its engine process as a new interpreter, which imports vLLM a second time: 15 s on a GPU host, during which
nothing else happens. A standby starts with the actor, so that both import at the same time. It stays a child of the
process that started it, and ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from ....dataplane.imports import import_each
from .core_log import flush_outputs
from .environment import engine_environment

MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", f"{__package__}.worker")
"""Modules that an engine process needs and that take seconds to import."""
OUTPUTS = (1, 2)
"""File descriptors of stdout and stderr."""


class EngineStandby:
    """A child process that imports modules and then waits for the function that it is to run. It ends when this process
    ends before that."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        """Start the process, which imports `modules`."""
        context = multiprocessing.get_context("spawn")
        self._orders, orders = context.Pipe()
        self._process = context.Process(target=_stand_by, args=(orders, modules), name="EngineCore")
        with engine_environment(cpu=False, tp=1):
            self._process.start()
        orders.close()
        # Python waits for its children before it ends, and this child waits for an order or for the end of the pipe.
        util.Finalize(self, self._orders.close, exitpriority=10)

    @property
    def pid(self) -> int | None:
        """Id of the process."""
        return self._process.pid

    def run(self, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> BaseProcess | None:
        """Have the process run `target(**kwargs)` and end, once it has imported its modules. It gets the environment
        and the outputs that this process has now. Call it once. Returns the process; None if it has ended, or if it
        ends now because the arguments can only be inherited by a process that is started with them."""
        with self._orders:
            try:
                order = reduction.ForkingPickler.dumps((target, kwargs))
                self._orders.recv_bytes()  # it is ready
                for output in OUTPUTS:
                    reduction.send_handle(self._orders, output, self._process.pid)
                self._orders.send(dict(os.environ))
                self._orders.send_bytes(order)  # what `send` does
            except (RuntimeError, EOFError, OSError):  # RuntimeError: a lock or a queue
                return None
        self._process.name = name
        return self._process


def _stand_by(orders: Connection, modules: Sequence[str]) -> None:
    """Import `modules`, wait for the order of `EngineStandby.run`, and carry it out."""
    import_each(modules)
    try:
        orders.send_bytes(b"ready")
        outputs = [reduction.recv_handle(orders) for _ in OUTPUTS]
        environment = orders.recv()
        flush_outputs()
        for received, output in zip(outputs, OUTPUTS, strict=True):
            os.dup2(received, output)
            os.close(received)
        os.environ.clear()
        os.environ.update(environment)
        target, kwargs = orders.recv()
    except (EOFError, OSError):
        return  # the process that started this one has ended
    orders.close()
    target(**kwargs)


_standby: EngineStandby | None = None
"""Process that the next `VllmEngine` of this process takes for its engine process; None if it starts a new one."""


def start_ahead() -> None:
    """Start the engine process of the next `VllmEngine` of this process, so that it imports vLLM in the meantime."""
    global _standby
    if _standby is None:
        _standby = EngineStandby()


def take_standby() -> EngineStandby | None:
    """Return the process that `start_ahead` started, to the first caller only; None if there is none."""
    global _standby
    taken, _standby = _standby, None
    return taken
