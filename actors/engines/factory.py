"""Builds the generation engine that a configuration names: `hf`, `vllm` or `scripted`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...codecs.imports import import_object
from ...codecs.schema import DTYPES
from ..weights.transports.protocol import ReceiverConfig
from .config import ModelConfig, RolloutConfig, ScriptedConfig
from .protocol import GenerationEngine
from .tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that one generation engine is built from; it travels to the engine's process."""

    rollout: RolloutConfig
    model: ModelConfig
    """`path` is the folder or hub id of the model's files (`scripted`: of the tokenizer's)."""
    scripted: ScriptedConfig = ScriptedConfig()
    device: str = "cpu"
    """Torch device of an `hf` engine."""
    seed: int = 0
    version: int = 0
    """Policy version that the model's weights stand for."""
    receiver: ReceiverConfig | None = None
    """The way in which new weights come in; None: they never change."""
    script: str = ""
    """Import path of the `Script` of a `scripted` engine; empty: seeded random tokens of the tokenizer."""


def build_engine(config: EngineConfig) -> GenerationEngine:
    """Build the engine. Raises ValueError in one sentence for an unknown kind, or a model that cannot be loaded."""
    kind = config.rollout.engine
    if kind == "hf":
        return _build_hf(config)
    if kind == "vllm":
        return _build_vllm(config)
    if kind == "scripted":
        return _build_scripted(config)
    raise ValueError(f"rollout.engine: got {kind!r}, which no engine here has")


def _build_hf(config: EngineConfig) -> GenerationEngine:
    from .hf.engine import HfEngine  # imported here, so that scripted runs do not wait for transformers' model code

    return HfEngine(
        config.model.path,
        dtype=DTYPES[config.model.dtype],
        device=config.device,
        max_batch=config.rollout.max_batch,
        seed=config.seed,
        receiver=config.receiver,
        version=config.version,
    )


def _build_vllm(config: EngineConfig) -> GenerationEngine:
    from .vllm.engine import VllmEngine

    return VllmEngine(
        config.model.path,
        dtype=DTYPES[config.model.dtype],
        tp=config.rollout.tp,
        max_num_seqs=config.rollout.max_batch,
        kv_cache_bytes=config.rollout.kv_cache_mib << 20,
        seed=config.seed,
        receiver=config.receiver,
        version=config.version,
    )


def _build_scripted(config: EngineConfig) -> GenerationEngine:
    from .scripted import ScriptedEngine, random_tokens

    tokenizer = load_tokenizer(config.model.path)
    script: Callable
    if config.script:
        script = import_object(config.script, "rollout.script")
    else:
        script = random_tokens(len(tokenizer), config.seed)
    return ScriptedEngine(
        script,
        latency_s=config.scripted.latency_s,
        latency_sigma=config.scripted.latency_sigma,
        tokenizer=tokenizer,
        seed=config.seed,
        receiver=config.receiver,
        version=config.version,
    )
