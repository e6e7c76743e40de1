"""Defines from what settings a train rank's worker is built, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...codecs.tokens.routes import RouteSpec
from ...dataplane.handle import DataPlaneHandle
from ..columns import ColumnConfig
from ..protocols import SpanTable
from ..sample_file import SampleFile
from ..train_backend import TrainBackend
from ..weight_sync.config import SyncConfig
from ..weight_sync.pairs.rank_publisher import RankPublisher
from ..weight_sync.transports.protocol import WeightSender
from .reader import FetchPolicy
from .teachers import TeacherSetup
from .topology import Topology


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Report of one train rank on a pass over a shard or on the optimizer step: metrics and measurements, no rows."""

    metrics: dict[str, float]
    """Metrics of the train step over all ranks. Only rank 0 reports them, after the optimizer step; otherwise empty."""
    data_wait_s: float
    """Seconds that this rank waited for rows since its last report."""
    traffic: bytes
    """Data-plane calls of this rank since its last report, encoded by `Traffic.to_bytes`. A rank that gets its rows
    from a leader makes no reads."""
    bytes_broadcast: int
    """Number of bytes that this rank broadcast to its replica as its leader, counted once for each part of the replica
    (the ranks that need identical data)."""
    spans: SpanTable
    """Timed pieces of work for the trace; empty unless the shard is traced."""
    divergences: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Name of a teacher -> sum of `log p - log p_teacher` over the tokens that it scored on this rank, with p the
    engine's policy, and their number. The name "" stands for the mixture of all teachers. Only ranks that have written
    teachers' columns report them, once."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Settings from which a rank's TrainWorker is built. The package `trainers` supplies the factories `backend` and
    `sender`."""

    rank: int
    topology: Topology
    fetch: FetchPolicy
    """Which ranks of a replica read its rows from the store: with `leader` or `auto`, one rank for all of them; with
    `independent`, each rank for itself."""
    threads: int
    """Number of CPU threads that torch uses in the process."""
    temperature: float
    """Sampling temperature of the rollouts, also used when log-probs are computed."""
    timeout_s: float
    """Seconds after which a wait for another rank of the replica fails."""
    collective_timeout_s: float
    """Seconds after which forming the process group, or one of its collective operations, fails."""
    data_plane: DataPlaneHandle
    backend: Callable[..., TrainBackend]
    """Function that builds the train backend, given the rank and the number of ranks, and, for an adapter's backend
    that is built again, `known`."""
    sender: Callable[[str], WeightSender]
    """Function that builds the sender of weight updates, given the address at which engines reach this host; called on
    rank 0 only."""
    sync: SyncConfig
    """Config section `sync`: the settings of weight updates."""
    bucket_bytes: int
    """Size of the largest bucket of weights in bytes, a multiple of 64."""
    rank_publisher: Callable[..., RankPublisher] | None = None
    """Function that builds the publisher of this rank, given its address, specs and regions of the weights, and the
    adapter that they are; None if rank 0 gathers and sends all weights."""
    quantization: Callable[[], Any] | None = None
    """Function that returns the `Quantization` of weights that are sent in 8 bits; None if none are."""
    keep_versions: bool = False
    """True if rank 0 keeps the last versions of the weights in host memory whatever `sync` says."""
    samples: SampleFile | None = None
    """File of episodes for people to read, with a line for each picked row; None writes no file."""
    routes: RouteSpec | None = None
    """Shape of the routes that the policy's passes replay; None without router replay."""
    masks: tuple[str, ...] = ()
    """Field of the sampling masks, which all passes over sampled tokens read, those of the reference model included, to
    compute log-probs over the sets from which the tokens were drawn; () for rows without masks."""
    columns: tuple[ColumnConfig, ...] = ()
    """Numeric columns of the user that the loss reads."""
    reference: Callable[[int, int], TrainBackend] | None = None
    """Function that builds a backend of the reference model; None if the train backend itself has that model."""
    teachers: tuple[TeacherSetup, ...] = ()
    """Teachers of a distillation; () without one."""
    top_k: int = 0
    """Number of most likely tokens of the teacher that rows carry at each position."""
    single_rank_groups: bool = False
    """True if the backend needs process groups even when there is only one rank, as Megatron does."""

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.topology.world

    @property
    def has_groups(self) -> bool:
        """True if the ranks form process groups before their backends are built."""
        return self.world > 1 or self.single_rank_groups

    @property
    def name(self) -> str:
        """Name of the rank in errors, in traces and in the data plane's status."""
        return f"train worker {self.rank}"
