"""Config sections `model`, `router_replay` and `scripted`, and the keys of section `rollout` for engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ...dataplane.config import Count, CountOrZero, NonNegative, PathText, Section, Share

BUILTIN_MODELS = ("builtin:tiny-qwen3", "builtin:tiny-qwen3-moe")
GPU_SHARE, SHARED_GPU_SHARE = 0.9, 0.45
"""Largest share of each GPU's memory that an engine takes by default: first on GPUs that it has to itself, then on GPUs
that train workers use at the same time."""
MOST_OF_A_GPU, SMALLEST_SHARE = 0.95, 0.1
"""Largest share of a GPU's memory that all processes on a pool's GPU take together, and smallest share that is enough
for an engine."""
GPU_BATCH, CPU_BATCH = 512, 256
"""Largest number of samples that an engine generates at the same time by default, first for vLLM on GPUs, then for all
other engines."""


LogprobWay = Literal["auto", "arrays", "vllm"]
Attention = Literal["auto", "sdpa", "eager", "flex", "flash"]


class ModelConfig(Section):
    """The model that is trained."""

    path: PathText = BUILTIN_MODELS[0]
    """Path of a Hugging Face model folder, id of a model on the Hugging Face hub, or a character-level model with 2
    layers that the run creates itself: `builtin:tiny-qwen3`, or `builtin:tiny-qwen3-moe` with 8 experts in each
    layer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights in the engines. `auto` is `bfloat16` on GPUs and `float32` on CPUs. The trainer
    always keeps its weights in float32; `trainer.mixed_precision` makes it compute in bfloat16."""

    attention: Attention = "auto"
    """Kind of attention that transformers uses, in the trainer and in engines of the kind `hf`. `auto` is what
    transformers chooses for the model: torch's `scaled_dot_product_attention` where the model supports it, else its
    own eager code. `sdpa`, `eager`, `flex` (torch's flex attention) and `flash` (the package flash-attn) ask for one
    kind; a model that does not support it is refused. On a GPU, packed rows in bfloat16 use torch's variable-length
    flash attention with `auto`."""

    adapter: PathText | None = None
    """Folder of a LoRA adapter in PEFT's format with which the policy starts. Its rank, alpha and target modules must
    be those of `trainer.lora`. Unset: the policy starts as the model itself."""

    renderer: str = "template"
    """Chat format with which an environment speaks to the model in messages. `template` is the chat template of the
    model's tokenizer; it must only append text as a conversation continues. All other names are names of renderers in
    the package `renderers`, such as `qwen3`, which can also read tool calls. `auto` picks the renderer by the model's
    hub id."""
    renderer_options: dict[str, Any] = {}
    """Options of the renderer, such as `{enable_thinking: false}` for `qwen3`."""

    @property
    def builtin(self) -> bool:
        return self.path.startswith("builtin:")

    @field_validator("path")
    @classmethod
    def _known_builtin(cls, path: str) -> str:
        if path.startswith("builtin:") and path not in BUILTIN_MODELS:
            raise ValueError(f"got {path!r}, expected {' or '.join(map(repr, BUILTIN_MODELS))}, a folder or a hub id")
        return path


class EngineKeys(Section):
    """Keys of section `rollout` for the engines: their kind, number and resources."""

    engine: Literal["hf", "vllm", "scripted"] = "hf"
    """Kind of the engines. `hf` generates with transformers. `vllm` generates with vLLM, which `make vllm` installs on
    a CPU and the extra `vllm` on GPUs. `scripted` makes up answers without a model, for trying out everything around
    the engine."""
    num_engines: CountOrZero = 1
    """Number of engines, each with a complete copy of the model. A supervised run has none, and only that can be 0."""
    tp: Count = 1
    """Tensor-parallel size of each engine: the number of processes over which it splits its layers."""
    num_actors: Count | None = None
    """Number of rollout actors, which run environments and rewards and share all engines through a router. When an
    engine dies, the router sends its requests to the other engines. Unset: there are as many rollout actors as engines,
    and each of them contains one engine."""
    routing: Literal["prefix", "least_loaded"] = "prefix"
    """How the router chooses an engine. `prefix`: a request goes to an engine that has computed the beginning of its
    prompt, unless others have much less to do. `least_loaded`: it goes to the engine with the fewest samples in flight.
    With both, the turns of an episode stay with one engine; `prefix` moves them when that engine is overloaded."""
    max_model_len: Count | None = None
    """Largest number of tokens of a prompt and its answer together that an engine takes. The size of its key-value
    cache depends on it. Unset: the longest prompt and answer together that training, validation and evaluations can
    have."""
    kv_cache: Literal["auto"] | Count = "auto"
    """Size in MiB of the key-value cache in each process of an engine. With `auto`, an engine on GPUs takes a quarter
    more than `rollout.max_batch` samples of `rollout.max_model_len` tokens need, at most what
    `rollout.gpu_memory_utilization` leaves beside the weights, and exactly that if the need of the model's layers is
    not known. An engine on CPUs takes 256 MiB, or more if a few samples need more."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Number format of the key-value cache of vLLM. `auto` is that of the engine's computations. `fp8` takes half of
    the memory of bfloat16, so that twice as many tokens fit; the engine then computes other log-probs."""
    quantization: Literal["none", "fp8", "fp8_block", "int8"] = "none"
    """Kind of the 8-bit weights of the engines' linear layers and experts. The trainer quantizes its weights once for
    each version, and sends the 8-bit values. `fp8` and `int8` have a scale for each row of a weight, `fp8_block` has
    one for each block of 128 x 128. vLLM quantizes activations, too, with a scale for each token, or for each 128
    numbers of a token with `fp8_block`. fp8 needs GPUs that compute in it. Engines `hf` compute with the rounded
    weights in `model.dtype`, which shows the effect on training but saves nothing. `none` keeps the weights in
    `model.dtype`."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of each GPU's memory that an engine takes for weights, key-value cache and computation. It takes
    less if less is free when it starts. Unset: 0.9, or 0.45 on GPUs that it shares with train workers; on the GPUs of a
    pool what `pool.other_runs` leaves, at most 0.9."""
    vllm: dict[str, Any] = {}
    """Further arguments of vLLM's engine (`AsyncEngineArgs`) by their names in vLLM, such as `{quantization: fp8}` or
    `{max_num_batched_tokens: 8192}`. Arguments for which Headrace has a key of its own are refused."""
    logprobs: LogprobWay = "auto"
    """Way in which the log-probs of sampled tokens leave vLLM. With `arrays` the process that samples keeps them and
    returns one array per sample. With `vllm` they come token by token with vLLM's own answers, which takes 1.4 times as
    long. The values are the same. `auto` is `arrays`, or `vllm` if the installed vLLM or `rollout.vllm` does not allow
    `arrays`; the log then says so."""
    max_adapters: Count = 1
    """Largest number of adapters (`trainer.lora`) that an engine serves at the same time. It holds two versions of
    each: the newest, and the one with which running requests finish."""
    max_batch: Count | None = None
    """Largest number of samples that an engine generates at the same time. Unset: 512 with vLLM on GPUs, else 256."""

    @property
    def scheme(self) -> Literal["fp8", "fp8_block", "int8"] | None:
        """Kind of the 8-bit weights; None for none."""
        return None if self.quantization == "none" else self.quantization

    @field_validator("kv_cache", mode="before")
    @classmethod
    def _is_auto_or_a_size(cls, size: Any) -> Any:
        # Pydantic's error for a union would name the key twice, once for each type of the union.
        if size != "auto" and (not isinstance(size, int) or size < 1):
            raise ValueError(f"got {size!r}, expected auto or a whole number >= 1, the size in MiB")
        return size


def precision_problems(rollout: EngineKeys, transport: str, tp: int) -> Iterator[str]:
    """Yield one sentence for each key that does not fit `rollout.quantization`. transport: value of
    `sync.transport`. tp: value of `trainer.tp`."""
    scheme, own = rollout.quantization, ("quantization", "load_format", "model_loader_extra_config")
    setters = {"kv_cache_dtype": "kv_cache_dtype"} if rollout.kv_cache_dtype != "auto" else {}
    setters |= {} if scheme == "none" else dict.fromkeys(own, "quantization")
    for name, key in setters.items():
        if name in rollout.vllm:
            yield (
                f"rollout.vllm.{name}: got {rollout.vllm[name]!r} with rollout.{key}={getattr(rollout, key)!r}, "
                f"expected it unset, because rollout.{key} sets it"
            )
    if scheme == "none":
        return
    if transport == "pairs" and (tp > 1 or scheme == "fp8_block"):
        which = "fp8_block" if scheme == "fp8_block" else f"{scheme} with trainer.tp={tp}"
        yield (
            f"sync.transport: got 'pairs' with rollout.quantization={which}, expected another one, because a rank may "
            "have only parts of what shares a scale"
        )


def precision_lines(rollout: EngineKeys, correction: str, training: str) -> list[str]:
    """Return a line about engines or trainers that compute with few bits, in a list; [] for others.

    correction, training: values of `loss.correction` and `trainer.fp8`."""
    keys = [f"rollout.quantization={rollout.quantization}"] if rollout.scheme else []
    keys += [f"rollout.kv_cache_dtype={rollout.kv_cache_dtype}"] if rollout.kv_cache_dtype != "auto" else []
    keys += [f"trainer.fp8={training}"] if training != "none" else []
    if not keys:
        return []
    found = f"with {' and '.join(keys)} engines give tokens other probabilities than the trainer"
    if correction == "none":
        return [f"{found}, which loss.correction=none does not correct; loss.correction=tis does"]
    return [f"{found}, which loss.correction={correction} corrects (algorithm.prev_logprobs=recompute)"]


def engine_dtype(model: ModelConfig, *, gpu: bool) -> Literal["float32", "bfloat16"]:
    """Return the number format of the weights in engines on GPUs (`gpu`) or on CPUs."""
    if model.dtype == "auto":
        return "bfloat16" if gpu else "float32"
    return model.dtype


def engine_batch(rollout: EngineKeys, *, gpu: bool) -> int:
    """Return the largest number of samples that an engine on GPUs (`gpu`) or on CPUs generates at the same time."""
    return rollout.max_batch or (GPU_BATCH if gpu and rollout.engine == "vllm" else CPU_BATCH)


def memory_share(rollout: EngineKeys, *, shared: bool, kept_free: int = 0, gpu_bytes: int = 0) -> float:
    """Return the largest share of each GPU's memory that an engine takes, a number in (0, 1].

    shared: whether train workers use the same GPUs at the same time. kept_free: number of bytes that the engine leaves
    for sleeping processes on a GPU of `gpu_bytes` bytes. If `gpu_bytes` is 0, the size is unknown and no memory is left
    for them. A configured `gpu_memory_utilization` is returned unchanged. Raises ValueError if too little is left for
    an engine.
    """
    if rollout.gpu_memory_utilization is not None:
        return rollout.gpu_memory_utilization
    share = SHARED_GPU_SHARE if shared else GPU_SHARE
    if not kept_free or not gpu_bytes:
        return share
    left = MOST_OF_A_GPU - kept_free / gpu_bytes
    if left < SMALLEST_SHARE:
        raise ValueError(
            f"pool.other_runs: got processes that may keep {kept_free >> 20} MiB asleep on a GPU of {gpu_bytes >> 20} "
            f"MiB, expected less than {MOST_OF_A_GPU - SMALLEST_SHARE:.0%} of it; a smaller pool.other_runs or "
            "resources.residual_mib leaves more for an engine, and rollout.gpu_memory_utilization sets its share"
        )
    return min(share, left)


class RouterReplayConfig(Section):
    """Training of a mixture-of-experts policy on the experts that generated its rows. Engines record the experts that
    their routers choose, and the train workers' routers use the same experts."""

    enabled: bool = False
    """Whether engines record the experts of each token, rows carry them as the column `routed_experts`, and the train
    workers' forward and backward passes use them. Log-probs of the reference model are computed with its own
    experts."""
    missing: Literal["native", "mask", "error"] = "native"
    """Treatment of tokens for which an engine reported no experts. `native`: the train workers' routers choose the
    experts of these tokens themselves. `mask`: rows in which more than `router_replay.max_missing_share` of the tokens
    lack experts are not trained on and count as failed. `error`: the run ends."""
    max_missing_share: Share = 0.01
    """Largest share of a step's tokens that can lack experts, whatever `router_replay.missing` says. The run ends if
    the share is larger. With `missing=mask`, this is also the largest share of a row's tokens."""
    verify: Literal["off", "values", "forward"] = "off"
    """Checks of the experts that train workers replay. `values` checks before each microbatch that the ids are
    possible. `forward` also checks, during the first `router_replay.verify_steps` steps, that each layer sends its
    tokens to the experts that the rows name; a difference ends the run."""
    verify_steps: Count = 1
    """Number of steps in which `verify=forward` compares experts. They are counted from the start of the run, or from
    the point at which it is resumed."""
    native_agreement_every: CountOrZero = 20
    """Number of steps between measurements of `routes/native_agreement`; 0 turns them off. The metric is the share of
    choices in which the train workers' own routers agree with the engine's."""


class ScriptedConfig(Section):
    """Simulated durations for the `scripted` engine and the `scripted` train backend, which have no model. `headrace
    bench step` and tests use them."""

    response_tokens: Count = 8
    """Median number of tokens of the engine's responses, which are random."""
    latency_s: NonNegative = 0.0
    """Median time in seconds that the engine takes for a request. One request generates all samples of a prompt."""
    latency_sigma: NonNegative = 0.0
    """Sigma of the log-normal distribution of request latencies. Each request has its own seed. 0 gives all requests
    the same latency."""
    train_row_s: NonNegative = 0.0
    """Seconds that a data-parallel replica takes for the forward and backward pass of one row."""
    train_step_s: NonNegative = 0.0
    """Seconds that an optimizer step takes."""
