"""`headrace bench weights` times weight updates from a trainer to engines, and compares each transport with its limit.

One process has random weights with the shapes of a model. Other processes receive, verify and load them. An update is
timed from its announcement until every engine has verified the whole version. Loading is timed separately. The limits,
measured in the same processes with the same bytes, are a memcpy, one broadcast, or one write to the disk.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table

from ...actors.weight_sync.config import SyncConfig
from ...actors.weight_sync.transports.factory import TRANSPORT_KINDS
from ...actors.weight_sync.transports.protocol import ReceiverConfig, SenderConfig
from ...codecs.integers import ceil_div
from ...dataplane.config import DataPlaneConfig, StoreConfig
from ...dataplane.factory import open_data_plane
from ...dataplane.handle import DataPlaneHandle
from ...dataplane.security.handshake import new_key
from ...trainers.cluster.ray_cluster import MIN_OBJECT_STORE_MIB, Cluster, CpuDemand
from ..models import WEIGHT_SHAPES, num_bytes
from ..records import conditions, table, write_records, write_summary
from .peers import Engine, Peer, PeerTask, Trainer, call_all

LIMITS = {"collective": "broadcast", "ipc": "memcpy", "store": "memcpy", "disk": "write"}
"""Kind of weight transport -> operation that moves the same bytes and serves as the transport's speed limit."""
MEMORY_SHARE = 0.85
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """Options of the weight benchmark. Every model size is measured with the first of `engines` and of `buckets_mib`.
    The first size is also measured with each of the other numbers of engines and each of the other bucket sizes."""

    out: Path
    transports: tuple[str, ...] = TRANSPORT_KINDS
    sizes: tuple[str, ...] = ("0.1B", "0.5B", "1.7B")
    engines: tuple[int, ...] = (1, 2, 4)
    buckets_mib: tuple[int, ...] = (64, 16, 256)
    dtype: str = "bfloat16"
    device: str = "cpu"
    repeats: int = 5

    @staticmethod
    def quick(out: Path) -> WeightOptions:
        """Return options for a run of less than two minutes."""
        return WeightOptions(out, sizes=("0.1B",), engines=(1, 2), buckets_mib=(64,), repeats=3)

    def cases(self) -> list[WeightCase]:
        """Return all cases to measure."""
        found = []
        for size in self.sizes:
            for kind in self.transports:
                combos = [(self.engines[0], self.buckets_mib[0])]
                if size == self.sizes[0]:
                    combos += [(count, self.buckets_mib[0]) for count in self.engines[1:]]
                    combos += [(self.engines[0], bucket) for bucket in self.buckets_mib[1:]]
                found += [WeightCase(kind, size, count, bucket) for count, bucket in combos]
        return found


@dataclass(frozen=True, slots=True)
class WeightCase:
    """One case of the weight benchmark: a transport, a model size, a number of engines and a bucket size."""

    kind: str
    size: str
    engines: int
    bucket_mib: int

    def bytes_needed(self, nbytes: int) -> int:
        """Return the bytes of memory that all processes need for weights of `nbytes` bytes, including staged copies."""
        return nbytes * (4 + 2 * self.engines)


@dataclass(frozen=True, slots=True)
class WeightResult:
    """Results of one case of the weight benchmark."""

    case: WeightCase
    num_bytes: int
    seconds: tuple[float, ...]
    """Seconds of each update, from its announcement until every engine has verified it. The first update is not
    counted."""
    commit_seconds: tuple[float, ...]
    """Seconds that the slowest engine took to copy the weights into its parameters, for each update."""
    limit: str
    """Operation that the transport is compared with, a value of `LIMITS`."""
    limit_s: float
    """Median seconds of the operation `limit`, with the same bytes in the same processes."""
    peak_extra_bytes: int
    """Peak memory of the trainer's process beyond its weights, in bytes. It includes shared memory that the process
    filled."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gib_per_s(self) -> float:
        return self.num_bytes / 2**30 / self.median_s

    @property
    def vs_limit(self) -> float:
        return self.limit_s / self.median_s

    def record(self) -> dict[str, Any]:
        """Return the result as plain data for results.jsonl."""
        return {
            "transport": self.case.kind,
            "params": self.case.size,
            "engines": self.case.engines,
            "bucket_mib": self.case.bucket_mib,
            "bytes": self.num_bytes,
            "median_s": self.median_s,
            "times_s": [round(seconds, 5) for seconds in self.seconds],
            "commit_s": statistics.median(self.commit_seconds),
            "gib_per_s": self.gib_per_s,
            "limit": self.limit,
            "limit_s": self.limit_s,
            "vs_limit": self.vs_limit,
            "peak_extra_mib": self.peak_extra_bytes / 2**20,
            "verified": True,
        }


def run_weights(options: WeightOptions, tell: Callable[[str], None]) -> tuple[list[WeightResult], dict[str, str]]:
    """Measure all cases, and write results.jsonl and summary.json. Returns the results, and for each case that was left
    out: label -> reason.

    Raises RuntimeError if the weights of an engine differ from the trainer's.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    facts = conditions(dtype=options.dtype, device=options.device, repeats=options.repeats, threads_per_process=1)
    results, skipped = [], {}
    for case in options.cases():
        label = f"{case.kind} {case.size}, {case.engines} engine(s), buckets of {case.bucket_mib} MiB"
        nbytes = num_bytes(case.size, getattr(torch, options.dtype))
        free = psutil.virtual_memory().available
        if options.device == "cpu" and case.bytes_needed(nbytes) > MEMORY_SHARE * free:
            skipped[label] = f"needs {case.bytes_needed(nbytes) >> 20} MiB, {free >> 20} MiB are free"
            continue
        tell(label)
        results.append(_measure(case, nbytes, options))
    write_records(options.out / "results.jsonl", [result.record() for result in results], facts)
    write_summary(options.out / "summary.json", summarise(options, results), facts | {"skipped": skipped})
    return results, skipped


def summarise(options: WeightOptions, results: Sequence[WeightResult]) -> dict[str, float]:
    """Return the summary with the keys `weights.{transport}.{params}.*`.

    A case adds `.engines{n}` or `.bucket{mib}` to the key if its number of engines or its bucket size is not the first.
    """
    summary: dict[str, float] = {}
    for result in results:
        case = result.case
        name = f"weights.{case.kind}.{case.size}"
        name += f".engines{case.engines}" if case.engines != options.engines[0] else ""
        name += f".bucket{case.bucket_mib}" if case.bucket_mib != options.buckets_mib[0] else ""
        summary |= {
            f"{name}.seconds": result.median_s,
            f"{name}.commit_seconds": statistics.median(result.commit_seconds),
            f"{name}.gib_per_s": result.gib_per_s,
            f"{name}.vs_limit": result.vs_limit,
            f"{name}.peak_extra_mib": result.peak_extra_bytes / 2**20,
        }
    return summary


def weights_table(results: Sequence[WeightResult]) -> Table:
    """Return a table with one row per case."""
    header = ("transport", "params", "engines", "bucket", "ms", "GiB/s", "of the limit", "load ms", "peak extra MiB")
    rows = [
        (
            result.case.kind,
            result.case.size,
            str(result.case.engines),
            f"{result.case.bucket_mib} MiB",
            f"{result.median_s * 1e3:.0f}",
            f"{result.gib_per_s:.2f}",
            f"{result.vs_limit:.2f} of one {result.limit}",
            f"{statistics.median(result.commit_seconds) * 1e3:.0f}",
            f"{result.peak_extra_bytes / 2**20:.0f}",
        )
        for result in results
    ]
    return table("headrace bench weights", header, rows, left=("transport", "params", "of the limit"))


# ---------------- These functions measure one case.


def _measure(case: WeightCase, nbytes: int, options: WeightOptions) -> WeightResult:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=options.out)))
        peers = stack.enter_context(_peers(case, nbytes, options, folder))
        trainer, engines = peers[0], peers[1:]
        limits = _limit(LIMITS[case.kind], nbytes, peers, folder, options)
        seconds, commits, peaks = [], [], []
        for version in range(1, options.repeats + 2):
            trainer.call("change", version)
            before, _ = trainer.call("reset_peak")
            took, commit_s = _update(trainer, engines, version)
            peaks.append(trainer.call("peak")[0] - before)
            if version == 1:
                # The first update is not counted, because it reserves memory and makes groups.
                _verify(case, trainer, engines)
                continue
            seconds.append(took)
            commits.append(commit_s)
        _verify(case, trainer, engines)
    return WeightResult(
        case,
        nbytes,
        tuple(seconds),
        tuple(commits),
        LIMITS[case.kind],
        statistics.median(limits),
        max(peaks),
    )


def _update(trainer: Peer, engines: Sequence[Peer], version: int) -> tuple[float, float]:
    """Send one version of the weights to all engines. Returns the seconds until all engines have received the weights,
    and the seconds in which the slowest engine loaded them."""
    receivers = {f"engine {rank}": 1 for rank in range(1, len(engines) + 1)}
    update, (start, _) = trainer.call("open", version, receivers)
    for engine in engines:
        engine.start("prepare", update)
    trainer.start("publish", update)
    ends = [engine.answer()[1][1] for engine in engines]
    trainer.answer()
    for engine in engines:
        engine.start("commit", version)
    spans = [engine.answer()[1] for engine in engines]
    return max(ends) - start, max(end - begin for begin, end in spans)


def _verify(case: WeightCase, trainer: Peer, engines: Sequence[Peer]) -> None:
    expected, _ = trainer.call("digest")
    for number, engine in enumerate(engines, 1):
        got, _ = engine.call("digest")
        if got != expected:
            raise RuntimeError(
                f"{case.kind} {case.size}: engine {number} has weights of digest {got}, expected {expected}"
            )


def _limit(name: str, nbytes: int, peers: Sequence[Peer], folder: Path, options: WeightOptions) -> list[float]:
    """Measure the limit `name` after a warm-up, and return the seconds of each run."""
    if name == "memcpy":
        return peers[0].call("copies", nbytes, options.device, options.repeats)[0]
    if name == "write":
        return peers[0].call("writes", nbytes, str(folder), options.repeats)[0]
    call_all(peers, "join", str(folder / "group"), len(peers))
    seconds = [max(call_all(peers, "broadcast", nbytes)) for _ in range(options.repeats + 1)]
    call_all(peers, "leave")
    return seconds[1:]


@contextmanager
def _peers(case: WeightCase, nbytes: int, options: WeightOptions, folder: Path) -> Iterator[list[Peer]]:
    """Start the processes of the trainer and its engines with their weights. At the end of the context, the processes
    end and all published data is removed."""
    run_id = f"bench-weights-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        plane: DataPlaneHandle | None = None
        if case.kind == "store":
            cluster = Cluster(
                address=None,
                num_cpus=1,
                demand=CpuDemand(0, 0, 0),
                namespace=run_id,
                object_store_mib=MIN_OBJECT_STORE_MIB,
            )
            stack.callback(cluster.close)
            capacity = ceil_div(3 * nbytes, 1 << 20) + 64
            store = StoreConfig.model_validate({"kind": "shm", "capacity_mib": capacity})
            plane = stack.enter_context(open_data_plane(DataPlaneConfig(store=store), run_id=run_id)).handle
        weights = folder / "weights"
        sender = SenderConfig(
            run_id=run_id,
            sync=SyncConfig(timeout_s=TIMEOUT_S),
            host="127.0.0.1",
            folder=str(weights),
            data_plane=plane,
            device=options.device,
            key=new_key(),
        )
        stack.callback(shutil.rmtree, weights, ignore_errors=True)
        stack.callback(_remove_shared, run_id)
        peers: list[Peer] = []
        for rank in range(case.engines + 1):
            gpu = rank % max(1, torch.cuda.device_count())
            task = PeerTask(rank, "cpu" if options.device == "cpu" else f"cuda:{gpu}", options.dtype)
            receiver = ReceiverConfig(f"engine {rank}", SyncConfig(staging="full"), options.device, plane, sender.key)
            make = partial(Engine, task, case.size, receiver) if rank else partial(Trainer, task, case.size)
            peers.append(Peer(make))
            stack.callback(peers[-1].close)
        call_all(peers, "ready")
        peers[0].call("publisher", case.kind, sender, case.bucket_mib << 20)
        yield peers


def _remove_shared(run_id: str) -> None:
    for path in Path(os.sep, "dev", "shm").glob(f"headrace-{run_id}*"):
        shutil.rmtree(path, ignore_errors=True)


SIZES = tuple(WEIGHT_SHAPES)
