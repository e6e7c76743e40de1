"""`RankPublisher` publishes versions of the weights from every train rank at once, without gathering them.

rank 0       open -> announcement, with the addresses of all ranks and the arguments of the plan
every rank   send -> the plan of the announcement -> this rank's buckets to all receivers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from ....codecs.integers import ALIGN
from ....codecs.weights.buckets import plan_buckets
from ....codecs.weights.parameter_digests import DigestTaker, ParameterDigests, sampled_names
from ....codecs.weights.quantization import Quantization
from ...adapters.spec import AdapterSpec
from ..config import SyncConfig
from ..plan.arguments import LocalTensors, PlanArguments, read_arguments
from ..plan.regions import Party, Region, Specs, held
from ..plan.weight_reads import decode_regions
from ..stream import SendReport
from ..transports.protocol import ReceiverGroup, WeightUpdate, worker_names
from .group_sender import GroupSender
from .neighbour_sender import NeighbourSender
from .pair_sender import KIND, SLOTS, PairSender, location_of, number_of
from .quantized_parts import QuantizedParts
from .sent_parts import SentParts
from .shared_slots import host_name

_MOST_WORKERS = 4096
"""Largest number of workers of which it is kept what they have said. Those of engines that have left are the oldest."""
T = TypeVar("T")


class RankPublisher:
    """One train rank's end of the updates. One thread at a time may call it, except that any thread may call
    `abort`."""

    def __init__(
        self,
        rank: int,
        host: str,
        key: bytes,
        sync: SyncConfig,
        bucket_bytes: int,
        specs: Specs,
        regions: Sequence[Sequence[Region]],
        group: torch.device | None = None,
        adapter: AdapterSpec | None = None,
        *,
        shares_gpus: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """Listen on `host` for receivers. key: the run's key. bucket_bytes: memory for buckets in transit, a multiple
        of ALIGN. specs: dtype and shape of all weights. regions: what each rank has of them, by rank. group: device of
        the weights if a process group carries the buckets; None for TCP between CPUs. adapter: the adapter that the
        weights make up; None if they are those of the model. quantization: the weights that are sent in 8 bits; None if
        none are. An adapter is sent as it is. Raises OSError when listening fails, and ValueError if a rank cannot
        quantize what it has."""
        self._rank, self._sync, self._bucket_bytes, self._adapter = rank, sync, bucket_bytes, adapter
        self._quantization = quantization if adapter is None else None
        self._parts = None if self._quantization is None else QuantizedParts(self._quantization, specs, regions)
        if self._parts is not None:
            specs, regions = self._parts.specs, self._parts.regions
        self._specs, self._regions = specs, regions
        of_group = NeighbourSender if shares_gpus else GroupSender
        self._sender: PairSender | GroupSender = (
            PairSender(host, key, sync.timeout_s) if group is None else of_group(rank, host, key, sync.timeout_s, group)
        )
        self.addresses = [self._sender.address]
        """Addresses at which receivers reach the ranks, by rank."""
        self._place = self._sender.place if isinstance(self._sender, NeighbourSender) else host_name()
        self.hosts = [self._place] * len(regions)
        """Host of each rank; its GPU, too, if engines are on the ranks' GPUs."""
        self._number = 0
        self._places: dict[str, str] = {}
        """Host, or GPU, that engines' workers have named, by worker. Other workers take a copy of their own."""
        self._sent = SentParts(sync.timeout_s) if sync.delta and group is None else None
        """Keeps what this rank has sent; None if versions are always sent whole."""
        self._needs: dict[str, tuple[Region, ...]] = {}
        """Regions that engines' workers have said they need, by worker. Other workers are sent everything."""
        self._digests: ParameterDigests | None = None
        """Digests of the last version; None before the first, with `sync.verify=off`, and on all ranks but 0."""

    def meet(self) -> None:
        """Exchange the ranks' addresses and hosts. Collective over the default process group; not needed for one
        rank."""
        found: list[tuple[str, str]] = [("", "")] * len(self._regions)
        dist.all_gather_object(found, (self._sender.address, self._place))
        self.addresses, self.hosts = [address for address, _ in found], [host for _, host in found]

    @property
    def sent(self) -> int:
        """Number of times that this rank has made progress since the start. Any thread may read it."""
        return self._sender.num_moves

    def open(self, version: int, receivers: Sequence[ReceiverGroup], base: int | None = None) -> WeightUpdate:
        """Return the announcement of an update that all ranks will send. Only rank 0 is called.

        base: version that all receivers serve now. With `sync.delta`, only changes from it are sent if it was the last
        one sent, by the same plan.
        """
        self._number += 1
        senders = tuple(Party(host, tuple(some)) for host, some in zip(self.hosts, self._regions, strict=True))
        whole = tuple(region for name, (_, shape) in self._specs.items() for region in held(name, shape))
        workers = worker_names(receivers)
        parties = tuple(Party(self._site(one, workers), self._needs.get(one, whole)) for one in workers)
        limit = max(self._bucket_bytes // SLOTS, ALIGN) // ALIGN * ALIGN
        plan = PlanArguments.of(self._specs, senders, parties, limit).message
        num_bytes = plan_buckets(self._specs, self._bucket_bytes).num_bytes
        location, timeout_s = location_of(self._number, self.addresses), self._sync.timeout_s
        known = self._sent is not None and self._sent.holds(base, read_arguments(plan)[1])
        kept, adapter, groups = base if known else None, self._adapter, tuple(receivers)
        return WeightUpdate(version, kept, KIND, location, num_bytes, groups, timeout_s, adapter, plan)

    def _site(self, worker: str, workers: Sequence[str]) -> str:
        """Return where a worker is for the plan: the same for workers that read each other's memory."""
        place = self._places.get(worker)
        if not place or isinstance(self._sender, PairSender):
            return place or worker
        return worker if [self._places.get(one) for one in workers].count(place) > 1 else place

    def send(self, update: WeightUpdate, read: Callable[[str], torch.Tensor]) -> SendReport:
        """Send this rank's part of the version, and wait until the receivers have all parts.

        read: function that returns this rank's part of a weight, contiguous, in any dtype. Raises WeightTransferError
        that names the receivers at fault.
        """
        started = time.perf_counter()
        _, plan = read_arguments(update.plan)
        planned = time.perf_counter()
        needs, self._needs = self._needs, {}  # After an error, the next version is sent whole, to each worker.
        places, self._places = self._places, {}
        read = read if self._parts is None else self._parts.reading(read)
        tensors, sender = LocalTensors(read, self._regions[self._rank]), self._sender
        with self.ending(update):
            if self._sent is None:
                nbytes = sender.send(update, plan, self._rank, tensors)
            else:
                assert isinstance(sender, PairSender)
                with self._sent.writing(update, plan, self._rank, self.hosts.count(self._place)) as fill:
                    nbytes = sender.send(update, plan, self._rank, tensors, fill)
        workers = worker_names(update.receivers)
        told = {workers[number]: decode_regions(data) for number, data in self._sender.needs.items() if data}
        self._needs = _latest(needs, told)
        self._places = _latest(places, {workers[number]: host for number, host in self._sender.hosts.items()})
        ended = time.perf_counter()
        same, sparse = sender.encodings["same"], sender.encodings["sparse"]
        counts = int((plan.buckets.sender == self._rank).sum()) - same - sparse, same, sparse
        return SendReport(update.num_bytes, nbytes, 0.0, planned - started, ended - planned, *counts)

    @contextmanager
    def ending(self, update: WeightUpdate) -> Iterator[None]:
        """End the update for all when the block raises an error. Receivers would otherwise wait for a rank that fails
        before it begins to send."""
        try:
            yield
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}", update)
            raise

    def send_gathered(self, update: WeightUpdate, weights: Iterator[tuple[str, torch.Tensor]]) -> SendReport:
        """Send weights that are gathered to rank 0, which keeps a copy: those of an adapter, which are small. Every
        rank is called, and rank 0 must have all regions. Raises what `send` raises."""
        kept: dict[str, torch.Tensor] = {}

        def keeping() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if self._rank == 0:
                    kept[name] = tensor.clone(memory_format=torch.contiguous_format)
                yield name, tensor

        self.take_digests(update.version, keeping())
        return self.send(update, kept.__getitem__)

    def take_digests(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take the digests that `sync.verify` wants compared, and all of an adapter's, from gathered weights. Every
        rank is called."""
        full = self._sync.verify == "full" or self._adapter is not None
        names = frozenset(self._specs if full else sampled_names(tuple(self._specs), version))
        taker = DigestTaker(version, names if self._rank == 0 else ())
        for name, tensor in weights if self._quantization is None else self._quantization.stream(weights):
            taker.take(name, tensor)
        self._digests = taker.result()

    def digests(self, version: int) -> ParameterDigests:
        """Return the digests of the weights of `version`. Raises ValueError if it is not the last one sent."""
        if self._digests is None or self._digests.version != version:
            raise ValueError(f"weights: no digests of version {version} are kept")
        return self._digests

    def abort(self, reason: str, update: WeightUpdate | None = None) -> None:
        """End an update, which this rank may not have begun to send yet; None for the open one. Idempotent; any thread
        may call it."""
        self._sender.abort(reason, None if update is None else number_of(update))

    def close(self) -> None:
        """End the open update and stop listening. Idempotent."""
        self._sender.close()
        if self._sent is not None:
            self._sent.close()


def _latest(known: dict[str, T], told: dict[str, T]) -> dict[str, T]:
    """Return what workers have said, the latest last. told: what those of this update have said."""
    found = {worker: one for worker, one in known.items() if worker not in told} | told
    return dict([*found.items()][-max(_MOST_WORKERS, len(told)) :])
