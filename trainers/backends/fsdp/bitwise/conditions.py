"""Checks whether log-probs of trainer and engine can be equal bit for bit with a configuration and a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from .....actors.engines.config import ModelConfig
from .....actors.rollout.config import RolloutConfig
from ....errors import UserError
from ...config import TrainerConfig

FAMILY = "qwen3"
"""Type of the models whose layers are written as engines compute them."""
_PLACE = ("trainer", "engine", "group", "token")
HEAD = 128
"""Width of the heads with which vLLM's attention does not depend on the batch. With 64, FlashAttention 3 computes a
single query in another way than several."""
_OPTIONS = (
    "attention_backend", "attention_config", "compilation_config", "dtype", "enable_dbo", "enforce_eager",
    "kv_cache_dtype", "quantization", "speculative_config",
)  # fmt: skip
"""Arguments of vLLM with which it computes other numbers."""


def bitwise_problems(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    model: ModelConfig,
    *,
    on: bool,
    threads: int | None,
    window: int = 0,
    updates: int = 1,
    foreign: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield one sentence for each key that does not fit `run.bitwise`, whose value is `on`.

    threads: value of `resources.threads`. window: largest number of versions by which a row can be older than the
    policy. updates: number of updates of each step for which log-probs are not computed again first. foreign: keys with
    which the policy of the run does not sample its own rows on engines of its own -> values, empty if they are unset.
    """
    if not on:
        return
    half = trainer.mixed_precision
    wanted: dict[str, tuple[Any, bool, str]] = {
        "rollout.engine": (rollout.engine, rollout.engine in ("hf", "vllm"), "'hf' on CPUs or 'vllm' on GPUs"),
        "rollout.tp": (rollout.tp, rollout.tp == 1, "1"),
        "rollout.quantization": (rollout.quantization, rollout.quantization == "none", "'none'"),
        "rollout.kv_cache_dtype": (rollout.kv_cache_dtype, rollout.kv_cache_dtype == "auto", "'auto'"),
        "trainer.backend": (trainer.backend, trainer.backend == "fsdp", "'fsdp'"),
        "trainer.lora.rank": (trainer.lora.rank, not trainer.lora.rank, "0"),
        "trainer.fp8": (trainer.fp8, trainer.fp8 == "none", "'none'"),
        "trainer.compile": (trainer.compile, not trainer.compile, "false"),
        "trainer.head": (trainer.head, trainer.head != "full", "'auto' or 'selected'"),
        "model.attention": (model.attention, model.attention == "auto", "'auto'"),
        "model.adapter": (model.adapter, model.adapter is None, "none"),
    }
    sizes = {f"trainer.{name}": getattr(trainer, name) for name in ("tp", "cp", "pp", "ep")}
    wanted |= {key: (size, size == 1, "1") for key, size in sizes.items()}
    if rollout.engine == "vllm":
        wanted["trainer.mixed_precision"] = (half, half, "true with rollout.engine='vllm'")
        wanted["trainer.packing"] = (trainer.packing, trainer.packing in ("auto", "packed"), "'auto' or 'packed'")
        wanted["model.dtype"] = (model.dtype, model.dtype != "float32", "'auto' or 'bfloat16'")
    elif rollout.engine == "hf":
        dtype = "bfloat16" if half else "float32"
        same = model.dtype == dtype or (model.dtype == "auto" and not half)
        wanted["model.dtype"] = (model.dtype, same, f"{dtype!r}, as the trainer computes")
        wanted["resources.threads"] = (threads, threads == 1, "1, because threads divide sums at other places")
    wanted |= {f"rollout.vllm.{one}": (rollout.vllm[one], False, "it unset") for one in _OPTIONS if one in rollout.vllm}
    for key, (got, fits, expected) in wanted.items():
        if not fits:
            shown = str(got).lower() if isinstance(got, bool) else repr(got)
            yield f"{key}: got {shown} with run.bitwise=true, expected {expected}"
    yield from _row_problems(rollout, window, updates)
    for key, value in foreign.items():
        if value:
            shown = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
            yield f"{key}: got {shown} with run.bitwise=true, expected none"


def _row_problems(rollout: RolloutConfig, window: int, updates: int) -> Iterator[str]:
    """Yield one sentence for each reason why the log-probs of rows need not be those of the policy. The arguments are
    those of `bitwise_problems`."""
    if rollout.endpoint.own_sampling:
        yield "rollout.endpoint.sampling: got 'request' with run.bitwise=true, expected 'run'"
    elif rollout.masked or rollout.cuts:
        cuts = f"{rollout.top_p:g}, rollout.top_k={rollout.top_k}, rollout.min_p={rollout.min_p:g}"
        yield f"rollout.top_p: got {cuts} with run.bitwise=true, expected sampling from all tokens"
    if window:
        yield (
            "algorithm.mode: got one that trains on rows of older policies with run.bitwise=true, expected 'sync', or "
            "'streaming' with algorithm.max_staleness=0"
        )
    if updates > 1:
        yield (
            f"algorithm.prev_logprobs: got 'rollout' with run.bitwise=true and {updates} updates per step, expected "
            "'recompute', because only the first update has the log-probs of the engine"
        )


def check_device(engine: str, *, gpu: bool) -> None:
    """Raise ValueError if log-probs cannot equal those of this kind of engine on CPUs, or with `gpu` on GPUs."""
    expected, where = ("vllm", "GPUs") if gpu else ("hf", "CPUs")
    if engine != expected:
        raise ValueError(f"rollout.engine: got {engine!r} with run.bitwise=true, expected {expected!r} on {where}")


def check_family(model: Any, engine: str) -> None:
    """Raise ValueError if the layers of a model cannot compute as those of an engine.

    engine: value of `rollout.engine`. model: the model's config, or an object with the content of its config.json;
    empty if it is not known.
    """
    kind = getattr(model, "model_type", None)
    if kind not in (None, FAMILY):
        raise ValueError(f"run.bitwise: got true with a model of type {kind!r}, expected a model of type {FAMILY!r}")
    # Files that transformers 4 wrote name the positions otherwise.
    rotary = getattr(model, "rope_parameters", None) or getattr(model, "rope_scaling", None) or {}
    scaling = rotary.get("rope_type", rotary.get("type", "default"))
    if scaling != "default":
        raise ValueError(f"run.bitwise: got true with a model whose rope_type is {scaling!r}, expected 'default'")
    for name in ("attention_bias", "use_sliding_window"):
        if getattr(model, name, False):
            raise ValueError(f"run.bitwise: got true with a model whose {name} is true, expected false")
    width = getattr(model, "head_dim", HEAD)
    if engine == "vllm" and width != HEAD:
        raise ValueError(
            f"run.bitwise: got true with rollout.engine='vllm' and a model whose head_dim is {width}, expected {HEAD}, "
            "because vLLM's attention depends on the batch with others"
        )


def expect_equal(step: int, metrics: Mapping[str, float]) -> None:
    """Raise UserError if a log-prob of a step differs from the engine's. metrics: those of the step."""
    largest, mean = (metrics.get(f"logprob/mismatch_{name}", 0.0) for name in ("max", "mean"))
    if largest == 0.0 == mean:  # A NaN is not 0, and the largest of several ranks can leave it out.
        return
    ours, theirs, group, token = (metrics.get(f"logprob/unequal_{name}", math.nan) for name in _PLACE)
    raise UserError(
        f"logprob/mismatch_max: got {largest:g} in step {step} with run.bitwise=true, expected 0: the train workers "
        f"give trained token {token:.0f} of a row of group {group:.0f} the log-prob {ours:.9g}, the engine {theirs:.9g}"
    )
