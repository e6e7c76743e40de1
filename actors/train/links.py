"""One rank's ties to the other ranks of its replica: parts, their process groups, and collectives with a bound.

The groups are the reader's own: its prefetch thread must never share one with the thread that computes. gloo takes no
bound for a single operation, so each is waited for in slices against a deadline; the groups' timeout lies behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ...dataplane.topology import Place, Topology
from .prefetch import PrefetchStopped
from .stage_fields import EMBEDDED, stage_fields
from .wire import ReplicaLost

GRACE_S = 5.0
"""Time beyond the leader's bound that siblings give it: its own error must arrive first."""
SLICE_S = 0.1
"""How long an operation is waited for before the deadline, and whether the pass was given up, are looked at again."""
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Ranks of a replica with identical needs, and the group in which the leader broadcasts to them."""

    place: Place
    """Of the first of them: all need what it needs."""
    members: tuple[int, ...]
    """The ranks themselves, ascending."""
    ranks: tuple[int, ...]
    """With the leader, who is the first; the leader alone needs no group."""


def parts_of(topology: Topology, dp: int) -> tuple[Part, ...]:
    """The parts of replica `dp`, the leader's own first."""
    members: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for rank in topology.replica(dp):
        place = topology.place(rank)
        needs = stage_fields(topology, place, (EMBEDDED, "any other"))
        members.setdefault((needs, place.cp if needs else 0), []).append(rank)
    leader = topology.leader(dp)
    return tuple(
        Part(topology.place(ranks[0]), tuple(ranks), tuple(sorted({leader, *ranks}))) for ranks in members.values()
    )


class ReplicaLinks:
    """See the module's docstring. Built by all ranks of the mesh at once; collective calls: of a part's ranks."""

    def __init__(self, topology: Topology, rank: int, *, name: str, timeout_s: float, device: torch.device) -> None:
        """Needs a default process group of the mesh's ranks. Collective over all of them.

        name: of this process, for the others' errors. timeout_s: bound of each operation; siblings wait GRACE_S longer.
        device: where rows are wanted; on a GPU buffers go over NCCL unless there are pipeline stages (see `on_device`).
        """
        if not dist.is_initialized() or dist.get_world_size() != topology.world:
            raise RuntimeError(f"replica links: expected a default process group of {topology.world} ranks")
        dp = topology.place(rank).dp
        self.rank = rank
        self.leader = topology.leader(dp)
        self.parts = parts_of(topology, dp)
        self.own = next(part for part in self.parts if rank in part.members)
        self.on_device = device.type == "cuda" and topology.pp == 1
        """Buffers are broadcast on the GPU, by the thread that computes: there every rank of the replica issues its
        work in the same order, which NCCL asks for. Pipeline stages run at different microbatches; theirs go by gloo.
        """
        self._timeout_s = timeout_s
        self._groups: dict[Part, dist.ProcessGroup] = {}
        self._device_groups: dict[Part, dist.ProcessGroup] = {}
        self._names: dict[int, str] = {rank: name}
        bound = timedelta(seconds=timeout_s + 2 * GRACE_S)
        for replica in range(topology.dp):
            for part in parts_of(topology, replica):
                if len(part.ranks) > 1:
                    self._join(part, bound)

    def _join(self, part: Part, bound: timedelta) -> None:
        """Make a part's groups; every rank of the mesh takes part, also those outside."""
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
        for rank, told in zip(part.ranks, every, strict=True):
            self._names[rank] = bytes(told.tolist()).rstrip(b"\0").decode(errors="replace")

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    def name(self, rank: int) -> str:
        """`rank {n}: {name} (pid, host)` of a rank that this one shares a group with."""
        return f"rank {rank}: {self._names[rank]}"

    def remote(self) -> list[Part]:
        """Leader only: the parts with ranks besides the leader."""
        return [part for part in self.parts if len(part.ranks) > 1]

    # ------------------------------------------------------------ collectives on the host

    def send(
        self,
        frames: Sequence[tuple[Part, Sequence[torch.Tensor]]],
        what: str,
        stop: threading.Event,
        bound_s: float | None = None,
    ) -> None:
        """Leader: broadcast to each part its tensors (uint8, CPU), in order; returns when all are on their way.

        bound_s: None takes the links' own. Raises ReplicaLost when a rank died or did not take them in time,
        PrefetchStopped.
        """
        bound_s = self._timeout_s if bound_s is None else bound_s
        started = time.monotonic()
        works = []
        for part, tensors in frames:
            late = " or ".join(self.name(rank) for rank in part.ranks if rank != self.rank)
            missed = f"{what}: not taken by {late}"
            works += [(missed, self._begin(part, tensor, missed, started)) for tensor in tensors]
        for missed, work in works:
            self._wait(work, missed, started, bound_s, stop)

    def receive(self, nbytes: int, what: str, stop: threading.Event, *, pinned: bool = False) -> torch.Tensor:
        """Sibling: the next broadcast of the leader, uint8 `[nbytes]` on the CPU.

        Raises ReplicaLost when the leader died or was late, PrefetchStopped.
        """
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        started = time.monotonic()
        from_leader = f"{what}: nothing from the leader, {self.name(self.leader)}"
        work = self._begin(self.own, tensor, from_leader, started)
        self._wait(work, from_leader, started, self._timeout_s + GRACE_S, stop)
        return tensor

    def _begin(self, part: Part, tensor: torch.Tensor, what: str, started: float) -> dist.Work:
        try:
            work = dist.broadcast(tensor, self.leader, group=self._groups[part], async_op=True)
        except RuntimeError as error:  # a connection that is known to be broken
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

    # ------------------------------------------------------------ collectives on the device

    def share(self, part: Part, buffer: torch.Tensor) -> None:
        """Broadcast `buffer` on the GPU, in the order of the current stream; errors surface as NCCL reports them."""
        dist.broadcast(buffer, self.leader, group=self._device_groups[part])

    def close(self) -> None:
        """Leave the groups. Idempotent."""
        for groups in (self._device_groups, self._groups):
            while groups:
                dist.destroy_process_group(groups.popitem()[1])


def _failed(work: dist.Work) -> bool:
    """Whether an operation that has ended, failed; it may have ended well just after the wait for it ran out."""
    try:
        work.wait()
        return False
    except RuntimeError:
        return True
