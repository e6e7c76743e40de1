"""Plans a transfer of weights from all trainer ranks to all engine workers, as a pure function of what each has.

    senders' regions   --+-> cells -> a sender and a first receiver for each -> buckets of each pair, in order
    receivers' regions --+

Every byte that a host needs is sent to it once, by one sender. The other receivers of the host that need it read the
bucket from the memory of the first one. Senders that have the same cell share the work evenly, and one on the
receiver's own GPU or host is preferred.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from ....codecs import messages
from ....codecs.integers import ALIGN
from .cells import CellMaker, Cells
from .regions import Box, Party, Region, Specs, within
from .schedule import Buckets, choose_evenly, fill_buckets


@dataclass(frozen=True, slots=True)
class Move:
    """A copy between a strided part of a local tensor and consecutive bytes of a bucket."""

    tensor: str
    """Name of the local tensor."""
    offset: int
    """Position of the first element in the local tensor, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in the local tensor, in elements."""
    dtype: torch.dtype
    """Dtype in the bucket."""
    at: int
    """First byte in the bucket."""

    @property
    def end(self) -> int:
        """First byte after the part in the bucket."""
        return self.at + self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket that one sender sends to one receiver, and what one process copies into it or out of it."""

    number: int
    """Number of the bucket in the plan. All processes handle their buckets in this order, so none waits in a circle."""
    sender: int
    receiver: int
    """Number of the receiver that takes the bucket from the sender; others of its host read it there."""
    nbytes: int
    moves: tuple[Move, ...]


class TransferPlan:
    """Says what each process of a transfer sends, takes and copies. Equal inputs give equal plans."""

    def __init__(
        self, key: str, specs: Specs, senders: Sequence[Party], receivers: Sequence[Party], cells: Cells,
        readers: Sequence[tuple[int, ...]], buckets: Buckets,
    ) -> None:  # fmt: skip
        self.key = key
        """Hash of everything that the plan was made of, as `plan_key` returns it."""
        self.buckets = buckets
        self._specs, self._senders, self._receivers = [*specs.items()], senders, receivers
        self._cells, self._readers = cells, readers
        self._made: dict[tuple[str, int], list[Bucket]] = {}
        """Buckets of each process that was asked for: the next updates have the same plan."""

    def sending(self, sender: int) -> list[Bucket]:
        """Return the buckets that a sender fills and sends, in order."""
        return self._made.get(("sends", sender)) or self._made.setdefault(("sends", sender), self._sending(sender))

    def _sending(self, sender: int) -> list[Bucket]:
        numbers = (self.buckets.sender == sender).nonzero()[0]
        regions = _by_weight(self._senders[sender])
        return [self._bucket(int(number), regions, None) for number in numbers]

    def taking(self, receiver: int) -> list[Bucket]:
        """Return the buckets of which a receiver needs a part, in order. It takes those of which it is the `receiver`
        from their senders, and the others from that receiver's memory. A bucket that it only hands on has no moves."""
        return self._made.get(("takes", receiver)) or self._made.setdefault(("takes", receiver), self._taking(receiver))

    def _taking(self, receiver: int) -> list[Bucket]:
        wanted = np.array([receiver in group for group in self._readers], bool)
        upto = np.append(0, np.cumsum(wanted[self._cells.readers[self.buckets.rows]]))
        needs = upto[self.buckets.ends] > upto[self.buckets.begins]
        numbers = (needs | (self.buckets.receiver == receiver)).nonzero()[0]
        regions = _by_weight(self._receivers[receiver])
        return [self._bucket(int(number), regions, wanted) for number in numbers]

    def passing(self, receiver: int) -> dict[int, tuple[int, ...]]:
        """Return the other receivers that read each bucket in the memory of `receiver`, by number of the bucket.
        Buckets without other readers are left out."""
        found: dict[int, tuple[int, ...]] = {}
        for number in (self.buckets.receiver == receiver).nonzero()[0].tolist():
            rows = self.buckets.rows[self.buckets.begins[number] : self.buckets.ends[number]]
            groups = (self._readers[group] for group in np.unique(self._cells.readers[rows]))
            if others := {*itertools.chain.from_iterable(groups)} - {receiver}:
                found[number] = tuple(sorted(others))
        return found

    @property
    def bytes_sent(self) -> np.ndarray:
        """Number of bytes that each sender sends, int64 `[senders]`."""
        return _sums(self.buckets.sender, self.buckets.nbytes, len(self._senders))

    @property
    def bytes_over_links(self) -> np.ndarray:
        """Number of bytes that each receiver takes from senders on other hosts, int64 `[receivers]`."""
        hosts = [party.host for party in self._senders], [party.host for party in self._receivers]
        far = [hosts[0][a] != hosts[1][b] for a, b in zip(self.buckets.sender, self.buckets.receiver, strict=True)]
        return _sums(self.buckets.receiver, self.buckets.nbytes * np.array(far, bool), len(self._receivers))

    def _bucket(self, number: int, regions: Mapping[str, list[Region]], wanted: np.ndarray | None) -> Bucket:
        """Return a bucket with the moves of one process. wanted: for each set of readers, whether the process is in it;
        None for the sender, which moves everything."""
        begin, end = self.buckets.begins[number], self.buckets.ends[number]
        moves: list[Move] = []
        for position in range(begin, end):
            row = self.buckets.rows[position]
            if wanted is None or wanted[self._cells.readers[row]]:
                name, (dtype, shape) = self._specs[self._cells.weight[row]]
                start = tuple(self._cells.start[row].tolist()[: len(shape)])
                stop = tuple(self._cells.stop[row].tolist()[: len(shape)])
                cell: Box = tuple(zip(start, stop, strict=True))
                sizes = tuple(b - a for a, b in cell)
                found = [region for region in regions[name] if within(cell, region.box)]
                # A sender reads one of several copies; a receiver writes all of them, as tied weights need.
                for region in found[:1] if wanted is None else found:
                    at = int(self.buckets.offset[position])
                    moves.append(Move(region.tensor, region.offset_of(start), sizes, region.strides, dtype, at))
        sender, receiver = int(self.buckets.sender[number]), int(self.buckets.receiver[number])
        return Bucket(number, sender, receiver, int(self.buckets.nbytes[number]), tuple(moves))


def plan_transfer(
    specs: Specs, senders: Sequence[Party], receivers: Sequence[Party], bucket_bytes: int
) -> TransferPlan:
    """Plan the transfer of the weights `specs`. The same arguments give the same plan in every process.

    bucket_bytes: largest size of a bucket, a multiple of ALIGN. Raises ValueError if a receiver needs what no sender
    has, if a region does not fit its weight, and for a `bucket_bytes` that is not a positive multiple of ALIGN.
    """
    if bucket_bytes < ALIGN or bucket_bytes % ALIGN:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}, expected a positive multiple of {ALIGN}")
    maker = CellMaker(specs, senders, receivers, bucket_bytes)
    cells = maker.all()
    sender = choose_evenly(maker.candidates.sets, cells.candidates, cells.nbytes, len(senders))
    receiver = choose_evenly(maker.readers.sets, cells.readers, cells.nbytes, len(receivers))
    buckets = fill_buckets(sender, receiver, cells.nbytes, bucket_bytes, len(receivers))
    key = plan_key(specs, senders, receivers, bucket_bytes)
    return TransferPlan(key, specs, senders, receivers, cells, maker.readers.sets, buckets)


def plan_key(specs: Specs, senders: Sequence[Party], receivers: Sequence[Party], bucket_bytes: int) -> str:
    """Return a hash of the arguments of `plan_transfer`. Processes with the same hash have the same plan."""
    named = [(name, str(dtype), shape) for name, (dtype, shape) in specs.items()]
    return xxhash.xxh3_128_hexdigest(messages.encode((named, [*senders], [*receivers], bucket_bytes)))


def _sums(of: np.ndarray, nbytes: np.ndarray, num: int) -> np.ndarray:
    found = np.zeros(num, np.int64)
    np.add.at(found, of, nbytes)
    return found


def _by_weight(party: Party) -> Mapping[str, list[Region]]:
    found: dict[str, list[Region]] = defaultdict(list)
    for region in party.regions:
        found[region.weight].append(region)
    return found
