"""The data plane's part of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

StoreKind = Literal["auto", "local", "shm", "ray", "simple", "mooncake"]


class StoreConfig(BaseModel):
    """Which store holds the bytes, and how much."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: StoreKind = "auto"
    """`auto`: shm when the run is on one host, else simple."""
    capacity_mib: int = Field(default=1024, gt=0)
    """Bytes that rows may hold at a time, in MiB. A put over it waits."""
    num_units: int = Field(default=1, gt=0)
    """simple: TransferQueue storage units (one process each)."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """mooncake: what bytes travel by; never silently another."""
    device: str = ""
    """mooncake over rdma: device names, comma-separated (`mlx5_0,mlx5_1`); "" for all."""


class DataPlaneConfig(BaseModel):
    """Bounds and store of one run's data plane."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: StoreConfig = StoreConfig()
    integrity: Literal["off", "verify"] = "off"
    """`verify`: xxh3 per row block, written at put and checked at every read."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Bound of every wait that the caller gives no bound for."""
    lease_s: float = Field(default=600.0, gt=0)
    """A claim's lease; rows of a dead consumer return after it."""
    reserve_s: float = Field(default=60.0, gt=0)
    """A writer that has not committed by then is taken for dead and its bytes are reclaimed."""
    block_rows: int | None = Field(default=None, gt=0)
    """Rows a block holds at most; groups are never split over blocks unless one is larger than this. None: 256, or as
    many as fill 64 KiB, or 4 MiB of a field. Set to the group size, a group is a block: train ranks then fetch just
    their own groups' bytes."""
