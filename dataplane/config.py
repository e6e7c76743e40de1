"""The section `dataplane` of the configuration: which store holds the rows, and the bounds of waits and leases."""

from __future__ import annotations

from typing import Literal

from .section import Count, Positive, Section

StoreKind = Literal["auto", "local", "shm", "ray", "simple", "mooncake"]


class StoreConfig(Section):
    """Which store holds the bytes, and how many."""

    kind: StoreKind = "auto"
    """Kind of the store. `auto` is shm when the run is on one host, else simple."""
    capacity_mib: Count = 1024
    """MiB that rows may take in the store at a time. A put over it waits."""
    num_units: Count = 1
    """Number of TransferQueue storage units of `simple`, one process each."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Network protocol of `mooncake`. It never falls back to the other one silently."""
    device: str = ""
    """Device names of `mooncake` over rdma, comma-separated (`mlx5_0,mlx5_1`); empty: all devices."""


class DataPlaneConfig(Section):
    """The data plane between rollouts and train workers: its store and its bounds."""

    store: StoreConfig = StoreConfig()
    """The store that holds the rows' bytes."""
    integrity: Literal["off", "verify"] = "off"
    """`verify` writes an xxh3 checksum with each row block and checks it at every read."""
    timeout_s: Positive = 30.0
    """Seconds that a call waits at most when its caller gives no bound."""
    lease_s: Positive = 600.0
    """Seconds that a claim's lease lasts. The rows of a dead consumer return after it."""
    reserve_s: Positive = 60.0
    """Seconds after which a writer that has not committed is taken for dead and its bytes are reclaimed."""
    block_rows: Count | None = None
    """Number of rows that a block holds at most. Groups are split over blocks only when one is larger than this.
    Unset: 256, or as many as fill 64 KiB, or 4 MiB of a field. With the group size each group is a block, so that
    train ranks fetch only the bytes of their own groups."""
