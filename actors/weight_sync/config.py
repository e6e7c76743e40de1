"""The section `sync` of the configuration: how weights go from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from ...dataplane.config import Count, PathText, Positive, Section

Staging = Literal["auto", "full", "none"]
Verify = Literal["off", "sample", "full"]
Recover = Literal["auto", "engine", "off"]


class SyncConfig(Section):
    """Weight sync: how new weights are sent from the trainer to the engines."""

    transport: Literal["auto", "collective", "ipc", "pairs", "store", "disk"] = "auto"
    """Transport of the weights. `collective` broadcasts them (NCCL on GPUs, gloo on CPUs). `ipc` shares memory within
    one host. `pairs` gathers nothing: every train rank sends its own part of the weights to all engines at once (NCCL
    between GPUs, CUDA IPC to engines on the train workers' own GPUs, TCP between CPUs). `store` sends them through the
    data plane's store. `disk` writes safetensors files. `auto` is `ipc` when trainer and engines are on one host. On
    several hosts it is `collective`, or `store` when they share GPUs, which NCCL cannot do, or with `dataplane.tls`,
    because gloo and NCCL do not encrypt."""
    bucket_mib: Count | None = None
    """Size of a bucket in MiB. A bucket is the piece of the weights that is sent and verified at a time; two are in
    flight. Unset: 512 between GPUs with `ipc`, `collective` or `pairs`, except for runs on a pool's GPUs; else 64."""
    in_flight: Literal["keep", "wait", "abort"] = "wait"
    """Treatment of requests that are running when new weights arrive. `wait` lets them finish first. `keep` pauses them
    and continues them with the new weights. `abort` cancels them, and the rest of each response is requested again.
    Each token records the version that generated it."""
    kv: Literal["keep", "recompute"] = "recompute"
    """Treatment of the keys and values of requests that `in_flight=keep` continues. `recompute` computes them again, so
    that every later log-prob is exactly that of the new weights. `keep` uses those of the older weights, which costs
    nothing; `staleness/kv_max` says how old they were. Requests that begin after the sync never read older ones."""
    staging: Staging = "auto"
    """Memory into which an engine receives a new version. `full` receives and verifies the complete version in a second
    copy, beside the weights that the engine serves. `none` writes straight into the weights of the paused engine; if
    the transfer fails, the engine's requests wait for the next complete version. `auto` is `full` on a CPU; on a GPU it
    is `full` when the free memory holds the model twice, else `none`."""
    delta: bool = False
    """If true, only what has changed since the last version is sent. The trainer then keeps two versions in host memory
    to compare them."""
    cache: bool = False
    """If true, the trainer keeps the last two versions in host memory, to send them to engines that join late. `store`,
    `disk` and, between CPUs, `ipc` always keep two versions."""
    dir: PathText | None = None
    """Folder that `disk` writes to. All hosts must see it. Unset: `weights` in the run folder."""
    timeout_s: Positive = 60.0
    """Seconds after which any single wait of a weight sync fails: the wait for the next bucket, for a receiver to take
    one, or for an engine's running requests to generate a token. The sync as a whole can take longer, as long as it
    makes progress."""

    adapter: Literal["only", "merged"] = "only"
    """With `trainer.lora.rank`, what is sent to the engines. `only` sends the adapter's matrices. Engines keep each
    version of the adapter beside the base model, a request finishes with the version with which it began, and each
    engine compares the adapter that it serves with the trainer's, whatever `sync.verify` says. `merged` sends the
    weights of the whole model with the adapter added to them, for engines and models that cannot serve adapters."""

    verify: Verify = "off"
    """Weights whose bytes are compared with the trainer's after an engine has loaded a new version, while the engine is
    paused. `sample` compares eight weights, different ones in each version; `full` compares all that the engine keeps
    in the form in which they were sent. An engine with a difference serves nothing until it has loaded a version
    completely."""

    recover: Recover = "auto"
    """Source of the base of an adapter (`trainer.lora.rank`) for train workers that start again under running engines.
    `auto` reads parts of it both from the model's folder and from an engine's memory, and the rest where it was faster.
    `engine` reads the folder only where an engine cannot give the base. `off` always reads the folder. Each part is
    compared with the digest of what was read at the start of the run. Only engines `hf` give the base, and only the
    backend `fsdp` takes it, if it is not rounded (`trainer.lora.base`)."""

    @property
    def keeps_old_kv(self) -> bool:
        """True if tokens can be generated from keys and values of older weights."""
        return self.in_flight == "keep" and self.kv == "keep"
