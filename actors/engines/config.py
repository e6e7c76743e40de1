"""The sections `model`, `rollout` and `scripted` of the configuration: the model, and how engines generate with it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ...dataplane.section import Count, CountOrZero, NonNegative, Positive, Section

BUILTIN_MODELS = ("builtin:tiny-qwen3",)


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = BUILTIN_MODELS[0]
    """Hugging Face model folder, hub id, or `builtin:tiny-qwen3`: a 2-layer character model made on the spot."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the engines' weights. The trainer keeps float32 (`trainer.mixed_precision` computes in
    bfloat16)."""

    @property
    def builtin(self) -> bool:
        return self.path.startswith("builtin:")

    @field_validator("path")
    @classmethod
    def _known_builtin(cls, path: str) -> str:
        if path.startswith("builtin:") and path not in BUILTIN_MODELS:
            raise ValueError(f"got {path!r}, expected {' or '.join(map(repr, BUILTIN_MODELS))}, a folder or a hub id")
        return path


class RolloutConfig(Section):
    """Generation: the engines, what the policy acts in, and how its tokens are drawn."""

    engine: Literal["hf", "vllm", "scripted"] = "hf"
    """Kind of the engines. `hf`: transformers generate; `vllm`: vLLM (`make vllm`, or the extra `vllm` on GPUs);
    `scripted`: fixed answers without a model, for dry runs of the machinery."""
    num_engines: Count = 1
    """Number of engines; each holds a whole model."""
    tp: Count = 1
    """Number of processes that split each engine's layers."""
    num_actors: Count | None = None
    """Number of rollout actors (environments and rewards), which share all engines through a router: an engine that
    dies is left out and its requests go to others. Unset: as many as engines, each with its engine embedded."""
    kv_cache_mib: Count = 256
    """MiB of the key-value cache, of each process of an engine."""
    environment: Literal["single_turn", "tool_use"] = "single_turn"
    """Environment that the policy acts in. `single_turn`: a prompt, an answer; `tool_use`: the policy may call tools
    (`<tool>name: arguments</tool>`) and goes on with their results, whose tokens are not trained on."""
    tools: tuple[str, ...] = ("calculator",)
    """Tools of `tool_use`: `calculator`, or your own functions from text to text as `package.module:function`."""
    max_turns: Count = 4
    """Number of times that the policy speaks in an episode of `tool_use`, at most."""
    max_new_tokens: Count = 256
    """Number of tokens that a sample has at most; with `tool_use`, an episode behind its prompt, tools' results
    included."""
    temperature: Positive = 1.0
    """Sampling temperature of training rollouts. Validation is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass that tokens are drawn from; 1: all tokens."""
    top_k: CountOrZero = 0
    """Number of likeliest tokens that one is drawn from; 0: all tokens."""
    max_batch: Count = 256
    """Number of rows that an engine generates at a time."""


class ScriptedConfig(Section):
    """Speeds of the engine and train backend `scripted`, which have no model; for `headrace bench step` and tests."""

    latency_s: NonNegative = 0.0
    """Median seconds of a request, which generates one group."""
    latency_sigma: NonNegative = 0.0
    """Sigma of the log-normal that latencies are drawn from, seeded by request; 0: all alike."""
    train_row_s: NonNegative = 0.0
    """Seconds that a replica takes for forward and backward of a row."""
    train_step_s: NonNegative = 0.0
    """Seconds of an optimizer step."""
