"""What the two ends of a transport are built from: plain data that travels to the processes that build them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...dataplane.handle import DataPlaneHandle

Staging = Literal["auto", "full", "none"]


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """The publishing end's surroundings."""

    run_id: str
    """Names what is published; letters, digits, `-`, `_`, `.`."""
    bucket_bytes: int
    """The largest bucket, a multiple of 64."""
    timeout_s: float
    """Bound of every wait for receivers, from an update's first bucket on."""
    host: str = "127.0.0.1"
    """collective: the address of this host that receivers reach."""
    folder: str = ""
    """disk: where versions are written; made when missing."""
    data_plane: DataPlaneHandle | None = None
    """store: whose."""
    device: str = "cpu"
    """Where weights come from: `cpu`, or `cuda:0`, whose buffers `collective` and `ipc` then hand out."""


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """The fetching end's surroundings, the same for all workers of an engine."""

    engine: str
    """Its name, as in the announcement."""
    staging: Staging = "auto"
    """`full`: a version is received whole beside the one that is served; `none`: it is received while it is committed.
    `auto`: full on the CPU; on a GPU full when what is free there holds the model twice, else none."""
    device: str = "cpu"
    """Where the engine's weights are: `cpu`, or `cuda:0`."""
    data_plane: DataPlaneHandle | None = None
    """store: whose."""
    keep_base: bool = True
    """Keep the served version staged, which a delta refers to. Without, every update must be whole."""
