"""Runs the benchmark's processes, which are a producer, consumers and a server, as Ray actors or threads (in tests)."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError

from .baselines.served import Server
from .baselines.transferqueue import PROCESS_ENV
from .process import BenchProcess

CALL_TIMEOUT_S = 120.0
"""Seconds that every call may take. A store or baseline with a call that takes longer has failed."""
START_TIMEOUT_S = 180.0
SERVE_TIMEOUT_S = 30.0

PRODUCER = "producer"
SERVING = "serving"


def consumer(number: int) -> str:
    """Return the name of consumer `number`."""
    return f"consumer{number}"


class ProcessLost(RuntimeError):
    """Raised when a process died or did not answer in time, so that the pool must `restart`."""


class ProcessPool(Protocol):
    """A pool of named processes. A process runs its calls one after another, in the order in which they were
    started."""

    names: tuple[str, ...]
    lead_s: float
    """Seconds from sending a request to several processes until the time at which all of them start together. It leaves
    enough time to send the requests."""

    def start(self, process: str, method: str, *args: Any) -> Any:
        """Start `method` in a process, and return a handle of the call, which `gather` takes."""
        ...

    def gather(self, calls: Sequence[Any], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Wait for the calls, and return their results in order. Raises the process's own exception, or ProcessLost."""
        ...

    def restart(self) -> None:
        """End all processes, whatever they are doing, and start new ones."""
        ...

    def close(self) -> None:
        """End all processes. Idempotent."""
        ...


def call(pool: ProcessPool, process: str, method: str, *args: Any) -> Any:
    """Run one call and return its result."""
    return pool.gather([pool.start(process, method, *args)])[0]


def process_names(num_consumers: int) -> tuple[str, ...]:
    """Return the names of all processes of a pool."""
    return (PRODUCER, SERVING, *[consumer(number) for number in range(num_consumers)])


class RayPool:
    """Runs each process as a Ray actor. Ray must be initialised."""

    lead_s = 0.05

    def __init__(self, num_consumers: int) -> None:
        self.names = process_names(num_consumers)
        self._actors: dict[str, Any] = {}
        self._begin(self.names)

    def start(self, process: str, method: str, *args: Any) -> ray.ObjectRef:
        return getattr(self._actors[process], method).remote(*args)

    def gather(self, calls: Sequence[ray.ObjectRef], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        try:
            return ray.get(list(calls), timeout=timeout_s)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except GetTimeoutError:
            raise ProcessLost(f"no answer within {timeout_s:g} s") from None
        except (RayActorError, OutOfMemoryError) as error:
            raise ProcessLost(f"a benchmark process died: {error}") from None

    def restart(self) -> None:
        """End and replace all processes except the serving one, whose servers do not depend on other processes."""
        names = [name for name in self.names if name != SERVING]
        self._end(names)
        self._begin(names)

    def close(self) -> None:
        self._end(list(self._actors))

    def _begin(self, names: Sequence[str]) -> None:
        actor_class = ray.remote(num_cpus=0, runtime_env={"env_vars": PROCESS_ENV})(BenchProcess)
        self._actors |= {name: actor_class.remote() for name in names}
        ready = [self._actors[name].leave.remote() for name in names]
        ray.get(ready, timeout=START_TIMEOUT_S)

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            actor = self._actors.pop(name, None)
            if actor is not None and ray.is_initialized():
                ray.kill(actor)


class ThreadPool:
    """Runs each process as a thread of this process, for in-process data planes."""

    lead_s = 0.005

    def __init__(self, num_consumers: int) -> None:
        self.names = process_names(num_consumers)
        self._processes = {name: BenchProcess() for name in self.names}
        self._pools = {name: ThreadPoolExecutor(1, f"bench-{name}") for name in self.names}

    def start(self, process: str, method: str, *args: Any) -> concurrent.futures.Future[Any]:
        return self._pools[process].submit(getattr(self._processes[process], method), *args)

    def gather(self, calls: Sequence[concurrent.futures.Future[Any]], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        try:
            return [future.result(timeout_s) for future in calls]
        except concurrent.futures.TimeoutError:
            raise ProcessLost(f"no answer within {timeout_s:g} s") from None

    def restart(self) -> None:
        for name in self.names:
            self._pools[name].shutdown(wait=False, cancel_futures=True)
            self._processes[name] = BenchProcess()
            self._pools[name] = ThreadPoolExecutor(1, f"bench-{name}")

    def close(self) -> None:
        for name in self.names:
            self._pools[name].submit(self._processes[name].leave).result(CALL_TIMEOUT_S)
            self._pools[name].shutdown()


class PoolHost:
    """Starts and stops servers of baselines in the pool's serving process."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool

    def serve(self, name: str, start: Callable[[], Server]) -> tuple[str, int]:
        return self._pool.gather([self._pool.start(SERVING, "serve", name, start)], SERVE_TIMEOUT_S)[0]

    def stop(self, name: str) -> None:
        self._pool.gather([self._pool.start(SERVING, "stop", name)], SERVE_TIMEOUT_S)
