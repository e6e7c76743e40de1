"""Derives the settings from which an engine builds itself, in an actor of its own or within a rollout actor."""

from __future__ import annotations

import os
from typing import Any

from ...actors.engines.config import ModelConfig
from ...actors.engines.factory import MODULES, EngineConfig
from ...actors.rollout.config import RolloutConfig
from ...actors.weight_sync.config import SyncConfig
from ...actors.weight_sync.transports.protocol import ReceiverConfig
from ...dataplane.handle import DataPlaneHandle
from ..base_model.prepare import model_modules, route_spec
from ..config.config import Config, PoolConfig
from .transport_choice import bucket_mib

GPU_WORKER_THREADS = 4
"""Largest number of compute threads that a worker with a GPU gets by default. What it computes on the host are many
small operations, such as laying out a microbatch, and waking the threads of a large host for each takes longer than
they do: on a host of 32 cores, 0.1 s for a microbatch of 16k tokens."""


def threads(asked: int | None, processes: int, device: str | None) -> int:
    """Return the number of compute threads of each worker that computes on `device`; None for none of its own.

    asked: number that the configuration sets, if it does (`resources.threads`). processes: number of engine processes
    or of train workers, whichever is larger: both sides take turns, so each may use all cores.
    """
    most = max(1, (os.cpu_count() or 1) // processes)
    return asked or (min(most, GPU_WORKER_THREADS) if (device or "").startswith("cuda") else most)


def engine_config(
    config: Config, name: str, model: str, handle: DataPlaneHandle, device: str, *, shared_gpu: bool = False
) -> EngineConfig:
    """Return the configuration of the engine that runs in actor `name`. model: local folder or hub id. shared_gpu:
    whether train workers use the engine's GPUs at the same time."""
    changes: dict[str, Any] = {}
    if config.run.replay:
        changes["engine"] = "scripted"  # it gets no requests
    if config.run.deterministic:
        # A batch's other rows change the rounding of log-probs: alone, a group is the same whenever it is generated.
        changes["max_batch"] = config.algorithm.group_size
    sync = config.sync
    in_turns = config.resources.switch_roles == "always" or config.pool.address is not None
    if in_turns and device != "cpu" and sync.staging == "auto":
        # A sleeping engine finds much memory free, but a second copy of the weights would take the trainer's place.
        sync = sync.model_copy(update={"staging": "none"})
    return EngineConfig(
        config.rollout.model_copy(update=changes),
        config.model.model_copy(update={"path": model}),
        config.scripted,
        device=device,
        shared_gpu=shared_gpu,
        kept_free_bytes=0
        if device == "cpu"
        else neighbour_bytes(config.pool, config.rollout, config.sync, config.resources.residual_mib),
        max_model_len=config.engine_length,
        log=engine_log(config.run.dir, name),
        seed=config.run.seed,
        receiver=ReceiverConfig(name, sync, device, handle, handle.store.key),
        routes=route_spec(config.router_replay, config.model),
    )


def neighbour_bytes(pool: PoolConfig, rollout: RolloutConfig, sync: SyncConfig, residual_mib: int) -> int:
    """Return how much of each GPU's memory an engine leaves free for processes that sleep there. They are those of the
    run's own trainer, and of an engine and a trainer of each of `pool.other_runs` runs. It is 0 for a run without a
    pool, or whose engines' memory is set by `rollout.kv_cache`. residual_mib: GPU memory that a process keeps
    while it sleeps (`resources.residual_mib`)."""
    if pool.address is None or rollout.kv_cache != "auto":
        return 0
    trainer = residual_mib + 2 * bucket_mib(sync, "ipc", "cuda", pooled=True)
    return trainer + pool.other_runs * (residual_mib + trainer) << 20


def engine_ahead(kind: str, model: ModelConfig, device: str) -> tuple[tuple[str, ...], bool]:
    """Return what an actor with an engine can do before it knows its settings. It can import the modules of these
    names, which takes seconds, and start vLLM's engine process or not. On a CPU it does not, because vLLM then preloads
    libraries into that process, which it can only do once it knows its settings."""
    return (MODULES[kind], *(model_modules(model) if kind == "hf" else ())), kind == "vllm" and device != "cpu"


def engine_log(folder: str | None, name: str) -> str:
    """Return the path of the file in the run folder that receives the output of an engine's processes. The engine is
    that in actor `name`. Returns "" for a run without a folder. folder: the run folder."""
    index = name.rpartition(" ")[2]
    return os.path.join(folder, "engines", f"engine-{index}.log") if folder else ""
