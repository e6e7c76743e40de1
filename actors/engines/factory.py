"""Builds the generation engine that a configuration names: `hf`, `vllm` or `scripted`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...codecs.imports import import_object
from ...codecs.schema import DTYPES
from ..weights.transports.protocol import ReceiverConfig
from .protocol import GenerationEngine
from .tokenizer import load_tokenizer

ENGINE_KINDS = ("hf", "vllm", "scripted")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One generation engine."""

    kind: str
    """One of ENGINE_KINDS."""
    model: str
    """Folder or hub id of the model (`scripted`: of the tokenizer)."""
    dtype: str = "float32"
    """hf, vllm: a float dtype's name."""
    device: str = "cpu"
    """hf: a torch device."""
    max_batch: int = 256
    """hf, vllm: sequences decoded together."""
    tp: int = 1
    """vllm: tensor-parallel processes."""
    kv_cache_mib: int = 512
    """vllm: room for keys and values, of each process."""
    seed: int = 0
    version: int = 0
    """Policy version that the model's weights stand for."""
    receiver: ReceiverConfig | None = None
    """How new weights come in; None: they never change."""
    script: str = ""
    """scripted: import path of a `Script`; "": seeded random tokens of the tokenizer."""
    latency_s: float = 0.0
    """scripted: median seconds of a request."""
    latency_sigma: float = 0.0
    """scripted: spread of the log-normal latency; 0.0: constant."""


def build_engine(config: EngineConfig) -> GenerationEngine:
    """Build the engine.

    Raises ValueError in one sentence for an unknown kind or dtype, or a model that cannot be loaded.
    """
    if config.kind == "hf":
        return _build_hf(config)
    if config.kind == "vllm":
        return _build_vllm(config)
    if config.kind == "scripted":
        return _build_scripted(config)
    near = difflib.get_close_matches(config.kind, ENGINE_KINDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"rollout.engine: got {config.kind!r}, expected one of {', '.join(ENGINE_KINDS)}{hint}")


def _build_hf(config: EngineConfig) -> GenerationEngine:
    from .hf.engine import HfEngine  # imported here, so that scripted runs do not wait for transformers' model code

    return HfEngine(
        config.model,
        dtype=_float_dtype(config),
        device=config.device,
        max_batch=config.max_batch,
        seed=config.seed,
        receiver=config.receiver,
        version=config.version,
    )


def _build_vllm(config: EngineConfig) -> GenerationEngine:
    from .vllm.engine import VllmEngine

    return VllmEngine(
        config.model,
        dtype=_float_dtype(config),
        tp=config.tp,
        max_num_seqs=config.max_batch,
        kv_cache_bytes=config.kv_cache_mib << 20,
        seed=config.seed,
        receiver=config.receiver,
        version=config.version,
    )


def _build_scripted(config: EngineConfig) -> GenerationEngine:
    from .scripted import ScriptedEngine, random_tokens

    tokenizer = load_tokenizer(config.model)
    script: Callable
    if config.script:
        script = import_object(config.script, "rollout.script")
    else:
        script = random_tokens(len(tokenizer), config.seed)
    return ScriptedEngine(
        script,
        latency_s=config.latency_s,
        latency_sigma=config.latency_sigma,
        tokenizer=tokenizer,
        seed=config.seed,
        receiver=config.receiver,
        version=config.version,
    )


def _float_dtype(config: EngineConfig) -> torch.dtype:
    dtype = DTYPES.get(config.dtype)
    if dtype is None or not dtype.is_floating_point:
        raise ValueError(f"model.dtype: got {config.dtype!r}, expected float32, bfloat16 or float16")
    return dtype
