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

    workload: LoadSpec = LoadSpec("rl-1024")
    links_gbit: tuple[int, ...] = (1, 10, 25)
    """Limits of the link between the hosts in Gbit/s, each measured by itself."""
    repeats: int = 41


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Times of the same read, by two ways in turn."""

    place: str
    """`same_host`, or `other_host.1gbit` with the limit of the link."""
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
    results = []
    with _processes() as (near, far):
        tell("writing the batch")
        handles = {
            STORE: near.call("open", store_config(STORE, CAPACITY_MIB), near.host.address),
            SHM: near.call("open", store_config(SHM, CAPACITY_MIB), ""),
        }
        spec = options.workload
        sample = build_load(LoadSpec(spec.name, SCHEMA_SHARE))
        rows = (spec.name, sample.schema, sample.group_size, sample.first)
        factories: dict[str, Callable[[], Endpoint]] = {
            kind: functools.partial(StoreEndpoint, handle, *rows) for kind, handle in handles.items()
        }
        address = near.call("serve", RAW, functools.partial(TcpServer, near.host.address))
        factories[RAW] = functools.partial(TcpEndpoint, address)
        for process, kinds in ((near, (STORE, SHM, RAW)), (far, (STORE, RAW))):
            for kind in kinds:
                process.call("join", kind, spec, factories[kind])
        tokens = {kind: near.call("put", kind, "r")[0] for kind in factories}
        size = near.call("size", spec)
        [whole] = shares(size.num_rows, 1)
        expected = {kind: near.call("expected", kind, whole, None) for kind in factories}

        def compare(process: HostProcess, place: str, baseline: str) -> ReadResult:
            tell(f"{place.replace('_', ' ')}: {STORE} and {baseline}")
            seconds: Mapping[str, list[float]] = {STORE: [], baseline: []}
            for number in range(-WARM_READS, options.repeats):
                for kind in seconds if number % 2 else reversed(seconds):
                    span = process.call("get", kind, tokens[kind], whole, None, 0.0, expected[kind])
                    if number >= 0:
                        seconds[kind].append(span.seconds)
            return ReadResult(place, size.nbytes, tuple(seconds[STORE]), baseline, tuple(seconds[baseline]))

        results.append(compare(near, "same_host", SHM))
        for gbit in options.links_gbit:
            far.host.shape(gbit * 1000)
            results.append(compare(far, f"other_host.{gbit}gbit", RAW))
    return results


@contextmanager
def _processes() -> Iterator[tuple[HostProcess, HostProcess]]:
    with hosts(2, shm_mib=SHM_MIB) as (first, second), ExitStack() as stack:

        def start(host: Host) -> HostProcess:
            return stack.enter_context(HostProcess(host))

        yield start(first), start(second)


def summarise(results: Sequence[ReadResult]) -> dict[str, float]:
    """Return the summary with the keys `hosts.read_*`. `hosts.read_other_host.vs_raw_tcp` is the lowest of all
    links."""
    summary: dict[str, float] = {}
    for result in results:
        name = f"hosts.read_{result.place}"
        summary[f"{name}.vs_{result.baseline.lower().replace(' ', '_')}"] = result.ratio
        summary[f"{name}.ms"] = statistics.median(result.seconds) * 1e3
    others = [result.ratio for result in results if result.baseline == RAW]
    return summary | ({"hosts.read_other_host.vs_raw_tcp": min(others)} if others else {})
