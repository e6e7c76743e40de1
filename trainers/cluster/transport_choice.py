"""Chooses the transport of weights from the train workers to the engines, and which versions are kept."""

from __future__ import annotations

from dataclasses import dataclass

from ...actors.weight_sync.config import SyncConfig
from ...actors.weight_sync.pairs.pair_sender import KIND as PAIRS
from ...actors.weight_sync.transports.factory import TRANSPORT_KINDS
from ..errors import UserError
from .places.placement import Placement

LASTING_KINDS = ("ipc", "store", "disk")
"""Transports that keep the last two versions readable when weights come from a CPU (`WeightSender.lasting`)."""
POOL_BUCKET_MIB = 64
"""Size in MiB of the buckets of a run that shares a pool's GPUs. The trainer and each engine keep two buckets in GPU
memory, even while other runs use the GPU."""


def resolve_kind(kind: str, *, one_host: bool, shared_gpus: bool = False, encrypted: bool = False) -> str:
    """Return the transport to use for `kind`. `auto` becomes `ipc` when trainer and engines share a host. On several
    hosts it becomes `collective`, or `store` when they share GPUs, because an NCCL group cannot have two processes on
    one GPU, and when weights are to be encrypted, which gloo and NCCL cannot do. Other kinds are returned unchanged.
    Raises ValueError for an unknown kind.
    """
    if kind == "auto":
        return "ipc" if one_host else "store" if shared_gpus or encrypted else "collective"
    if kind not in (*TRANSPORT_KINDS, PAIRS):
        expected = ", ".join(("auto", *TRANSPORT_KINDS, PAIRS))
        raise ValueError(f"sync.transport: got {kind!r}, expected one of {expected}")
    return kind


@dataclass(frozen=True, slots=True)
class WeightRoute:
    """The route of a run's weights from the train workers to the engines."""

    kind: str
    """Kind of the weight transport, with `auto` already resolved."""
    lasting: bool
    """True if engines can read a version of the weights long after it was sent, without the trainer.

    False for `ipc` between GPUs, because the next version overwrites the memory. Also false for a run that shares a
    pool's GPUs: train rank 0 keeps the versions instead, because no engine may be awake to receive a version."""
    keeps_in_host: bool
    """True if train rank 0 keeps the last versions of the weights in its host memory."""
    send_buffer_bytes: int
    """GPU memory of the two buffers from which train rank 0 sends weights."""

    @classmethod
    def of(
        cls, sync: SyncConfig, placement: Placement, *, pooled: bool, elastic: bool = False, encrypted: bool = False
    ) -> WeightRoute:
        """Return the route between the actors of `placement`. pooled: whether the run shares a pool's GPUs. elastic:
        whether engines on other hosts may join later. encrypted: whether `dataplane.tls` is set. Raises UserError if
        the transport that `sync` names cannot work between these actors."""
        kind, on_gpus = sync.transport, placement.layout != "cpu"
        if placement.shared and kind == "collective":
            raise UserError(
                f"sync.transport: got {kind!r} with GPU {placement.shared_gpus[0]} shared by an engine and a train "
                "worker, expected 'auto', 'pairs' or 'ipc' (on several hosts 'store'), because NCCL does not allow two "
                "processes of one group on a GPU"
            )
        far = {seat.host for seat in placement.engines} - {seat.host for seat in placement.ranks}
        if placement.shared and kind == PAIRS and far:
            raise UserError(
                "sync.transport: got 'pairs' with GPUs shared by engines and train workers and an engine on a host "
                "without a train worker, expected 'auto', because train workers hand weights to the engines of their "
                "own hosts"
            )
        if kind == "ipc" and on_gpus and not placement.one_host:
            raise UserError(
                "sync.transport: got 'ipc' with engines and train workers on several hosts, expected 'auto', because "
                "ipc shares the memory of one host"
            )
        if kind == PAIRS and pooled:
            raise UserError(
                "sync.transport: got 'pairs' with pool.address, expected 'auto', because engines of a pool wake later "
                "and read their weights in the memory of train rank 0"
            )
        if kind == PAIRS and on_gpus and sync.delta:
            raise UserError(
                "sync.delta: got true with sync.transport='pairs' on GPUs, expected false, because it compares weights "
                "in the memory of CPUs"
            )
        one_host = placement.one_host and not elastic
        kind = resolve_kind(kind, one_host=one_host, shared_gpus=placement.shared, encrypted=encrypted)
        lasting = not pooled and kind in LASTING_KINDS and not (on_gpus and kind == "ipc")
        kept = pooled or (kind != PAIRS and (sync.delta or (sync.cache and not lasting)))
        return cls(kind, lasting, kept, send_buffer_bytes(sync, kind, pooled=pooled))


def bucket_mib(sync: SyncConfig, kind: str, device: str, *, pooled: bool) -> int:
    """Return the size in MiB of the buckets in which a trainer on `device` sends weights by transport `kind`. A bucket
    is one message."""
    if sync.bucket_mib is not None:
        return sync.bucket_mib
    if pooled:
        return POOL_BUCKET_MIB
    return 512 if device.startswith("cuda") and kind in ("ipc", "collective", PAIRS) else 64


def send_buffer_bytes(sync: SyncConfig, kind: str, *, pooled: bool) -> int:
    """Return the GPU memory of the two buffers from which train rank 0 sends weights by transport `kind`."""
    return 2 * bucket_mib(sync, kind, "cuda", pooled=pooled) << 20
