"""Derives the settings of an engine, which runs in its own actor or inside a rollout actor."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ...actors.adapters.spec import AdapterSlots
from ...actors.engines.config import ModelConfig
from ...actors.engines.factory import MODULES, EngineConfig
from ...actors.rollout.config import RolloutConfig
from ...actors.weight_sync.config import SyncConfig
from ...actors.weight_sync.transports.protocol import ReceiverConfig
from ...dataplane.handle import DataPlaneHandle
from ..backends.lora_config import LoraConfig
from ..base_model.prepare import model_modules, route_spec
from ..config.config import Config, PoolConfig
from .transport_choice import bucket_mib

GPU_WORKER_THREADS = 4
"""Largest number of compute threads that a worker with a GPU gets by default. Its work on the host consists of many
small operations, such as laying out a microbatch. Waking many threads takes longer than such an operation: on a host
with 32 cores, it costs 0.1 s for a microbatch of 16k tokens."""


def threads(asked: int | None, processes: int, device: str | None) -> int:
    """Return the number of compute threads of each worker on `device`. device: None for a worker that computes on no
    device.

    asked: value of `resources.threads`, None if unset. processes: number of engine processes or of train workers,
    whichever is larger. The two sides take turns, so each can use all cores.
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
        changes["engine"] = "scripted"  # A replay sends no requests to engines.
    if config.run.deterministic:
        # The other rows of a batch change the rounding of log-probs. A group that is generated alone is reproducible.
        changes["max_batch"] = config.algorithm.group_size
    sync = config.sync
    in_turns = config.resources.switch_roles == "always" or config.pool.address is not None
    if in_turns and device != "cpu" and sync.staging == "auto":
        # A sleeping engine sees much free memory, but a second copy of the weights would occupy the trainer's share.
        sync = sync.model_copy(update={"staging": "none"})
    return EngineConfig(
        config.rollout.model_copy(update=changes),
        config.model.model_copy(update={"path": model}),
        config.scripted,
        device=device,
        shared_gpu=shared_gpu,
        kept_free_bytes=0
        if device == "cpu"
        else neighbour_bytes(config.pool, config.rollout, config.sync, config.residual_mib),
        max_model_len=config.engine_length,
        log=engine_log(config.run.dir, name),
        seed=config.run.seed,
        version=config.first_version,
        adapters=adapter_slots(config.trainer.lora, config.rollout) if config.sends_adapter else None,
        receiver=ReceiverConfig(name, sync, device, handle, handle.store.key),
        routes=route_spec(config.router_replay, config.model),
        schemas=config.rollout.endpoint.enabled,
        bitwise=config.run.bitwise,
    )


def adapter_slots(lora: LoraConfig, rollout: RolloutConfig) -> AdapterSlots:
    """Return the room for adapters of an engine: for two versions of each of `rollout.max_adapters` adapters."""
    return AdapterSlots(lora.rank, 2 * rollout.max_adapters, experts=lora.experts)


def neighbour_bytes(pool: PoolConfig, rollout: RolloutConfig, sync: SyncConfig, residual_mib: int) -> int:
    """Return the bytes of each GPU's memory that an engine leaves free for sleeping processes. These processes belong
    to the run's own trainer, and to an engine and a trainer of each of `pool.other_runs` runs. The result is 0 for a
    run without a pool, and for a run that sets `rollout.kv_cache`. residual_mib: GPU memory that a process keeps while
    it sleeps (`resources.residual_mib`)."""
    if pool.address is None or rollout.kv_cache != "auto":
        return 0
    trainer = residual_mib + 2 * bucket_mib(sync, "ipc", "cuda", pooled=True)
    return trainer + pool.other_runs * (residual_mib + trainer) << 20


def engine_ahead(kind: str, model: ModelConfig, device: str) -> tuple[tuple[str, ...], bool]:
    """Return which modules an actor with an engine imports before it has its settings. Also return whether it starts
    vLLM's engine process then. The imports take seconds. On a CPU the process starts later, because vLLM preloads
    libraries into it and needs the settings for that."""
    return (MODULES[kind], *(model_modules(model) if kind == "hf" else ())), kind == "vllm" and device != "cpu"


def engine_log(folder: str | None, name: str) -> str:
    """Return the path of the file that receives the output of the processes of the engine in actor `name`. folder: the
    run folder, which contains the file; for None the path is ""."""
    index = name.rpartition(" ")[2]
    return os.path.join(folder, "engines", f"engine-{index}.log") if folder else ""


def teacher_engine(policy: EngineConfig, model: str, rollout: RolloutConfig, top_k: int) -> EngineConfig:
    """Return the settings of a teacher's engine, whose weights never change. policy: settings of an engine of the
    policy in the same actor. model: the teacher's folder or hub id. rollout: section with the kind of the engine, which
    differs from that of `policy` in a replay."""
    longest = policy.max_model_len
    rollout = rollout.model_copy(update={"quantization": "none", "kv_cache_dtype": "auto"})  # Its log-probs are exact.
    if rollout.engine == "vllm":  # It limits the log-probs of a request, and generates a token after the prompt.
        rollout = rollout.model_copy(update={"vllm": {"max_logprobs": max(top_k, 20), **rollout.vllm}})
        longest = None if longest is None else longest + 1
    return replace(
        policy,
        rollout=rollout,
        model=policy.model.model_copy(update={"path": model, "adapter": None}),
        max_model_len=longest,
        version=0,
        receiver=None,
        adapters=None,
        routes=None,
        bitwise=False,
    )
