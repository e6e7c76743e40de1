"""Runs the benchmark's processes (a producer, consumers and a server) as Ray actors or, in tests, as threads.

Each process has one endpoint per contender and workload, and times each call.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError
from tensordict import TensorDict

from .baselines import PROCESS_ENV
from .byte_baselines import Server
from .contenders import ByteEndpoint, ClaimEndpoint, Digests, Endpoint, RowEndpoint, Share, check, row_digests
from .padding import measure_padding
from .results import Result
from .workloads import Load, LoadSpec, build_load, column_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """The start and end of a call in CLOCK_MONOTONIC seconds. The processes of a host can compare these times."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class LoadSize:
    """The size of a workload, and how its rows are divided into groups."""

    num_rows: int
    first: tuple[str, ...]
    """Names of the fields that the workload's first put writes."""
    field_bytes: dict[str, int]
    """Number of bytes of the values of every field."""
    lengths: np.ndarray | None
    """Number of tokens of each row: int64 `[N]`; None when rows have no tokens."""
    groups: np.ndarray
    """Index of each row's prompt, int64 `[N]`. Rows of the same prompt form a group."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the values that the first put writes."""
        return sum(self.field_bytes[name] for name in self.first)


@dataclass(frozen=True, slots=True)
class OpenEndpoint:
    """An open endpoint of one contender (store or baseline) for one workload in this process."""

    spec: LoadSpec
    endpoint: Endpoint
    kept: dict[str, Any]
    """Columns that earlier stages of the current step have read, by name."""


class BenchProcess:
    """Serves calls in one process of the benchmark, one at a time. A call names its endpoint by a label that the caller
    chose."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # The processes share few cores. Ray also gives an actor one thread.
        self._loads: dict[LoadSpec, Load] = {}
        self._digests: dict[LoadSpec, Digests] = {}
        self._values: dict[tuple[LoadSpec, tuple[str, ...], bytes], TensorDict] = {}
        self._open: dict[str, OpenEndpoint] = {}
        self._servers: dict[str, Server] = {}

    # ---------------- These methods set up the process.

    def size(self, spec: LoadSpec) -> LoadSize:
        """Build the workload's rows in this process, and return their size. Other processes build rows when they need
        them."""
        load = self._load(spec)
        groups = np.arange(load.num_rows) // load.group_size
        fields = {name: column_bytes(load.batch[name]) for name in load.batch}
        return LoadSize(load.num_rows, load.first, fields, load.batch.lengths, groups)

    def join(self, label: str, spec: LoadSpec, factory: Callable[[], Endpoint]) -> None:
        """Open an endpoint under `label`."""
        self._open[label] = OpenEndpoint(spec, factory(), {})

    def leave(self) -> None:
        """Close every endpoint and drop all rows. Idempotent."""
        opened, self._open = self._open, {}
        for one in opened.values():
            one.endpoint.close()
        self._loads, self._digests, self._values = {}, {}, {}

    def idle(self) -> None:
        """Do nothing. Calls run one at a time, so that this one returns when all earlier calls have ended."""

    def serve(self, name: str, start: Callable[[], Server]) -> tuple[str, int]:
        """Start a server in this process, and return its address."""
        self._servers[name] = start()
        return self._servers[name].address

    def stop(self, name: str) -> None:
        """End a server. Idempotent."""
        server = self._servers.pop(name, None)
        if server is not None:
            server.close()

    # ---------------- These methods carry out timed operations and their preparations.

    def put(self, label: str, run: str) -> tuple[Any, Span]:
        """Write the fields of the workload's first put. `run` makes the keys of the rows unique. Returns the endpoint's
        token for reading these rows, and the start and end of the call."""
        opened = self._open[label]
        load, endpoint = self._load(opened.spec), opened.endpoint
        values, keys = self._tensordict(opened.spec, load.first, None), load.keys(run)
        start = time.monotonic()
        token = endpoint.put(load, values, keys)
        return token, Span(start, time.monotonic())

    def get(
        self,
        label: str,
        token: Any,
        share: Share,
        fields: Sequence[str] | None = None,
        start_at: float = 0.0,
        expected: Digests | None = None,
    ) -> Span:
        """Read a share of the rows, no earlier than `start_at` (by `time.monotonic()`). Returns the start and end of
        the call. Raises Mismatch if the digests of the read rows are not `expected`."""
        endpoint = self._open[label].endpoint
        time.sleep(max(0.0, start_at - time.monotonic()))
        start = max(start_at, time.monotonic())
        got = endpoint.get(token, share, fields)
        span = Span(start, time.monotonic())
        if expected is not None:
            check(endpoint.fingerprint(got), expected, f"{label} get")
        return span

    def write(
        self, label: str, keys: Sequence[str], fields: tuple[str, ...], rows: np.ndarray | None, reward: bool = False
    ) -> tuple[Any, Span]:
        """Write fields of rows and, with `reward`, a reward for each row as a tag (a number in its metadata). Returns
        the endpoint's token for reading the written values, and the start and end of the call."""
        endpoint = self._open[label].endpoint
        assert isinstance(endpoint, RowEndpoint)
        values = self._tensordict(self._open[label].spec, fields, rows)
        rewards = np.linspace(0, 1, len(keys), dtype=np.float32) if reward else None
        start = time.monotonic()
        token = endpoint.write(keys, values, rewards)
        return token, Span(start, time.monotonic())

    def claim(self, label: str, num_rows: int, timeout_s: float) -> Span:
        endpoint = self._open[label].endpoint
        assert isinstance(endpoint, ClaimEndpoint)
        start = time.monotonic()
        endpoint.claim(num_rows, timeout_s)
        return Span(start, time.monotonic())

    def clear(self, label: str, token: Any) -> Span:
        endpoint = self._open[label].endpoint
        assert isinstance(endpoint, RowEndpoint)
        start = time.monotonic()
        endpoint.clear(token)
        return Span(start, time.monotonic())

    def stage(
        self,
        label: str,
        token: Any,
        share: Share,
        read: tuple[str, ...],
        write: tuple[tuple[str, ...], Sequence[str]] | None,
        expected: Digests | None = None,
    ) -> tuple[Any, Span]:
        """Run one stage of a step: read the columns `read`, then write `write`, which is (fields, keys). Columns that
        an earlier stage of the step has read are not read again. Returns a token for reading the written columns (None
        without `write`), and the start and end of the whole stage.
        """
        opened = self._open[label]
        endpoint, kept = opened.endpoint, opened.kept
        values = None if write is None else self._tensordict(opened.spec, write[0], share.rows)
        start = time.monotonic()
        missing = tuple(field for field in read if field not in kept)
        got = endpoint.get(token, share, missing) if missing else None
        kept.update(dict.fromkeys(missing, got))
        if expected is not None and got is not None:
            check(endpoint.fingerprint(got), {field: expected[field] for field in missing}, f"{label} step")
        if write is None or values is None:
            return None, Span(start, time.monotonic())
        assert isinstance(endpoint, RowEndpoint)
        written = endpoint.write(write[1], values, None)
        return written, Span(start, time.monotonic())

    def forget(self, label: str) -> None:
        """Drop the columns that the stages of a step have read. The next step must then read them again."""
        self._open[label].kept.clear()

    def pad(self, spec: LoadSpec, repeats: int) -> list[Result]:
        """Time `from_padded` and `to_padded` on the workload's columns, in turn with a baseline."""
        return measure_padding(self._load(spec), repeats)

    # ---------------- These methods verify and count what was moved.

    def expected(self, label: str, share: Share, fields: Sequence[str] | None) -> Digests:
        """Return the digests of a correct read of a share. `fields` None means the fields of the workload's first
        put."""
        opened = self._open[label]
        load = self._load(opened.spec)
        if isinstance(opened.endpoint, ByteEndpoint):
            return opened.endpoint.expected(load, share)
        if opened.spec not in self._digests:
            self._digests[opened.spec] = row_digests(load.batch)
        names = load.first if fields is None else fields
        return {field: self._digests[opened.spec][field][share.rows] for field in names}

    def counters(self, label: str) -> dict[str, int]:
        """Return the total counts (calls and bytes) of this process's endpoint for `label`; {} if it keeps none."""
        endpoint = self._open[label].endpoint
        return endpoint.counters() if isinstance(endpoint, RowEndpoint) else {}

    def _load(self, spec: LoadSpec) -> Load:
        if spec not in self._loads:
            self._loads[spec] = build_load(spec)
        return self._loads[spec]

    def _tensordict(self, spec: LoadSpec, fields: tuple[str, ...], rows: np.ndarray | None) -> TensorDict:
        """Return the rows as a TensorDict. It is made once for each choice of fields and rows, outside of the timed
        calls."""
        key = spec, fields, b"" if rows is None else rows.tobytes()
        if key not in self._values:
            self._values[key] = self._load(spec).tensordict(fields, rows)
        return self._values[key]


CALL_TIMEOUT_S = 120.0
"""Seconds after which a call counts as failed, and with it its store or baseline."""
START_TIMEOUT_S = 180.0
SERVE_TIMEOUT_S = 30.0

PRODUCER = "producer"
SERVING = "serving"


def consumer(number: int) -> str:
    """Return the name of the consumer with this number."""
    return f"consumer{number}"


class ProcessLost(RuntimeError):
    """Raised when a process died or did not answer in time. The pool must then be restarted with `restart`."""


class ProcessPool(Protocol):
    """A pool of named processes. A process runs its calls one after another, in the order of their start."""

    names: tuple[str, ...]
    lead_s: float
    """Seconds between sending a request to several processes and the time at which all of them start it together. They
    leave enough time to send the requests."""

    def start(self, process: str, method: str, *args: Any) -> Any:
        """Start `method` in a process, and return a handle of the call for `gather`."""
        ...

    def gather(self, calls: Sequence[Any], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Wait for the calls, and return their results in order. Raises the exception that a call raised, or
        ProcessLost."""
        ...

    def restart(self) -> None:
        """End all processes, even those that run a call, and start new ones."""
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
    """Runs each process as a Ray actor. Ray must be initialised before."""

    lead_s = 0.05

    def __init__(self, num_consumers: int, process: type[Any] = BenchProcess) -> None:
        """process: class whose methods the processes serve. It has a method `leave`, as BenchProcess has."""
        self.names = process_names(num_consumers)
        self._process = process
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
            raise ProcessLost(f"a benchmark process did not answer within {timeout_s:g} s") from None
        except (RayActorError, OutOfMemoryError) as error:
            raise ProcessLost(f"a benchmark process died: {error}") from None

    def restart(self) -> None:
        """End and replace all processes except the serving one. Its servers do not depend on other processes."""
        names = [name for name in self.names if name != SERVING]
        self._end(names)
        self._begin(names)

    def close(self) -> None:
        self._end(list(self._actors))

    def _begin(self, names: Sequence[str]) -> None:
        actor_class = ray.remote(num_cpus=0, runtime_env={"env_vars": PROCESS_ENV})(self._process)
        self._actors |= {name: actor_class.remote() for name in names}
        ready = [self._actors[name].leave.remote() for name in names]
        ray.get(ready, timeout=START_TIMEOUT_S)

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            actor = self._actors.pop(name, None)
            if actor is not None and ray.is_initialized():
                ray.kill(actor)


class ThreadPool:
    """Runs each process as a thread of this process, for data planes in this process."""

    lead_s = 0.005

    def __init__(self, num_consumers: int, process: type[Any] = BenchProcess) -> None:
        """process: as for `RayPool`."""
        self.names = process_names(num_consumers)
        self._process = process
        self._processes = {name: process() for name in self.names}
        self._pools = {name: ThreadPoolExecutor(1, f"bench-{name}") for name in self.names}

    def start(self, process: str, method: str, *args: Any) -> concurrent.futures.Future[Any]:
        return self._pools[process].submit(getattr(self._processes[process], method), *args)

    def gather(self, calls: Sequence[concurrent.futures.Future[Any]], timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        try:
            return [future.result(timeout_s) for future in calls]
        except concurrent.futures.TimeoutError:
            raise ProcessLost(f"a benchmark process did not answer within {timeout_s:g} s") from None

    def restart(self) -> None:
        for name in (name for name in self.names if name != SERVING):
            self._pools[name].shutdown(wait=False, cancel_futures=True)
            self._processes[name] = self._process()
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
