"""The section `sync` of the configuration: how weights go from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from ...dataplane.section import Count, Positive, Section

Staging = Literal["auto", "full", "none"]


class SyncConfig(Section):
    """Weights from trainer to engines."""

    transport: Literal["auto", "collective", "ipc", "store", "disk"] = "auto"
    """`collective`: broadcast (NCCL on GPUs, gloo on CPUs); `ipc`: shared memory of one host; `store`: through the data
    plane's store; `disk`: safetensors files. `auto`: ipc on one host, else collective."""
    bucket_mib: Count | None = None
    """MiB that travel, and are verified, as one; two such buckets are in flight. Unset: 512 between GPUs (`ipc`,
    `collective`), else 64."""
    in_flight: Literal["keep", "wait", "abort"] = "wait"
    """What requests do that run when new weights come: go on under them, end first, or are cut off and asked for again
    from where they were. Each token has the version that made it."""
    staging: Staging = "auto"
    """`full`: engines receive and verify the whole version beside the one they serve; `none`: straight into their
    parameters, standing still, and unfit to serve if it fails; `auto`: full on the CPU, on a GPU full when its free
    memory holds the model twice, else none."""
    delta: bool = False
    """Send only what changed since the last version. The trainer keeps two versions in host memory to compare."""
    cache: bool = False
    """Keep the last two versions in the trainer's host memory, for engines that join late. Transports other than
    collective keep them anyway."""
    dir: str | None = None
    """Folder of `disk`, seen by all hosts. Unset: `weights` in the run's folder."""
    timeout_s: Positive = 60.0
    """Seconds that each wait of a sync lasts at most."""
