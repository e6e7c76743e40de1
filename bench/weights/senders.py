"""Measures many senders against one, and one copy a host, between hosts that are made of namespaces of this machine.

one sender     N train ranks on N hosts have the rows of each weight; rank 0 gathers them, as in a run with FSDP, and
               broadcasts them (`collective`) to one engine on each of N other hosts
many senders   the same ranks send their rows to the same engines, as the transfer plan says
one copy       one train rank broadcasts to two engines on one host, or two ranks on two hosts send them their rows, and
               the counters of the host's link are read

Every link has the same limit. An update is timed from its announcement until every engine has verified it. After every
update, each engine's weights are compared with the trainer's, byte for byte.
"""

from __future__ import annotations

import datetime
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported

from ...actors.weight_sync.config import SyncConfig
from ...actors.weight_sync.pairs.pair_receiver import PairReceiver
from ...actors.weight_sync.pairs.pair_sender import KIND, PairSender, location_of
from ...actors.weight_sync.plan.regions import Party, held
from ...actors.weight_sync.plan.transfer_plan import TransferPlan, plan_transfer
from ...actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, SenderConfig, WeightUpdate
from ...codecs import messages
from ...dataplane.security.handshake import new_key
from ...trainers.backends.weight_stream import Cut, Piece, SpreadWeight, stream_weights
from ...trainers.errors import UserError
from ..hosts.namespaces import Host, hosts, why_no_hosts
from ..models import WEIGHT_SHAPES, digest_of, num_bytes, weight_shapes
from ..records import conditions, table, write_records, write_summary
from .host_peer import HostPeer
from .peers import Engine, PeerTask, Trainer, call_all

TIMEOUT_S = 120.0
SIZES = tuple(WEIGHT_SHAPES)
DEFAULT_SIZE = "0.02B"
DEFAULT_REPEATS = 3
_GROUP_TIMEOUT = datetime.timedelta(seconds=TIMEOUT_S)
NEEDS = ("whole", "part")
"""Part of the weights that an engine process takes: everything, or its share with tensor parallelism over the hosts."""
_COPY = "one copy"
"""Everything, for engines that are all on one host."""
ONE_COPY = ("two engines a host", "two engines a host, many")


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """Options of the benchmark of many senders."""

    out: Path
    senders: int = 4
    size: str = DEFAULT_SIZE
    mbit: int = 200
    """Limit of each host's link in Mbit/s, in each direction."""
    bucket_bytes: int = 1 << 20
    repeats: int = DEFAULT_REPEATS
    dtype: str = "bfloat16"

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the weights."""
        return num_bytes(self.size, getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class SenderResult:
    """Times of the updates of one case, and the bytes that they moved over links."""

    case: str
    """`one`, `many whole`, `many part`, or one of ONE_COPY."""
    seconds: tuple[float, ...]
    link_bytes: float
    """Bytes that the engines' hosts received over their links in one update, in the mean."""
    least_bytes: int
    """Bytes that these hosts need, each once per host."""
    busy: float
    """Share of the machine's cores that were busy during the updates."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def record(self) -> dict[str, Any]:
        """Return the result as plain data for results.jsonl."""
        return {
            "case": self.case,
            "times_s": [round(one, 4) for one in self.seconds],
            "link_bytes": round(self.link_bytes),
            "least_bytes": self.least_bytes,
            "busy": round(self.busy, 3),
            "verified": True,
        }


def plan_of(options: SenderOptions, need: str) -> TransferPlan:
    """Return the plan of a transfer from ranks that hold rows of each weight to as many engines on other hosts."""
    num = options.senders
    shapes, dtype = weight_shapes(options.size), getattr(torch, options.dtype)

    def party(host: str, rank: int, axis: int | None) -> Party:
        regions = [
            region
            for name, shape in shapes.items()
            for region in held(name, shape, [] if axis is None or len(shape) <= axis else [(axis, num, rank)])
        ]
        return Party(host, tuple(regions))

    senders = [party(f"trainer {rank}", rank, 0) for rank in range(num)]
    receivers = [
        party("engines" if need == _COPY else f"engine {rank}", rank, 1 if need == "part" else None)
        for rank in range(num)
    ]
    return plan_transfer(
        {name: (dtype, shape) for name, shape in shapes.items()}, senders, receivers, options.bucket_bytes
    )


def part_of(weights: Mapping[str, torch.Tensor], axis: int, num: int, rank: int) -> dict[str, torch.Tensor]:
    """Return a rank's part of each weight along an axis; a weight without the axis is whole."""
    return {name: one if one.ndim <= axis else one.chunk(num, axis)[rank].contiguous() for name, one in weights.items()}


class PartTrainer(Trainer):
    """Holds one rank's rows of the weights, and sends them to all engines."""

    def __init__(self, task: PeerTask, options: SenderOptions, host: str, key: bytes) -> None:
        super().__init__(task, options.size)
        self._options = options
        self._plans: dict[str, TransferPlan] = {}
        self._host, self._key = host, key
        self._pairs: PairSender | None = None
        self._store: TCPStore | None = None

    def address(self) -> str:
        """Start to listen for engines, and return the address."""
        if self._pairs is None:
            self._pairs = PairSender(self._host, self._key, TIMEOUT_S)
        return self._pairs.address

    def offer_group(self) -> int:
        """Serve the store of the process group of all trainers, and return its port. Rank 0 calls it first."""
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=_GROUP_TIMEOUT)
        return self._store.port

    def meet(self, host: str, port: int) -> None:
        """Join the process group of all trainers, in which rank 0 gathers."""
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # The host's own name stands for a loopback address.
        store = self._store or TCPStore(host, port, timeout=_GROUP_TIMEOUT)
        num = self._options.senders
        dist.init_process_group("gloo", store=store, rank=self.task.rank, world_size=num, timeout=_GROUP_TIMEOUT)

    def publish(self, update: bytes) -> dict[str, float]:
        if not dist.is_initialized():
            return super().publish(update)
        assert self._publisher is not None
        report = self._publisher.publish(messages.decode(update, WeightUpdate), self._gathered())
        return {"gather_s": report.gather_s, "send_s": report.send_s}

    def give(self) -> None:
        """Send this rank's rows of all weights to rank 0."""
        for _ in self._gathered():
            pass

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        num, rank = self._options.senders, self.task.rank
        pieces = tuple(Piece(one, (Cut(0, num, one),)) for one in range(num))
        spread = [SpreadWeight(name, one.dtype, tuple(one.shape), pieces) for name, one in self.weights.items()]
        return stream_weights(spread, lambda weight: self.weights[weight.name].chunk(num)[rank], rank, self.device)

    def send(self, update: WeightUpdate, need: str) -> int:
        """Send this rank's part, and return its number of bytes."""
        assert self._pairs is not None
        plan = self._plans.get(need) or self._plans.setdefault(need, plan_of(self._options, need))
        parts = part_of(self.weights, 0, self._options.senders, self.task.rank)
        return self._pairs.send(update, plan, self.task.rank, parts)

    def expected(self, need: str, rank: int) -> str:
        """Return the digest of what an engine needs."""
        return digest_of(part_of(self.weights, 1, self._options.senders, rank) if need == "part" else self.weights)

    def close(self) -> None:
        super().close()
        if self._pairs is not None:
            self._pairs.close()
            self._pairs = None


class PartEngine(Engine):
    """Receives weights from one sender or from many."""

    def __init__(self, task: PeerTask, options: SenderOptions, receiver: ReceiverConfig) -> None:
        super().__init__(task, options.size, receiver)
        self._options = options
        self._plans: dict[str, TransferPlan] = {}
        self._pairs = PairReceiver(receiver.engine, 0, receiver.key)
        self._staged: dict[str, torch.Tensor] = {}

    def take(self, update: WeightUpdate, need: str) -> None:
        """Receive from all senders into tensors that start as zeros."""
        plan = self._plans.get(need) or self._plans.setdefault(need, plan_of(self._options, need))
        num = self._options.senders
        parts = part_of(self.weights, 1, num, self.task.rank) if need == "part" else self.weights
        self._staged = {name: torch.zeros_like(one) for name, one in parts.items()}
        self._pairs.receive(update, plan, self.task.rank, self._staged)

    def staged_digest(self) -> str:
        return digest_of(self._staged)


def run_senders(options: SenderOptions, tell: Callable[[str], None]) -> list[SenderResult]:
    """Measure all cases, and write results.jsonl and summary.json. Raises UserError where hosts cannot be made, and
    RuntimeError if an engine's weights differ from the trainer's."""
    reason = why_no_hosts()
    if reason:
        raise UserError(f"--senders {reason}: it makes its hosts out of Linux namespaces of this machine")
    options.out.mkdir(parents=True, exist_ok=True)
    results = [*_one_copy(options, tell), *_against_one(options, tell)]
    facts = conditions(
        senders=options.senders, size=options.size, bytes=options.num_bytes, link_mbit=options.mbit,
        bucket_bytes=options.bucket_bytes, repeats=options.repeats, dtype=options.dtype, threads_per_process=1,
    )  # fmt: skip
    write_records(options.out / "results.jsonl", [result.record() for result in results], facts)
    write_summary(options.out / "summary.json", summarise(options, results), facts)
    return results


def summarise(options: SenderOptions, results: Sequence[SenderResult]) -> dict[str, float]:
    """Return the summary: `weights.senders{n}.*`, and `weights.bytes_over_link.vs_once` with one sender and many."""
    by_case = {result.case: result for result in results}
    name, one = f"weights.senders{options.senders}", by_case["one"]
    copies = [by_case[case].link_bytes / by_case[case].least_bytes for case in ONE_COPY]
    keys = ("weights.bytes_over_link.vs_once", "weights.bytes_over_link.many.vs_once")
    summary = {**dict(zip(keys, copies, strict=True)), f"{name}.one_s": one.median_s}
    for need in NEEDS:
        many, key = by_case[f"many {need}"], name if need == "whole" else f"{name}.{need}"
        summary |= {
            f"{key}.seconds": many.median_s,
            f"{key}.vs_one": one.median_s / many.median_s,
            f"{key}.bytes_over_link.vs_once": many.link_bytes / many.least_bytes,
        }
    return summary | {f"{name}.busy": max(result.busy for result in results)}


def senders_table(options: SenderOptions, results: Sequence[SenderResult]) -> Table:
    """Return a table with one row per case."""
    one = next(result for result in results if result.case == "one")
    header = ("case", "s", "one sender : this", "link bytes : once per host", "cores busy")
    rows = [
        (
            result.case,
            f"{result.median_s:.2f}",
            f"{one.median_s / result.median_s:.2f}" if result.case.startswith("many") else "",
            f"{result.link_bytes / result.least_bytes:.3f}",
            f"{result.busy:.0%}",
        )
        for result in results
    ]
    title = f"{options.senders} senders, links of {options.mbit} Mbit/s, {options.num_bytes / 1e6:.0f} MB"
    return table(title, header, rows, left=("case",))


# ---------------- These functions measure one case.


def _one_copy(options: SenderOptions, tell: Callable[[str], None]) -> Iterator[SenderResult]:
    tell("one sender, then two, to two engines of one host")
    two, least = replace(options, senders=2), options.num_bytes
    with hosts(3) as (*trainers, host), ExitStack() as stack:
        peers = _started(stack, two, trainers, [host, host])
        for case, update in zip(
            ONE_COPY, (_broadcast(peers[:1], peers[2:]), _many(peers[:2], peers[2:], _COPY)), strict=True
        ):
            yield _measure(two, case, [host], least, update)


def _against_one(options: SenderOptions, tell: Callable[[str], None]) -> Iterator[SenderResult]:
    num, whole = options.senders, options.num_bytes
    with hosts(2 * num) as made, ExitStack() as stack:
        tell(f"starting {2 * num} hosts")
        trainers, engines = made[:num], made[num:]
        peers = _started(stack, options, trainers, engines)
        tell(f"one sender to {num} hosts")
        port, _ = peers[0].call("offer_group")
        call_all(peers[:num], "meet", trainers[0].address, port)
        yield _measure(options, "one", engines, num * whole, _broadcast(peers[:num], peers[num:]))
        for need in NEEDS:
            tell(f"{num} senders to {num} hosts, {need}")
            least = int(plan_of(options, need).bytes_over_links.sum())
            update = _many(peers[:num], peers[num:], need)
            yield _measure(options, f"many {need}", engines, least, update)


def _started(
    stack: ExitStack, options: SenderOptions, trainers: Sequence[Host], engines: Sequence[Host]
) -> list[HostPeer]:
    """Start the processes of trainers and engines. At the end of `stack`, they end."""
    key = new_key()
    for host in {*trainers, *engines}:
        host.shape(options.mbit)
    peers = []
    for rank, host in enumerate(trainers):
        task = PeerTask(rank, "cpu", options.dtype)
        peers.append(HostPeer(host, partial(PartTrainer, task, options, host.address, key)))
        stack.callback(peers[-1].close)
    for rank, host in enumerate(engines):
        task = PeerTask(rank, "cpu", options.dtype)
        receiver = ReceiverConfig(f"engine {rank}", SyncConfig(staging="full"), key=key)
        peers.append(HostPeer(host, partial(PartEngine, task, options, receiver)))
        stack.callback(peers[-1].close)
    call_all(peers, "ready")
    sender = SenderConfig("bench-senders", SyncConfig(timeout_s=TIMEOUT_S), trainers[0].address, key=key)
    peers[0].call("publisher", "collective", sender, options.bucket_bytes)
    return peers


def _broadcast(trainers: Sequence[HostPeer], engines: Sequence[HostPeer]) -> Callable[[int], float]:
    """Return a function that sends a version from the first of `trainers` to all engines, and returns the seconds.

    The first trainer gathers the version from the others."""
    first, *others = trainers

    def update(version: int) -> float:
        call_all(trainers, "change", version)
        announced, (start, _) = first.call("open", version, {f"engine {rank}": 1 for rank in range(len(engines))})
        for engine in engines:
            engine.start("prepare", announced)
        for other in others:
            other.start("give")
        first.start("publish", announced)
        ends = [engine.answer()[1][1] for engine in engines]
        for trainer in trainers:
            trainer.answer()
        call_all(engines, "commit", version)
        _compare([first.call("digest")[0]] * len(engines), call_all(engines, "digest"))
        return max(ends) - start

    return update


def _many(trainers: Sequence[HostPeer], engines: Sequence[HostPeer], need: str) -> Callable[[int], float]:
    """Return a function that sends a version from all trainers to all engines, and returns the seconds."""
    addresses = call_all(trainers, "address")
    groups = tuple(ReceiverGroup(f"engine {rank}", 1) for rank in range(len(engines)))

    def update(version: int) -> float:
        call_all(trainers, "change", version)
        announced = WeightUpdate(version, None, KIND, location_of(version, addresses), 0, groups, TIMEOUT_S)
        for peer, method in (
            (peer, method) for peers, method in ((engines, "take"), (trainers, "send")) for peer in peers
        ):
            peer.start(method, announced, need)
        spans = [engine.answer()[1] for engine in engines]
        starts = [trainer.answer()[1][0] for trainer in trainers]
        expected = [trainers[0].call("expected", need, rank)[0] for rank in range(len(engines))]
        _compare(expected, call_all(engines, "staged_digest"))
        return max(end for _, end in spans) - min([*starts, *(start for start, _ in spans)])

    return update


def _compare(expected: Sequence[str], got: Sequence[str]) -> None:
    for rank, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one != other:
            raise RuntimeError(f"engine {rank} has weights of digest {other}, expected {one}")


_VERSIONS = itertools.count(1)


def _measure(
    options: SenderOptions, case: str, engines: Sequence[Host], least: int, update: Callable[[int], float]
) -> SenderResult:
    """Run the updates of one case. The first one is not counted, because it makes groups and plans."""
    seconds, moved, busy = [], [], []
    for number in range(options.repeats + 1):
        before = _received(engines)
        psutil.cpu_percent()
        took = update(next(_VERSIONS))
        share = psutil.cpu_percent() / 100
        if number:
            seconds.append(took)
            moved.append(_received(engines) - before)
            busy.append(share)
    return SenderResult(case, tuple(seconds), statistics.fmean(moved), least, max(busy))


def _received(engines: Sequence[Host]) -> int:
    """Return the number of bytes that these hosts have received over their links since they were made."""
    return sum(host.received_bytes for host in engines)
