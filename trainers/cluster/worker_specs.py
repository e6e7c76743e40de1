"""Derives the settings of each train worker: its backend, its weight sender and its sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from ...actors.adapters.spec import AdapterSpec
from ...actors.engines.config import ModelConfig, engine_dtype
from ...actors.engines.hf.quantized_layers import quantization_of
from ...actors.train.microbatch_plan import Budget
from ...actors.train.teachers import TeacherSetup
from ...actors.train.worker_setup import WorkerSetup
from ...actors.weight_sync.config import SyncConfig
from ...actors.weight_sync.pairs.pair_sender import KIND as PAIRS
from ...actors.weight_sync.pairs.rank_publisher import RankPublisher
from ...actors.weight_sync.plan.regions import Region, Specs
from ...actors.weight_sync.transports.factory import build_sender
from ...actors.weight_sync.transports.protocol import SenderConfig, WeightSender
from ...codecs.tokens.masks import MASKS
from ...codecs.weights.quantization import Quantization
from ...dataplane.handle import DataPlaneHandle
from ..backends.config import BackendConfig, PrevSource, TrainerConfig
from ..backends.factory import MODULES, build_backend
from ..backends.model_split import resolved_packing
from ..backends.vision.tower_costs import patch_budget
from ..base_model.prepare import model_config, model_modules, route_spec, unrounded
from ..config.config import AlgorithmConfig, Config
from ..losses.distillation_config import DistillationConfig
from .engine_specs import threads
from .rollout_specs import sample_file
from .transport_choice import bucket_mib


def worker_setup(
    config: Config, rank: int, model: str, handle: DataPlaneHandle, *, kind: str, device: str, shares_gpus: bool
) -> WorkerSetup:
    """Return the settings of train worker `rank`. kind: kind of the weight transport. shares_gpus: whether engines are
    on GPUs of train workers."""
    sync, pooled = config.sync, config.pool.address is not None
    folder = sync.dir or os.path.join(config.run.dir or ".", "weights")
    sender = SenderConfig(handle.run_id, sync, folder=folder, data_plane=handle, device=device, key=handle.store.key)
    on_gpu = device != "cpu"
    backend = replace(backend_config(config, model), engine_dtype=engine_dtype(config.model, gpu=on_gpu))
    reference = config.loss.reference_model or None
    return WorkerSetup(
        rank=rank,
        topology=config.trainer.topology,
        fetch=config.trainer.fetch,
        threads=threads(config.resources.threads, config.processes_per_side, device),
        temperature=config.rollout.temperature,
        timeout_s=config.resources.stage_timeout_s,
        collective_timeout_s=config.resources.collective_timeout_s,
        data_plane=handle,
        backend=partial(build_backend, backend),
        reference=None if reference is None else partial(build_backend, backend.frozen(reference, offload=on_gpu)),
        teachers=teacher_setups(config.distillation, backend, offload=on_gpu),
        top_k=config.distillation.top_k,
        sender=partial(_sender_at, kind, sender),
        rank_publisher=partial(_rank_publisher, rank, handle, sync, device, shares_gpus) if kind == PAIRS else None,
        sync=sync,
        bucket_bytes=bucket_mib(sync, kind, device, pooled=pooled) << 20,
        quantization=partial(quantization_of, model, scheme) if (scheme := config.rollout.scheme) else None,
        keep_versions=pooled,
        samples=sample_file(config.logging.samples, config.run, config.algorithm.prompts_per_step),
        single_rank_groups=config.trainer.backend == "megatron",
        routes=route_spec(config.router_replay, config.model),
        masks=(MASKS,) if config.rollout.masked else (),
        columns=config.data.columns,
    )


def _rank_publisher(
    rank: int,
    handle: DataPlaneHandle,
    sync: SyncConfig,
    device: str,
    shares_gpus: bool,
    host: str,
    specs: Specs,
    regions: Sequence[Sequence[Region]],
    adapter: AdapterSpec | None,
    quantization: Quantization | None,
) -> RankPublisher:
    bucket_bytes = bucket_mib(sync, PAIRS, device, pooled=False) << 20
    group = None if device == "cpu" else torch.device(device)
    return RankPublisher(
        rank, host, handle.store.key, sync, bucket_bytes, specs, regions, group, adapter,
        shares_gpus=shares_gpus, quantization=quantization,
    )  # fmt: skip


def _sender_at(kind: str, config: SenderConfig, host: str) -> WeightSender:
    return build_sender(kind, replace(config, host=host))


def worker_modules(kind: str, model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the slow modules (seconds to import) that a train worker needs."""
    return (MODULES[kind], *(model_modules(model) if kind == "fsdp" else ()))


def backend_config(config: Config, model: str) -> BackendConfig:
    """Return the configuration of the train backend, the same for every rank. model: local folder or hub id of the
    model with which engines start."""
    rounds = config.trainer.lora.rounds
    return BackendConfig(
        unrounded(config.model, model) if rounds else model,
        config.trainer,
        config.loss.with_length_norm(config.rollout.max_new_tokens),
        config.distillation,
        config.scripted,
        config.router_replay,
        total_steps=config.algorithm.steps,
        updates_per_step=config.algorithm.updates_per_step,
        prev=_prev_source(config.algorithm),
        columns=config.data.columns,
        rounded=model if rounds else None,
        adapter=config.model.adapter,
        sends_adapter=config.sends_adapter,
        attention=config.model.attention,
        context=config.engine_length,
        bitwise=config.rollout.engine if config.run.bitwise and config.rollout.engine != "scripted" else None,
        with_reference=config.with_reference and config.loss.reference_model is None,
    )


def _prev_source(algorithm: AlgorithmConfig) -> PrevSource:
    """Return the source of the log-probs of the policy before the step; see `BackendConfig.prev`."""
    if algorithm.prev_logprobs == "rollout":
        return "rollout"
    return "train_pass" if algorithm.updates_per_step == 1 else "fixed"


def with_packing(trainer: TrainerConfig, model: ModelConfig, *, gpu: bool) -> TrainerConfig:
    """Return the section `trainer` with `trainer.packing: auto` resolved for the model. gpu: whether the train
    workers have GPUs."""
    packing = resolved_packing(trainer, SimpleNamespace(**model_config(model)), gpu=gpu)
    return trainer.model_copy(update={"packing": packing})


def budget(trainer: TrainerConfig, model: ModelConfig) -> Budget:
    """Return the limit on a microbatch's tokens, and the coefficients that give a row's compute cost from its length.

    For a row of L tokens and hidden size h, attention takes 4·h·L FLOPs per token and layer, and the matrix products
    take 24·h². Attention therefore costs L / (6·h) times as much as the matrix products.
    """
    sizes, packing = model_config(model), trainer.packing
    hidden = sizes.get("hidden_size")
    assert packing != "auto", "a run begins by deciding what it means"
    return Budget(
        trainer.tokens_per_microbatch,
        linear_cost=1.0,
        quadratic_cost=1.0 / (6 * hidden) if hidden else 0.0,
        packing=packing,
        pictures=patch_budget(trainer.patches_per_microbatch, sizes),
    )


def teacher_setups(config: DistillationConfig, backend: BackendConfig, *, offload: bool) -> tuple[TeacherSetup, ...]:
    """Return the settings of all teachers for a train worker. backend: settings of the policy's backend. offload: see
    `BackendConfig.frozen`."""
    builders = [
        None if one.where == "engine" else partial(build_backend, backend.frozen(one.model, offload=offload))
        for one in config.teachers
    ]
    sources = [None if one.data_source is None else config.sources.index(one.data_source) for one in config.teachers]
    return tuple(
        TeacherSetup(name, one.weight, source, cast(Any, builder))
        for name, one, source, builder in zip(config.names, config.teachers, sources, builders, strict=True)
    )
