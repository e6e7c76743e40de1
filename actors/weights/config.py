"""The section `sync` of the configuration: how weights go from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from ...dataplane.section import Count, Positive, Section

Staging = Literal["auto", "full", "none"]


class SyncConfig(Section):
    """Transport of new weights from the trainer to the engines."""

    transport: Literal["auto", "collective", "ipc", "store", "disk"] = "auto"
    """Transport of the weights. `collective` broadcasts them (NCCL on GPUs, gloo on CPUs). `ipc` shares memory within
    one host. `store` sends them through the data plane's store. `disk` writes safetensors files. `auto` is `ipc` on one
    host, else `collective`."""
    bucket_mib: Count | None = None
    """MiB of a bucket, the unit in which weights are sent and verified; two buckets are in flight. Unset: 512 between
    GPUs with `ipc` or `collective`, else 64."""
    in_flight: Literal["keep", "wait", "abort"] = "wait"
    """Treatment of requests that are running when new weights arrive. `wait` lets them finish first. `keep` pauses them
    and continues them with the new weights. `abort` cancels them and requests the rest of each response again. Each
    token records the version that generated it."""
    staging: Staging = "auto"
    """Place where an engine receives a new version. `full` receives and verifies the whole version beside the weights
    that the engine serves. `none` writes straight into the weights of the paused engine; if the transfer fails, its
    requests wait for the next whole version. `auto` is `full` on a CPU; on a GPU it is `full` when the free memory
    holds the model twice, else `none`."""
    delta: bool = False
    """Whether only what has changed since the last version is sent. The trainer then keeps two versions in host memory
    to compare them."""
    cache: bool = False
    """Whether the trainer keeps the last two versions in host memory, for engines that join late. Transports other than
    `collective` keep two versions in any case."""
    dir: str | None = None
    """Folder to which `disk` writes, which all hosts must see. Unset: `weights` in the run folder."""
    timeout_s: Positive = 60.0
    """Seconds after which any single wait of a weight sync fails: for the next bucket, for a receiver to take one, for
    an engine's requests to make a token. A sync may take longer as long as it gets on."""
