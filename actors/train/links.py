"""Connects one rank to the other ranks of its replica: process groups, and broadcasts that end by a deadline.

The replica reader has process groups of its own, because its prefetch thread must never share a group with the thread
that computes. gloo accepts no timeout for a single operation, so `ReplicaLinks` waits for each operation in short
slices until a deadline. The timeout of the groups themselves is longer than any deadline.

A replica's leader is the rank that reads for the replica; its siblings are the other ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ...codecs.tokens.routes import ROUTES, RouteSpec
from .step_rows import EMBEDDED, stage_fields, stage_layers
from .topology import Place, Topology
from .wire import PrefetchStopped, ReplicaLost

GRACE_S = 5.0
"""Seconds that the other ranks of a replica wait beyond the deadline of their leader, so that the leader's own error
reaches them first."""
SLICE_S = 0.1
"""Interval in seconds at which a wait for an operation checks its deadline and whether the pass was given up."""
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Ranks of a replica that need identical data, and the group in which the leader broadcasts to them."""

    place: Place
    """Mesh coordinates of the first member; all members need the same data."""
    members: tuple[int, ...]
    """Ranks that need identical data, ascending."""
    ranks: tuple[int, ...]
    """Ranks of the broadcast group, ascending: the members and the leader. A leader that is the only rank needs no
    group."""


def parts_of(topology: Topology, dp: int, routes: RouteSpec | None = None) -> tuple[Part, ...]:
    """Split replica `dp` into parts, each with the ranks that need identical data, and return them. The leader's own
    part is first. routes: shape of the routes, of which each pipeline stage needs those of its own layers; None without
    router replay."""
    members: dict[tuple[tuple[str, ...], int, range], list[int]] = {}
    for rank in topology.replica(dp):
        place = topology.place(rank)
        needs = stage_fields(topology, place, (EMBEDDED, "any other", ROUTES), routes)
        layers = range(0) if routes is None else stage_layers(topology, place, routes)
        members.setdefault((needs, place.cp if needs else 0, layers), []).append(rank)
    leader = topology.leader(dp)
    return tuple(
        Part(topology.place(ranks[0]), tuple(ranks), tuple(sorted({leader, *ranks}))) for ranks in members.values()
    )


class ReplicaLinks:
    """One rank's process groups within its replica, and the broadcasts over them.

    All ranks of the mesh must construct it at the same time. The ranks of a part (those that need identical data) must
    make its collective calls in the same order.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        *,
        name: str,
        timeout_s: float,
        device: torch.device,
        routes: RouteSpec | None = None,
    ) -> None:
        """Create the process groups. The call is collective over all ranks of the mesh and needs their default process
        group.

        name: name of this process in other ranks' errors. timeout_s: seconds that each operation may take; siblings
        wait GRACE_S longer. device: device on which rows are needed; buffers for a GPU are broadcast by NCCL unless the
        mesh has pipeline stages (see `on_device`). routes: see `parts_of`. Raises RuntimeError when there is no default
        process group of the mesh's size.
        """
        if not dist.is_initialized() or dist.get_world_size() != topology.world:
            raise RuntimeError(
                f"replica links: there is no default process group of {topology.world} ranks, expected one"
            )
        dp = topology.place(rank).dp
        self.rank = rank
        self.leader = topology.leader(dp)
        self.parts = parts_of(topology, dp, routes)
        self.own = next(part for part in self.parts if rank in part.members)
        self.on_device = device.type == "cuda" and topology.pp == 1
        """True if buffers are broadcast on the GPU, by the thread that computes. NCCL requires that every rank issues
        its work in the same order, which that thread guarantees. Pipeline stages work on different microbatches at one
        time, so their buffers are broadcast by gloo instead."""
        self._timeout_s = timeout_s
        self._groups: dict[Part, dist.ProcessGroup] = {}
        self._device_groups: dict[Part, dist.ProcessGroup] = {}
        self._names: dict[int, str] = {rank: name}
        bound = timedelta(seconds=timeout_s + 2 * GRACE_S)
        for replica in range(topology.dp):
            for part in parts_of(topology, replica, routes):
                if len(part.ranks) > 1:
                    self._join(part, bound)

    def _join(self, part: Part, bound: timedelta) -> None:
        """Create the process groups of a part. The call is collective over all ranks of the mesh, including those
        outside the part."""
        group = dist.new_group(list(part.ranks), timeout=bound, backend="gloo")
        device_group = dist.new_group(list(part.ranks), timeout=bound, backend="nccl") if self.on_device else None
        if self.rank not in part.ranks:
            return
        assert isinstance(group, dist.ProcessGroup)
        self._groups[part] = group
        if device_group is not None:
            assert isinstance(device_group, dist.ProcessGroup)
            self._device_groups[part] = device_group
        own = self._names[self.rank].encode()[:_NAME_BYTES]
        mine = torch.tensor(list(own.ljust(_NAME_BYTES, b"\0")), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in part.ranks]
        dist.all_gather(every, mine, group=group)
        for rank, name_bytes in zip(part.ranks, every, strict=True):
            self._names[rank] = bytes(name_bytes.tolist()).rstrip(b"\0").decode(errors="replace")

    @property
    def leads(self) -> bool:
        """True if this rank is the leader of its replica."""
        return self.rank == self.leader

    def name(self, rank: int) -> str:
        """Return the name of a rank for error messages, `rank {n}: {name}`. `name` is what that rank passed to its own
        ReplicaLinks. It must be this rank or one that shares a group with it."""
        return f"rank {rank}: {self._names[rank]}"

    def remote(self) -> list[Part]:
        """Return the replica's parts (groups of ranks that need identical data) with ranks other than the leader. Only
        the leader calls this."""
        return [part for part in self.parts if len(part.ranks) > 1]

    def send(
        self,
        frames: Sequence[tuple[Part, Sequence[torch.Tensor]]],
        what: str,
        stop: threading.Event,
        bound_s: float | None = None,
    ) -> None:
        """Broadcast each part's tensors (uint8, on the CPU) in order, and return once all of them are sent.

        Only the leader calls this. what: the operation, for errors. bound_s: seconds until ReplicaLost is raised; None
        uses the timeout of the links. Raises ReplicaLost when a rank died or did not receive a tensor in time, and
        PrefetchStopped once `stop` is set.
        """
        bound_s = self._timeout_s if bound_s is None else bound_s
        started = time.monotonic()
        works = []
        for part, tensors in frames:
            late = " or ".join(self.name(rank) for rank in part.ranks if rank != self.rank)
            missed = f"{what}: not received by {late}"
            works += [(missed, self._begin(part, tensor, missed, started)) for tensor in tensors]
        for missed, work in works:
            self._wait(work, missed, started, bound_s, stop)

    def receive(self, nbytes: int, what: str, stop: threading.Event, *, pinned: bool = False) -> torch.Tensor:
        """Receive the leader's next broadcast and return it, uint8 `[nbytes]` on the CPU. Only siblings call this.

        what: the operation, for errors. pinned: whether to receive into pinned memory. Raises ReplicaLost when the
        leader died or was late, and PrefetchStopped once `stop` is set.
        """
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        started = time.monotonic()
        from_leader = f"{what}: nothing received from the leader, {self.name(self.leader)},"
        work = self._begin(self.own, tensor, from_leader, started)
        self._wait(work, from_leader, started, self._timeout_s + GRACE_S, stop)
        return tensor

    def _begin(self, part: Part, tensor: torch.Tensor, what: str, started: float) -> dist.Work:
        try:
            work = dist.broadcast(tensor, self.leader, group=self._groups[part], async_op=True)
        except RuntimeError as error:  # This connection is known to be broken.
            raise self._lost(what, started, error) from error
        assert work is not None
        return work

    def _wait(self, work: dist.Work, what: str, started: float, bound_s: float, stop: threading.Event) -> None:
        while True:
            left_s = started + bound_s - time.monotonic()
            try:
                work.wait(timedelta(seconds=min(SLICE_S, max(left_s, 1e-3))))
                return
            except RuntimeError as error:
                if work.is_completed():
                    if _failed(work):
                        raise self._lost(what, started, error) from error
                    return
            if stop.is_set():
                raise PrefetchStopped
            if left_s <= 0:
                raise self._lost(what, started, None)

    def _lost(self, what: str, started: float, error: Exception | None) -> ReplicaLost:
        elapsed_s = time.monotonic() - started
        reason = f" ({str(error).strip().splitlines()[0]})" if error is not None else ""
        return ReplicaLost(f"{self.name(self.rank)}: {what} after {elapsed_s:.1f} s{reason}")

    def share(self, part: Part, buffer: torch.Tensor) -> None:
        """Broadcast `buffer`, a GPU tensor, from the leader to the ranks of `part`, in the order of the CUDA stream.
        NCCL does it, on the current stream. Errors surface as NCCL reports them."""
        dist.broadcast(buffer, self.leader, group=self._device_groups[part])

    def close(self) -> None:
        """Destroy the process groups, unless an offload has done so. Idempotent."""
        for groups in (self._device_groups, self._groups):
            while groups:
                _, group = groups.popitem()
                if dist.is_initialized():
                    dist.destroy_process_group(group)


def _failed(work: dist.Work) -> bool:
    """Return True if a completed send, receive or collective ended in an error. An operation whose wait timed out may
    still have succeeded right afterwards; this then returns False."""
    try:
        work.wait()
        return False
    except RuntimeError:
        return True
