"""Measures reads of a GRPO batch: on the same host against the store `shm`, from another host against raw TCP.

A process on the first host opens one data plane with the store `tcp` and one with `shm`, and writes the batch to both.
The same process then reads from both in turn. A process on the second host reads from the store `tcp`, and in turn the
same number of bytes over one raw TCP connection, over the same link. Every read is compared with the rows.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ...dataplane.handle import DataPlaneHandle
from ..transfer.byte_baselines import TcpEndpoint, TcpServer
from ..transfer.contenders import Endpoint, shares
from ..transfer.stores import SCHEMA_SHARE, StoreEndpoint
from ..transfer.workloads import LoadSpec, build_load
from .host_process import HostProcess, store_config
from .namespaces import Host, hosts

CAPACITY_MIB = 96
SHM_MIB = 3 * CAPACITY_MIB
WARM_READS = 3
"""Number of first reads of each kind that are compared but not timed. They fill the pool of memory and the windows of
the connections."""
STORE, SHM, RAW = "tcp", "shm", "raw TCP"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of the measurement of reads."""

    workloads: tuple[LoadSpec, ...] = (LoadSpec("rl-1024"), LoadSpec("long-64"))
    """Batches to read. A read costs a fixed time before its first byte, which weighs more in a small batch."""
    links_gbit: tuple[int, ...] = (1, 10, 25)
    """Limits of the link between the hosts in Gbit/s, each measured by itself."""
    repeats: int = 41


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Times of the same read, by two ways in turn."""

    place: str
    """`same_host`, or `other_host.1gbit` with the limit of the link."""
    workload: str
    num_bytes: int
    seconds: tuple[float, ...]
    """Seconds of each read from the store `tcp`."""
    baseline: str
    baseline_seconds: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The baseline's median time over that of the store `tcp`; 1 means equally fast."""
        return statistics.median(self.baseline_seconds) / statistics.median(self.seconds)

    def gbit_per_s(self, seconds: Sequence[float]) -> float:
        return self.num_bytes * 8e-9 / statistics.median(seconds)

    def record(self) -> dict[str, Any]:
        """Return the result as plain data for results.jsonl."""
        return {
            "place": self.place,
            "workload": self.workload,
            "bytes": self.num_bytes,
            "tcp_s": [round(one, 6) for one in self.seconds],
            "baseline": self.baseline,
            "baseline_s": [round(one, 6) for one in self.baseline_seconds],
            "ratio": self.ratio,
            "verified": True,
        }


def measure_reads(options: ReadOptions, tell: Callable[[str], None]) -> list[ReadResult]:
    """Make two hosts, and measure reads on the same host and over each link. Raises RuntimeError if a read differs from
    the rows that were written."""
    with _processes() as (near, far):
        tell("writing the batches")
        handles = {
            STORE: near.call("open", store_config(STORE, CAPACITY_MIB), near.host.address),
            SHM: near.call("open", store_config(SHM, CAPACITY_MIB), ""),
        }
        reads = [_Reads(spec, near, far, handles) for spec in options.workloads]
        results = []
        for gbit in (None, *options.links_gbit):
            if gbit is not None:
                far.host.shape(gbit * 1000)
            for read in reads:
                place = "same_host" if gbit is None else f"other_host.{gbit}gbit"
                baseline = SHM if gbit is None else RAW
                tell(f"{place.replace('_', ' ')}, {read.spec.name}: {STORE} and {baseline}")
                results.append(read.compare(near if gbit is None else far, place, baseline, options.repeats))
    return results


class _Reads:
    """Reads of one batch, which the first host holds in both stores and in a server of raw TCP."""

    def __init__(
        self, spec: LoadSpec, near: HostProcess, far: HostProcess, handles: Mapping[str, DataPlaneHandle]
    ) -> None:
        """Write the batch. handles: the data planes of the first host, by store."""
        self.spec = spec
        sample = build_load(LoadSpec(spec.name, SCHEMA_SHARE))
        rows = (spec.name, sample.schema, sample.group_size, sample.first)
        factories: dict[str, Callable[[], Endpoint]] = {
            kind: functools.partial(StoreEndpoint, handle, *rows) for kind, handle in handles.items()
        }
        address = near.call("serve", self._named(RAW), functools.partial(TcpServer, near.host.address))
        factories[RAW] = functools.partial(TcpEndpoint, address)
        for process, kinds in ((near, (STORE, SHM, RAW)), (far, (STORE, RAW))):
            for kind in kinds:
                process.call("join", self._named(kind), spec, factories[kind])
        self._tokens = {kind: near.call("put", self._named(kind), "r")[0] for kind in factories}
        self._size = near.call("size", spec)
        [self._whole] = shares(self._size.num_rows, 1)
        self._expected = {kind: near.call("expected", self._named(kind), self._whole, None) for kind in factories}

    def compare(self, process: HostProcess, place: str, baseline: str, repeats: int) -> ReadResult:
        """Read from the store `tcp` and by the baseline in turn."""
        seconds: Mapping[str, list[float]] = {STORE: [], baseline: []}
        for number in range(-WARM_READS, repeats):
            for kind in seconds if number % 2 else reversed(seconds):
                wanted = (self._tokens[kind], self._whole, None, 0.0, self._expected[kind])
                span = process.call("get", self._named(kind), *wanted)
                if number >= 0:
                    seconds[kind].append(span.seconds)
        times = tuple(seconds[STORE]), tuple(seconds[baseline])
        return ReadResult(place, self.spec.name, self._size.nbytes, times[0], baseline, times[1])

    def _named(self, kind: str) -> str:
        return f"{kind} {self.spec.name}"


@contextmanager
def _processes() -> Iterator[tuple[HostProcess, HostProcess]]:
    with hosts(2, shm_mib=SHM_MIB) as (first, second), ExitStack() as stack:

        def start(host: Host) -> HostProcess:
            return stack.enter_context(HostProcess(host))

        yield start(first), start(second)


def summarise(results: Sequence[ReadResult]) -> dict[str, float]:
    """Return the summary with the keys `hosts.read_*`. `hosts.read_other_host.vs_raw_tcp` is the lowest of all links
    and batches, and `hosts.read_same_host.vs_shm` that of all batches."""
    summary: dict[str, float] = {}
    for result in results:
        baseline = f"vs_{result.baseline.lower().replace(' ', '_')}"
        summary[f"hosts.read_{result.place}.{result.workload}.{baseline}"] = result.ratio
        summary[f"hosts.read_{result.place}.{result.workload}.ms"] = statistics.median(result.seconds) * 1e3
        lowest = f"hosts.read_{result.place.partition('.')[0]}.{baseline}"
        summary[lowest] = min(result.ratio, summary.get(lowest, result.ratio))
    return summary
