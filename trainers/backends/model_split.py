"""Checks from a model's config alone whether the train mesh can split the model, before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...actors.train.microbatch_plan import Packing
from ...actors.train.topology import Topology
from ...codecs.integers import ceil_div
from .config import TrainerConfig
from .families.megatron import FAMILIES

PACKED_TYPES = (
    "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm4", "glm4_moe", "granite",
    "hunyuan_v1_dense", "internvl", "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo2", "olmo3",
    "olmoe", "phi", "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "smollm3",
    "starcoder2",
)  # fmt: skip
"""Values of `model_type` of the models that `fsdp` trains packed by default on GPUs. They are right packed in the table
of models, and their attention is what the variable-length kernel computes: one width for keys and values, windows, no
soft cap and no sinks."""

DECODERS = ("gpt_neox", "gpt_neox_japanese")
"""Values of `model_type` whose configs have `is_decoder` = false although their tokens do not see later ones."""

BIASED_TYPES = ("deepseek_v3", "glm4_moe", "dots1")
"""Values of `model_type` whose routers have a bias for each expert that `trainer.moe.bias_update_rate` can move."""


def mesh_problems(trainer: TrainerConfig) -> list[str]:
    """Return one sentence for each reason why the train mesh of `trainer` cannot be built with any model."""
    problems = []
    shared = trainer.dp * trainer.tp * trainer.cp
    if shared % trainer.ep:
        problems.append(f"trainer.ep: got {trainer.ep}, expected a divisor of trainer.dp x tp x cp = {shared}")
    if trainer.offload and shared * trainer.pp == 1:
        problems.append("trainer.offload: got true with one train worker, expected false, because it needs several")
    if trainer.compile and trainer.recompute == "selective":
        problems.append(
            "trainer.recompute: got 'selective' with trainer.compile=true, expected 'none' or 'full', because compiled "
            "layers compute their cheap operations again by themselves"
        )
    if trainer.fp8 != "none" and trainer.lora.rank:
        problems.append(
            f"trainer.fp8: got {trainer.fp8!r} with trainer.lora.rank={trainer.lora.rank}, expected 'none', because "
            "torchao would compute the gradients of the adapter's base, too, which costs more than fp8 saves"
        )
    megatron = trainer.backend == "megatron"
    if megatron and trainer.sequence_parallel and trainer.tp == 1:
        problems.append(
            "trainer.sequence_parallel: got true with trainer.tp=1, expected false, because there is only one rank"
        )
    if trainer.backend != "scripted" and trainer.cp > 1 and trainer.packing not in ("auto", "packed"):
        problems.append(
            f"trainer.packing: got {trainer.packing!r} with trainer.cp={trainer.cp}, expected 'packed', because only "
            "packed rows are split by tokens"
        )
    return problems


def check_split(trainer: TrainerConfig, model: Any) -> None:
    """Raise ValueError, naming the key, when `model` cannot be trained with the backend, mesh and packing of `trainer`.

    model: a HF config, or an object with the content of a config.json as attributes. A size that `model` lacks is not
    checked.
    """
    if trainer.backend == "scripted":  # The scripted backend has no model.
        return
    kind = getattr(model, "model_type", None)
    if getattr(model, "is_decoder", None) is False and kind not in DECODERS:
        raise ValueError(
            f"model.path: got a model of type {kind!r} with is_decoder = false, expected a causal language model, "
            "whose tokens do not see later ones"
        )
    if quantized := getattr(model, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ValueError(
            f"model.path: got weights quantized by {method or 'a quantization_config'!r}, expected weights in a float "
            "format, such as a checkpoint in bfloat16"
        )
    if trainer.backend == "megatron" and kind not in (None, *FAMILIES):
        raise ValueError(
            f"trainer.backend: got 'megatron', expected 'fsdp' for a model of type {kind!r}, because megatron trains "
            f"only models of the types {', '.join(FAMILIES)}"
        )
    if trainer.backend == "fsdp" and trainer.tp > 1 and kind is not None and not _declares_tp_plan(kind):
        raise ValueError(
            f"trainer.tp: got {trainer.tp}, expected 1 for a model of type {kind!r}, because transformers declares no "
            "tensor-parallel plan for it"
        )
    for key, ranks, name in _divisions(trainer, model):
        size = getattr(model, name, None)
        if ranks > 1 and size and size % ranks:
            raise ValueError(f"trainer.{key}: got {ranks}, expected a divisor of the model's {name} = {size}")
    vocabulary = getattr(model, "vocab_size", None)
    if vocabulary is not None and vocabulary <= (trainer.tp - 1) * ceil_div(vocabulary, trainer.tp):
        raise ValueError(
            f"trainer.tp: got {trainer.tp}, expected fewer ranks, because one of them would hold no token of the "
            f"model's vocab_size = {vocabulary}"
        )
    if trainer.packing == "packed":
        from ...actors.engines.hf.positions import counts_columns  # This imports torch, which other checks do not need.

        if counts_columns(model, trainer.tokens_per_microbatch):
            raise ValueError(
                "trainer.packing: got 'packed', expected 'none' or 'dynamic' for a model with attn_temperature_tuning, "
                "whose attention counts the tokens of earlier rows too"
            )
    _check_balance(trainer, model)
    _check_experts(trainer, model)


def _declares_tp_plan(kind: str) -> bool:
    """Return whether transformers declares how models of this type are split over tensor-parallel ranks."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # Only a mesh with tp > 1 waits for it.

    if kind not in CONFIG_MAPPING:
        return False
    own = CONFIG_MAPPING[kind]
    return any(getattr(part, "base_model_tp_plan", None) for part in (own, *own.sub_configs.values()))


def _check_balance(trainer: TrainerConfig, model: Any) -> None:
    """Raise ValueError when `trainer.moe` balances what the model does not have: experts, or biases of experts."""
    moe, kind = trainer.moe, getattr(model, "model_type", None)
    if not moe.active or kind is None:
        return
    keys = [key for key in ("aux_loss_coef", "bias_update_rate", "load_metrics") if getattr(moe, key)]
    if not has_experts(model):
        got = str(getattr(moe, keys[0])).lower()
        expected = "false" if keys[0] == "load_metrics" else "0"
        raise ValueError(
            f"trainer.moe.{keys[0]}: got {got}, expected {expected} for a model of type {kind!r} without experts"
        )
    if moe.bias_update_rate and kind not in BIASED_TYPES:
        raise ValueError(
            f"trainer.moe.bias_update_rate: got {moe.bias_update_rate}, expected 0 for a model of type {kind!r}, "
            f"because of the types that can be trained only {', '.join(BIASED_TYPES)} have biases of experts"
        )


def _divisions(trainer: TrainerConfig, model: Any) -> Iterator[tuple[str, int, str]]:
    """Yield which sizes of the model the mesh must divide evenly. An item is (mesh key, number of ranks, attribute of
    the model's config).

    For example ("tp", 4, "num_attention_heads"): the number of attention heads must be a multiple of 4.
    """
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        yield "tp", trainer.tp, name
    if trainer.backend == "fsdp":
        key = "ep" if trainer.ep > 1 else "tp"
        yield key, getattr(trainer, key), "num_experts"
        return
    yield "pp", trainer.pp, "num_hidden_layers"
    if has_experts(model):
        for name in ("num_experts", "n_routed_experts"):
            yield "ep", trainer.ep, name
        yield "tp", expert_tensor_size(trainer.topology), "moe_intermediate_size"
        yield "tp", trainer.tp, "shared_expert_intermediate_size"
        if getattr(model, "n_shared_experts", None):
            yield "tp", trainer.tp, "moe_intermediate_size"


def _check_experts(trainer: TrainerConfig, model: Any) -> None:
    """Raise ValueError when the mesh of `trainer` does not suit a model with experts, or a model without them.

    `ep` > 1 needs a model with experts. With megatron, a model with experts or with attention in a latent space needs
    `sequence_parallel` when `tp` > 1.
    """
    known = getattr(model, "num_hidden_layers", None) is not None
    if trainer.ep > 1 and known and not has_experts(model):
        raise ValueError(f"trainer.ep: got {trainer.ep}, expected 1 for a model without experts")
    if trainer.backend != "megatron":
        return
    kind = getattr(model, "model_type", None)
    latent = kind is not None and FAMILIES[kind].latent
    if kind is not None and FAMILIES[kind].whole_experts and expert_tensor_size(trainer.topology) > 1:
        raise ValueError(
            f"trainer.ep: got 1, expected 2 or more for a model of type {kind!r} with trainer.tp > 1, because its "
            "experts cannot be split"
        )
    if trainer.tp > 1 and not trainer.sequence_parallel and (has_experts(model) or latent):
        what = "experts" if has_experts(model) else "attention in a latent space"
        raise ValueError(
            f"trainer.sequence_parallel: got false, expected true for a model with {what} and trainer.tp > 1"
        )


def resolved_packing(trainer: TrainerConfig, model: Any, *, gpu: bool) -> Packing:
    """Return `trainer.packing`, or what `auto` means for `model`. gpu: whether the train workers have GPUs. model: as
    in `check_split`."""
    if trainer.packing != "auto":
        return trainer.packing
    if trainer.cp > 1:
        return "packed"
    kind = getattr(model, "model_type", None)
    known = kind in PACKED_TYPES
    if trainer.backend == "megatron":
        known = kind in FAMILIES
    return "packed" if gpu and trainer.mixed_precision and known and trainer.backend != "scripted" else "none"


def has_experts(model: Any) -> bool:
    """Return whether any decoder layer of a model has experts instead of an MLP."""
    from ...codecs.tokens.routes import expert_layers  # This imports torch, which other checks do not need.

    return bool(expert_layers(model))


def expert_tensor_size(topology: Topology) -> int:
    """Return the number of ranks that split one expert's weights: 1 with expert parallelism, else `tp`.

    With `ep` > 1 each rank has whole experts. With `ep` = 1 experts are split over the tensor-parallel ranks like all
    other layers. If each of these ranks had whole copies of the experts instead, a copy would see only the tokens of
    its rank, and Megatron would not sum the gradients of the copies.
    """
    return topology.tp if topology.ep == 1 else 1
