"""Estimates the GPU memory of an engine and a train worker, part by part, and decides whether both fit on a GPU.

The estimates use only the configuration and the model's config.json, so they can be shown before anything starts. They
were between 0.94 and 1.25 times the measured peaks (`tests/bench/train_steps/test_memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.engines.config import EngineKeys, ModelConfig, engine_batch, engine_dtype, memory_share
from ...actors.engines.vllm.options import most_on_gpu, token_bytes
from ...actors.process.memory import assumed_machine, gpu_sizes
from ...actors.rollout.config import RolloutConfig
from ...codecs.integers import ceil_div
from ..backends.config import MOMENT_BYTES, TrainerConfig
from ..backends.lora_config import ROUNDED_BYTES
from ..backends.vision.tower_costs import most_patches, patch_budget, tower_shape
from ..backends.vocab.logprobs import GPU_LOGIT_ELEMENTS
from ..base_model.prepare import model_config
from ..config.config import Config, ResourcesConfig
from ..config.gpu_checks import switch_obstacles
from ..errors import UserError
from ..losses.distillation_config import DistillationConfig
from .engine_specs import neighbour_bytes
from .places.placement import Placement
from .transport_choice import resolve_kind, send_buffer_bytes

CONTEXT_BYTES = 1 << 30
"""Bytes of GPU memory that a process needs for its CUDA context, libraries and fragmentation."""
ENGINE_WORKSPACE_BYTES = 3 << 30
"""Bytes of GPU memory that a vLLM process needs for activations and CUDA graphs."""
_OF_OTHER_KINDS = {
    "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "kv_lora_rank", "layers_block_type",
    "linear_num_value_heads", "mamba_d_state", "mamba_num_heads", "conv_L_cache",
}  # fmt: skip
"""Keys of a config.json that models have whose layers are not those of Llama."""
ADAPTER_WIDTH = 1024
"""Width for which the size of an adapter of all linear layers is estimated, as `2 * rank / width` of the model's
parameters. Most layers are wider, so that the estimate is too large rather than too small."""
TABLES = 0.15
"""Share of a model's parameters in its tables of tokens (embeddings and output layer), which are never rounded, for the
estimate of an adapter's rounded base. It is a tenth in models of 4 billion parameters, and more in smaller ones."""
USABLE = 0.95
"""Share of a GPU's memory that the estimates may fill."""
CACHED_VERSIONS = 2
"""Number of versions of the weights that `sync.cache` keeps in host memory."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The number of parameters and the sizes from which the memory of a model is estimated."""

    parameters: int
    """Number of parameters, with all experts."""
    shape: Mapping[str, Any]
    """Sizes by their names in a config.json: `hidden_size`, `num_hidden_layers`, `num_attention_heads`,
    `num_key_value_heads`, `head_dim`, `vocab_size`, and `intermediate_size`, the width of all MLPs and experts that
    compute one token in a layer."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Estimated GPU memory of one train worker and one engine process that share a GPU, in bytes."""

    trainer: Mapping[str, int]
    """Name of a part -> its bytes: `weights`, `gradients`, `optimizer`, `reference`, `teachers`, `activations`,
    `pictures`, `computation`, `copied weights`."""
    engine: Mapping[str, int]
    """Name of a part -> its bytes if both sides keep their memory: `weights`, `keys and values`, `workspace`."""
    engine_in_turns: Mapping[str, int]
    """Name of a part -> its bytes, for an engine that has the GPU to itself. The parts are the same."""
    buckets: int
    """Bytes of the trainer's send buffers for weights. The trainer never frees them."""
    contexts: int
    """Bytes of both processes that neither can free, such as CUDA contexts."""
    host: Mapping[str, int]
    """Host memory that a train worker needs in addition when the roles take turns, as name of a part -> its bytes. The
    parts are `offloaded state` and `cached versions`."""

    @property
    def resident(self) -> int:
        """Bytes at the peak if both sides keep their memory."""
        return sum(self.trainer.values()) + sum(self.engine.values()) + self.buckets + self.contexts

    @property
    def taking_turns(self) -> int:
        """Bytes at the peak if the sides take turns. The peak occurs in training, in generation, or during a weight
        sync, when the trainer's state and the engine's weights are both on the GPU."""
        state = sum(
            self.trainer.get(part, 0) for part in ("weights", "gradients", "optimizer", "reference", "teachers")
        )
        hand_over = state + self.engine.get("weights", 0)
        largest = max(sum(self.trainer.values()), sum(self.engine_in_turns.values()), hand_over)
        return largest + self.buckets + self.contexts


@dataclass(frozen=True, slots=True)
class RolesDecision:
    """Whether engines and train workers take turns in the memory of their GPUs, and why."""

    take_turns: bool
    why: str
    """The reason, as a sentence for the user; "" if there was nothing to decide."""

    def applied_to(self, resources: ResourcesConfig) -> ResourcesConfig:
        """Return `resources` with the decided value of `switch_roles`: `always` or `never`."""
        chosen = "always" if self.take_turns else "never"
        return resources.model_copy(update={"switch_roles": chosen})


def smallest_gpu() -> int | None:
    """Return the memory of this machine's smallest GPU in bytes; None on a machine without GPUs."""
    return min(gpu_sizes(), default=None)


def decide_roles(config: Config, placement: Placement, gpu_bytes: int | None) -> RolesDecision:
    """Decide whether the roles of this run take turns, as `resources.switch_roles` asks. gpu_bytes: memory of the
    smallest GPU; None if it is not known.

    On a machine without GPUs, only `always` makes the roles take turns, in host memory.
    """
    if config.pool.address is not None:
        return RolesDecision(False, "the run shares the GPUs of a pool with other runs")
    asked = config.resources.switch_roles
    shared = placement.shared or (placement.layout == "cpu" and asked == "always")
    if asked == "never" or (asked == "auto" and not shared):
        return RolesDecision(False, "")
    if not shared:
        return RolesDecision(False, "resources.switch_roles=always has no effect: no GPU holds an engine and a trainer")
    if asked == "always":
        return RolesDecision(True, "engines and train workers take turns in memory (resources.switch_roles=always)")
    both = "engines and train workers share GPUs"
    obstacles = [
        *switch_obstacles(
            config.algorithm.mode,
            config.sync,
            config.validation,
            config.evaluation,
            config.run.replay,
            config.distillation.in_engines,
        )
    ]
    memory = estimate(config, gpu_bytes)
    if memory is None or gpu_bytes is None:
        unknown = "the size of the model" if memory is None else "the memory of the GPUs"
        if obstacles:
            return RolesDecision(False, f"{both} and both stay in memory: got {obstacles[0]}")
        return RolesDecision(True, f"{both} and take turns in memory, because {unknown} is not known before the start")
    need = f"together they need about {_gib(memory.resident)} of {_gib(gpu_bytes)} GiB on a GPU"
    if memory.resident <= USABLE * gpu_bytes:
        return RolesDecision(False, f"{both} and both stay in memory, because {need}")
    if obstacles:
        return RolesDecision(False, f"{both} and both stay in memory although {need}: got {obstacles[0]}")
    return RolesDecision(
        True, f"{both} and take turns in memory, because {need}, and {_gib(memory.taking_turns)} GiB in turns"
    )


def estimate(config: Config, gpu_bytes: int | None = None, size: ModelSize | None = None) -> GpuMemory | None:
    """Return the estimated GPU memory of a run with one engine process and one train worker on a GPU. The GPU has
    `gpu_bytes` bytes (None: not known). size: size of the model; None to compute it from the model's config. Returns
    None if it is not known, because the config.json is not on this machine or the model is not a dense Llama-like
    model."""
    trainer, sync, pooled = config.trainer, config.sync, config.pool.address is not None
    size = size or model_size(config.model)
    if size is None:
        return None
    params = size.parameters
    held = dict[str, int]()
    if trainer.backend != "scripted":
        held = trained_parts(trainer, params, with_reference=config.with_reference)
        held |= {"teachers": of_teachers} if (of_teachers := teacher_bytes(trainer, config.distillation)) else {}
    kept_free = neighbour_bytes(config.pool, config.rollout, sync, config.residual_mib)
    half = trainer.mixed_precision or value_bytes(config.model) == 2
    versions = CACHED_VERSIONS * params * (2 if half else 4) if sync.cache else 0
    engine, in_turns = (
        engine_parts(
            config.rollout, config.model, size, gpu_bytes, config.engine_length, shared=shared, kept_free=kept_free
        )
        for shared in (not pooled, False)
    )
    passes = pass_parts(trainer, size.shape, params) if held else {}
    if held and config.data.images.enabled:
        group, longest = config.algorithm.group_size, config.data.max_prompt_tokens
        passes |= picture_parts(trainer, size.shape, group, longest)
    return GpuMemory(
        trainer={**held, **passes},
        engine=engine,
        engine_in_turns=in_turns,
        buckets=send_buffer_bytes(sync, resolve_kind(sync.transport, one_host=True, shared_gpus=True), pooled=pooled),
        contexts=2 * CONTEXT_BYTES,
        host={"offloaded state": sum(held.values()), "cached versions": versions},
    )


def engine_parts(
    rollout: RolloutConfig,
    model: ModelConfig,
    size: ModelSize,
    gpu_bytes: int | None,
    length: int,
    *,
    shared: bool,
    kept_free: int,
) -> dict[str, int]:
    """Return the memory of one engine process on a GPU of `gpu_bytes` bytes: name of a part -> bytes. length: largest
    number of tokens of a sequence. shared, kept_free: as in `memory_share`.

    With `rollout.kv_cache=auto` the keys and values take what a full batch can use, at most what the engine's share of
    the GPU leaves. If neither is known, their part is 0.
    """
    if rollout.engine == "scripted":
        return {}
    weights = int(engine_bytes(rollout, model, size.parameters))
    if rollout.engine != "vllm":
        return {"weights": weights}
    if rollout.kv_cache != "auto":
        cache = rollout.kv_cache << 20
    else:
        try:
            share = memory_share(rollout, shared=shared, kept_free=kept_free, gpu_bytes=gpu_bytes or 0)
        except ValueError as error:
            raise UserError(str(error)) from error
        per_token = token_bytes(size.shape, value_bytes=cached_bytes(rollout, model), tp=rollout.tp)
        most = most_on_gpu(per_token, length, engine_batch(rollout, gpu=True), rollout.vllm)
        left = None if gpu_bytes is None else max(0, int(share * gpu_bytes) - weights - ENGINE_WORKSPACE_BYTES)
        cache = min((known for known in (most, left) if known is not None), default=0)
    return {"weights": weights, "keys and values": cache, "workspace": ENGINE_WORKSPACE_BYTES}


def pass_parts(trainer: TrainerConfig, model: Mapping[str, Any], params: int) -> dict[str, int]:
    """Return the memory that one microbatch of the largest size adds to a train worker: name of a part -> bytes.

    `activations` are the values that layers keep for each token, see `_kept_bytes`. `computation` is the larger of two
    that come one after the other, the logits with the gradient of the output layer, and the backward pass of a layer,
    with the values that it computes again; the gradient of a tied output layer waits for that of the embedding.
    `copied weights` are in bfloat16, or gathered from other ranks.
    """
    size = 2 if trainer.mixed_precision else 4
    layers, width = model["num_hidden_layers"], model["intermediate_size"]
    tokens = ceil_div(trainer.tokens_per_microbatch, trainer.cp)
    layer = _kept_bytes(trainer, model, size)
    again = min(trainer.recompute_layers or layers, layers) if trainer.recompute == "full" else 0
    kept = again * model["hidden_size"] * size + (layers - again) * layer
    backward = size * (2 * model["hidden_size"] + 3 * width // trainer.tp) + layer * (again > 0)
    logits = tokens * model["vocab_size"] // trainer.tp
    if trainer.head != "full":
        logits = min(logits, GPU_LOGIT_ELEMENTS)
    table = model["vocab_size"] * model["hidden_size"] // trainer.tp
    tied, trained = bool(model.get("tie_word_embeddings")), not trainer.lora.rank
    of_head = (4 + size) * table * trained  # The chunks' gradients are summed in float32.
    # The logits and the log-probs are float32, and each has a gradient.
    computation = max(4 * 4 * logits + of_head, tokens * backward) + size * table * (tied and trained)
    parts = {"activations": tokens * kept, "computation": computation}
    copied = 2 * trained * params // (trainer.tp * (trainer.pp if trainer.backend != "fsdp" else 1))
    if trainer.backend == "fsdp" and trainer.topology.world > 1:
        copied = params * size // trainer.tp
        if trainer.reshard_after_forward:  # Two layers at a time, and the tables of tokens all the time.
            tables = size * table * (1 if tied else 2)
            copied = 2 * (copied - tables) // layers + tables
    elif not trainer.mixed_precision:
        copied = 0
    return {**parts, "copied weights": copied} if copied else parts


def picture_parts(trainer: TrainerConfig, model: Mapping[str, Any], group_size: int, longest: int) -> dict[str, int]:
    """Return what the pictures of a microbatch add to a train worker, as a part `pictures`; {} without a tower.

    The layers of a vision tower keep for each patch what those of a language model keep for a token. longest: largest
    number of tokens of a prompt.
    """
    if (tower := tower_shape(model)) is None:
        return {}
    tokens, budget = trainer.tokens_per_microbatch, patch_budget(trainer.patches_per_microbatch, model)
    size, width, layers = 2 if trainer.mixed_precision else 4, tower["hidden_size"], tower["num_hidden_layers"]
    layer = _kept_bytes(trainer, tower, size)
    kept = layers * width * size + layer if trainer.recompute == "full" else layers * layer
    patches = most_patches(budget, tokens, group_size, min(longest, tokens))
    return {"pictures": patches * (kept + size * (2 * width + 3 * tower["intermediate_size"]))}


def estimated_peak(trainer: TrainerConfig, size: ModelSize) -> int:
    """Return the estimated peak of GPU memory of one train worker without a reference model, in bytes."""
    held = trained_parts(trainer, size.parameters, with_reference=False)
    return sum(held.values()) + sum(pass_parts(trainer, size.shape, size.parameters).values())


def _kept_bytes(trainer: TrainerConfig, model: Mapping[str, Any], size: int) -> int:
    """Return the bytes that a layer keeps of one token for the backward pass. size: bytes of a number.

    Layer by layer, code of transformers keeps the float32 values and two results of each norm, also of the norms of
    queries and keys that many models have, one copy of keys and values for each head of the queries, the output of the
    attention, and four values of the MLP's width. Compiled code keeps only the inputs of matrix products and of the
    attention: those of the norms, the queries and keys before their norms and after their rotation, and three values
    of the MLP's width.
    """
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head_dim = model.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (model.get("num_key_value_heads") or heads) * head_dim
    width, tp = model["intermediate_size"], trainer.tp
    if trainer.compile:
        return size * (4 * hidden + (5 * queries + keys + 3 * width) // tp)
    norms = (4 + 2 * size) * (2 * hidden + (queries + keys) // tp)
    return norms + size * (3 * queries + 4 * width) // tp


# ---------------- Other checks use these sizes, too.


def trained_parts(trainer: TrainerConfig, params: int, *, with_reference: bool) -> dict[str, int]:
    """Return the memory of one train worker between two passes: name of a part -> bytes. All parts are in float32,
    except that a reference model and the base of an adapter are in bfloat16 with mixed precision, rounded weights of
    such a base take a byte or less, and moments what `trainer.optimizer` says. The result accounts for the sharding
    over ranks.
    """
    topology = trainer.topology
    sharded = topology.world if trainer.backend == "fsdp" else topology.tp * topology.pp
    if trainer.lora.rank:  # The base is the reference, too.
        matrices = params * 2 * trainer.lora.rank // ADAPTER_WIDTH * 4 // sharded
        frozen = params * (2 if trainer.mixed_precision else 4) // sharded
        if trainer.lora.base != "model":  # No rank shards rounded weights.
            whole = (1 - TABLES) * params * ROUNDED_BYTES[trainer.lora.base]
            frozen = int(TABLES * frozen + whole)
        return {"weights": frozen + matrices, "gradients": matrices, "optimizer": _moments(trainer, matrices // 4)}
    each = params * 4 // sharded
    moments = _moments(trainer, params // sharded)
    if trainer.backend != "fsdp" and trainer.distributed_optimizer:
        moments = 2 * params * 4 // (sharded * topology.dp * topology.cp)
    parts = {"weights": each, "gradients": each, "optimizer": moments}
    if with_reference:
        parts["reference"] = params * (2 if trainer.mixed_precision else 4) // sharded
    return parts


def _moments(trainer: TrainerConfig, weights: int) -> int:
    """Return the bytes of an optimizer's state on the GPU for `weights` trained weights in float32. Those that
    `trainer.freeze` leaves out are counted, too, because their names are not known here."""
    if trainer.offload_optimizer:
        return 0
    return int(weights * MOMENT_BYTES[trainer.optimizer])


def trained_bytes(trainer: TrainerConfig, params: int, *, with_reference: bool) -> int:
    """Return the bytes of one train worker's weights, gradients and Adam moments. A reference model counts, too."""
    return sum(trained_parts(trainer, params, with_reference=with_reference).values())


def teacher_bytes(trainer: TrainerConfig, distillation: DistillationConfig) -> int:
    """Return the bytes of the weights of all teachers in one train worker. Teachers whose size is not known count as
    0."""
    size = 2 if trainer.mixed_precision else 4
    inside = [one.model for one in distillation.teachers if one.where == "train"]
    return sum((parameters(ModelConfig(path=path)) or 0) * size // trainer.topology.world for path in inside)


def engine_bytes(rollout: RolloutConfig, model: ModelConfig, params: int) -> float:
    """Return the number of bytes that the weights take in one engine process."""
    size: float = value_bytes(model)
    if rollout.engine == "vllm" and rollout.scheme is not None:  # Only the tables stay as they are.
        size = TABLES * size + 1 - TABLES
    return params * size / rollout.tp


def value_bytes(model: ModelConfig) -> int:
    """Return the number of bytes per weight in the engines on this machine."""
    return {"float32": 4, "bfloat16": 2}[engine_dtype(model, gpu=has_gpus())]


def cached_bytes(rollout: EngineKeys, model: ModelConfig) -> int:
    """Return the number of bytes of one number in the engines' cache of keys and values."""
    return 1 if rollout.kv_cache_dtype == "fp8" else value_bytes(model)


def has_gpus() -> bool:
    """Return whether this machine, or the machine assumed for a plan, has a GPU."""
    assumed = assumed_machine()
    if assumed is not None:
        return assumed.gpus > 0
    return any(Path("/dev").glob("nvidia[0-9]*"))


def host_bytes(trainer: TrainerConfig, params: int, *, with_reference: bool, gpus: bool) -> int:
    """Return the host memory in bytes of a train worker's weights, gradients, optimizer state and reference model. No
    extra memory is needed at the start, because every rank reads only its own shards of the model's files. The memory
    for offloaded state is not included; see `GpuMemory.host`."""
    if trainer.backend == "scripted":
        return 0
    moved = 0
    if trainer.offload_optimizer:
        whole = trainer.model_copy(update={"offload_optimizer": False})
        moved = trained_parts(whole, params, with_reference=False)["optimizer"]
    if not gpus or trainer.offload:
        return moved + trained_bytes(trainer, params, with_reference=with_reference)
    if not with_reference or trainer.lora.rank or (trainer.backend == "fsdp" and trainer.topology.world == 1):
        return moved
    # On GPUs the backends keep the reference model in host memory between uses; a single FSDP rank keeps it on its GPU.
    return moved + trained_parts(trainer, params, with_reference=True)["reference"]


def parameters(model: ModelConfig) -> int | None:
    """Return the number of parameters of a dense Llama-like model; None where `model_size` returns None."""
    size = model_size(model)
    return None if size is None else size.parameters


def model_size(model: ModelConfig) -> ModelSize | None:
    """Return the size of a dense Llama-like model, computed from the model's config. Returns None if that config is not
    on this machine or the model is of another kind."""
    config = model_config(model)
    if _OF_OTHER_KINDS & set(config) or not {"hidden_size", "num_hidden_layers", "intermediate_size"} <= set(config):
        return None
    return size_of(config)


def size_of(config: Mapping[str, Any]) -> ModelSize:
    """Return the size of a dense Llama-like model, with its vision tower. config: content of its config.json."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    tables = 1 if config.get("tie_word_embeddings") else 2
    count = config["num_hidden_layers"] * layer + tables * config["vocab_size"] * hidden + hidden
    tower = tower_shape(config)
    return ModelSize(count + (0 if tower is None else tower["parameters"]), config)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
