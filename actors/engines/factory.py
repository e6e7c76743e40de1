"""Builds the generation engine that a configuration names: `hf`, `vllm` or `scripted`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...codecs.schema import DTYPES
from ...codecs.tokens.routes import RouteSpec
from ...dataplane.imports import import_object
from ..adapters.spec import AdapterSlots
from ..process.memory import gpu_sizes
from ..weight_sync.transports.protocol import ReceiverConfig
from .config import EngineKeys, ModelConfig, ScriptedConfig, engine_batch, engine_dtype, memory_share
from .protocol import GenerationEngine
from .tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings from which a generation engine is built, as plain data that can be sent to the engine's process."""

    rollout: EngineKeys
    model: ModelConfig
    """Model that the engine loads from `path`, a folder or hub id. A `scripted` engine loads only the tokenizer from
    there."""
    scripted: ScriptedConfig = ScriptedConfig()
    device: str = "cpu"
    """Torch device of an `hf` engine; a `vllm` engine runs on GPUs if it is a GPU."""
    shared_gpu: bool = False
    """True if train workers use the engine's GPUs at the same time."""
    kept_free_bytes: int = 0
    """Number of bytes of each GPU's memory that the engine leaves free for sleeping processes on the same GPU."""
    max_model_len: int | None = None
    """Largest number of tokens of a prompt and its answer together that a `vllm` engine takes, and for which an `hf`
    engine chooses positions; None: the model's own limit."""
    log: str = ""
    """Path of the file that receives the output of vLLM's processes; "" for none."""
    seed: int = 0
    version: int = 0
    """Policy version that the engine reports for the weights that it loads from the model's files."""
    receiver: ReceiverConfig | None = None
    """Settings of the receiver of new weights; None when the weights never change."""
    adapters: AdapterSlots | None = None
    """Room for adapters; None for an engine whose updates have the weights of the whole model."""
    routes: RouteSpec | None = None
    """Shape of the model's routes, which the engine then records and returns; None to record none."""
    schemas: bool = False
    """True if requests can have JSON schemas, which cost a `vllm` engine the time to load the tokenizer."""
    bitwise: bool = False
    """True if log-probs must equal those of the trainer bit for bit, see `run.bitwise`."""
    script: str = ""
    """Import path of the function that generates the responses of a `scripted` engine (see `Script`). Empty: random
    tokens of the tokenizer's vocabulary, drawn with `seed`."""

    @property
    def on_gpu(self) -> bool:
        """True if the engine runs on a GPU."""
        return self.device.startswith("cuda")


MODULES = {
    "hf": f"{__package__}.hf.engine",
    "vllm": f"{__package__}.vllm.engine",
    "scripted": f"{__package__}.scripted",
}
"""Import path of each kind of engine's module: `rollout.engine` -> path. Importing one of these modules takes
seconds."""


def build_engine(config: EngineConfig) -> GenerationEngine:
    """Build the generation engine that `config.rollout.engine` names.

    Raises ValueError with a one-sentence message for an unknown kind, or for a model that cannot be loaded.
    """
    kind = config.rollout.engine
    if kind == "hf":
        return _build_hf(config)
    if kind == "vllm":
        return _build_vllm(config)
    if kind == "scripted":
        return _build_scripted(config)
    raise ValueError(f"rollout.engine: got {kind!r}, expected hf, vllm or scripted")


def _shared(config: EngineConfig) -> dict[str, Any]:
    return {"seed": config.seed, "receiver": config.receiver, "version": config.version, "routes": config.routes}


def _build_hf(config: EngineConfig) -> GenerationEngine:
    # The import stands here so that scripted runs do not wait for transformers' model code.
    from .hf.engine import HfEngine

    return HfEngine(
        config.model.path,
        dtype=DTYPES[engine_dtype(config.model, gpu=config.on_gpu)],
        attention=config.model.attention,
        device=config.device,
        max_batch=engine_batch(config.rollout, gpu=config.on_gpu),
        max_model_len=config.max_model_len,
        adapters=config.adapters,
        quantization=config.rollout.scheme,
        bitwise=config.bitwise,
        **_shared(config),
    )


def _build_vllm(config: EngineConfig) -> GenerationEngine:
    from .vllm.engine import VllmEngine

    rollout = config.rollout
    return VllmEngine(
        config.model.path,
        dtype=DTYPES[engine_dtype(config.model, gpu=config.on_gpu)],
        tp=rollout.tp,
        max_num_seqs=engine_batch(rollout, gpu=config.on_gpu),
        kv_cache_bytes=None if rollout.kv_cache == "auto" else rollout.kv_cache << 20,
        gpu_memory_utilization=memory_share(
            rollout, shared=config.shared_gpu, kept_free=config.kept_free_bytes, gpu_bytes=min(gpu_sizes(), default=0)
        ),
        max_model_len=config.max_model_len,
        adapters=config.adapters,
        **_shared(config),
        logprobs=rollout.logprobs,
        options=rollout.vllm,
        quantization=rollout.scheme,
        kv_cache_dtype=rollout.kv_cache_dtype,
        bitwise=config.bitwise,
        schemas=config.schemas,
        log=config.log,
    )


def _build_scripted(config: EngineConfig) -> GenerationEngine:
    from .scripted import ScriptedEngine, random_tokens

    tokenizer = load_tokenizer(config.model.path)
    script: Callable
    if config.script:
        script = import_object(config.script, "rollout.script")
    else:
        script = random_tokens(len(tokenizer), config.seed, config.scripted.response_tokens)
    return ScriptedEngine(
        script,
        latency_s=config.scripted.latency_s,
        latency_sigma=config.scripted.latency_sigma,
        tokenizer=tokenizer,
        **_shared(config),
    )
