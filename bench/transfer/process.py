"""What runs in each of the benchmark's processes: one endpoint per contender, and a clock around each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from .baselines.served import Server
from .contenders import ByteEndpoint, ClaimEndpoint, Endpoint, RowEndpoint, Share
from .digests import Digests, check, row_digests
from .workloads import Load, LoadSpec, build_load, column_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """When something ran: CLOCK_MONOTONIC seconds, comparable between the processes of a host."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class LoadSize:
    """A workload's size."""

    num_rows: int
    first: tuple[str, ...]
    """Fields of the first put."""
    field_bytes: dict[str, int]
    """Bytes of each column's values, of all fields."""
    lengths: np.ndarray | None
    """int64 `[N]` tokens; None where rows have none."""
    groups: np.ndarray
    """int64 `[N]`: number of each row's prompt."""

    @property
    def nbytes(self) -> int:
        """Bytes of the first put."""
        return sum(self.field_bytes[name] for name in self.first)


@dataclass(frozen=True, slots=True)
class Station:
    """One contender on one workload, in this process."""

    spec: LoadSpec
    endpoint: Endpoint
    kept: dict[str, Any]
    """Columns that the stages of a step have read, by name."""


class BenchProcess:
    """One process. Calls come one at a time. A station goes by a label of the caller's choice."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # the processes share few cores; also what Ray gives an actor
        self._loads: dict[LoadSpec, Load] = {}
        self._digests: dict[LoadSpec, Digests] = {}
        self._values: dict[tuple[LoadSpec, tuple[str, ...], bytes], TensorDict] = {}
        self._stations: dict[str, Station] = {}
        self._servers: dict[str, Server] = {}

    # -------------------------------------------------------------- set-up

    def size(self, spec: LoadSpec) -> LoadSize:
        """Builds the workload's rows; other processes do so when they need them."""
        load = self._load(spec)
        groups = np.arange(load.num_rows) // load.group_size
        fields = {name: column_bytes(load.batch[name]) for name in load.batch}
        return LoadSize(load.num_rows, load.first, fields, load.batch.lengths, groups)

    def join(self, label: str, spec: LoadSpec, factory: Callable[[], Endpoint]) -> None:
        """Open a station."""
        self._stations[label] = Station(spec, factory(), {})

    def leave(self) -> None:
        """Close every station, forget all rows. Idempotent."""
        stations, self._stations = self._stations, {}
        for station in stations.values():
            station.endpoint.close()
        self._loads, self._digests, self._values = {}, {}, {}

    def idle(self) -> None:
        """Nothing: answered once all earlier calls have been."""

    def serve(self, name: str, start: Callable[[], Server]) -> tuple[str, int]:
        """Start a server here; returns its address."""
        self._servers[name] = start()
        return self._servers[name].address

    def stop(self, name: str) -> None:
        """End a server. Idempotent."""
        server = self._servers.pop(name, None)
        if server is not None:
            server.close()

    # -------------------------------------------------------------- timed

    def put(self, label: str, run: str) -> tuple[Any, Span]:
        """(token, span) of the first put under keys of `run`."""
        station = self._stations[label]
        load, endpoint = self._load(station.spec), station.endpoint
        values, keys = self._tensordict(station.spec, load.first, None), load.keys(run)
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
        """Read a share; from `start_at` on, if that is still to come. Raises Mismatch when it is not as `expected`."""
        endpoint = self._stations[label].endpoint
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
        """(token, span) of writing fields of rows. reward: tag the rows too."""
        endpoint = self._stations[label].endpoint
        assert isinstance(endpoint, RowEndpoint)
        values = self._tensordict(self._stations[label].spec, fields, rows)
        rewards = np.linspace(0, 1, len(keys), dtype=np.float32) if reward else None
        start = time.monotonic()
        token = endpoint.write(keys, values, rewards)
        return token, Span(start, time.monotonic())

    def claim(self, label: str, num_rows: int, timeout_s: float) -> Span:
        endpoint = self._stations[label].endpoint
        assert isinstance(endpoint, ClaimEndpoint)
        start = time.monotonic()
        endpoint.claim(num_rows, timeout_s)
        return Span(start, time.monotonic())

    def clear(self, label: str, token: Any) -> Span:
        endpoint = self._stations[label].endpoint
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
        """One stage of a step here: read the columns that are not kept since `forget`, write (fields, keys) back.

        Returns the token of what was written (None without) and the span of all that.
        """
        station = self._stations[label]
        endpoint, kept = station.endpoint, station.kept
        values = None if write is None else self._tensordict(station.spec, write[0], share.rows)
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
        """Let go of the columns that stages have kept."""
        self._stations[label].kept.clear()

    # -------------------------------------------------------------- looked at

    def expected(self, label: str, share: Share, fields: Sequence[str] | None) -> Digests:
        """What a right read of a share gives (`fields` None: the first put's)."""
        station = self._stations[label]
        load = self._load(station.spec)
        if isinstance(station.endpoint, ByteEndpoint):
            return station.endpoint.expected(load, share)
        if station.spec not in self._digests:
            self._digests[station.spec] = row_digests(load.batch)
        names = load.first if fields is None else fields
        return {field: self._digests[station.spec][field][share.rows] for field in names}

    def counters(self, label: str) -> dict[str, int]:
        """Growing counts of this process's endpoint."""
        endpoint = self._stations[label].endpoint
        return endpoint.counters() if isinstance(endpoint, RowEndpoint) else {}

    def _load(self, spec: LoadSpec) -> Load:
        if spec not in self._loads:
            self._loads[spec] = build_load(spec)
        return self._loads[spec]

    def _tensordict(self, spec: LoadSpec, fields: tuple[str, ...], rows: np.ndarray | None) -> TensorDict:
        """Made once for each choice, outside of every clock."""
        key = spec, fields, b"" if rows is None else rows.tobytes()
        if key not in self._values:
            self._values[key] = self._load(spec).tensordict(fields, rows)
        return self._values[key]
