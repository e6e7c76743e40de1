"""Describes the families of models that Megatron can train: one table each of weights, settings and limits.

Loading, weight sync, export, checkpoints and router replay read the same rows. The tables need neither torch nor
megatron-core, so that settings can be checked before a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

Split = Literal["whole", "vocabulary", "columns", "rows", "heads", "gated", "experts", "expert_gated", "expert_columns"]
"""The ways in which a parameter is split over tensor-parallel ranks.

whole            not split (norms, routers, and projections down to a latent space)
vocabulary       by tokens, padded with zeros to equal parts
columns          along dimension 1 of the matrix
rows             along dimension 0
heads            query, key and value matrices or biases in one parameter, by groups of heads that share a key
gated            gate and up matrices in one parameter, along dimension 0 of each
experts          stacked experts, divided over the expert-parallel ranks, with each expert whole
expert_gated     `gated` for stacked experts: the experts are divided over the expert-parallel ranks, and the matrices
                 of each expert are split over the expert-tensor-parallel ranks
expert_columns   `columns` for stacked experts, over the same ranks as `expert_gated`
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of Megatron tensor in a decoder layer, and the HF tensors that contain its values."""

    name: str
    """Name of the parameter or buffer in a Megatron layer."""
    hf_names: tuple[str, ...]
    """Names of the tensors in a HF layer. Experts are stacked, as in the HF model."""
    split: Split


@dataclass(frozen=True, slots=True)
class Family:
    """What Megatron needs to know about one `model_type`.

    A setting is the value of a field of Megatron's config, or a function that computes it from the HF config.
    """

    rows: tuple[Row, ...]
    """Rows of all kinds of decoder layers of the family. A model may lack some, such as biases."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of every model of the family: field of Megatron's config -> value or function."""
    experts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further settings of models that have experts."""
    only: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the HF config whose other values Megatron's layers do not express: key -> value."""
    latent: bool = False
    """True for attention with keys and values in a latent space (MLA)."""
    whole_experts: bool = False
    """True for experts that cannot be split over tensor-parallel ranks. These ranks must share the experts out."""
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Values of `rope_type` that are computed as transformers computes them."""

    def unfit(self, model: Any) -> Iterator[tuple[str, Any, str]]:
        """Yield (key, value, expected) for each key of a HF config whose value Megatron's layers do not express."""
        for key, wanted in self.only.items():
            if getattr(model, key, wanted) != wanted:
                yield key, getattr(model, key), str(wanted)
        rope = model.rope_parameters
        if rope["rope_type"] not in self.ropes:
            *first, last = map(repr, self.ropes)
            yield "rope_type", rope["rope_type"], f"{', '.join(first)} or {last}"
        if rope.get("attention_factor") is not None:
            yield "attention_factor", rope["attention_factor"], "none, so that it follows from the other keys"
        if getattr(model, "quantization_config", None) is not None:
            yield "quantization_config", "a value", "weights that are not quantized"
        top_k = getattr(model, "num_experts_per_tok", None)
        if not self.experts or top_k is None:
            return
        normed = getattr(model, "norm_topk_prob", True)
        if top_k == 1 and normed:
            yield "num_experts_per_tok", 1, "2 or more with norm_topk_prob"
        if self.experts.get("moe_router_score_function") == "sigmoid" and top_k > 1 and not normed:
            yield "norm_topk_prob", normed, "True"
        limit = getattr(model, "topk_group", None) or 1
        if (getattr(model, "n_group", None) or 1) > 1 and top_k // limit != 2:
            # Megatron ranks a group by its best top_k / limit experts, transformers by its best two.
            yield "topk_group", limit, f"{top_k // 2}, half of num_experts_per_tok"


def settings_of(table: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the values of a table of settings for the HF config `model`: field of Megatron's config -> value."""
    return {name: value(model) if callable(value) else value for name, value in table.items()}


_NORMS = (
    Row("input_layernorm.weight", ("input_layernorm.weight",), "whole"),
    Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "whole"),
)
_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_ATTENTION = (
    Row("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), "heads"),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
)
_QKV_BIAS = (Row("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), "heads"),)
_HEAD_NORMS = (
    Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "whole"),
    Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "whole"),
)
_LATENT = (
    Row("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",), "rows"),
    Row("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",), "whole"),
    Row("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",), "whole"),
    Row("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), "rows"),
    Row("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",), "whole"),
    Row("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",), "whole"),
    Row("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",), "rows"),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
)


def _gated(name: str, hf: str) -> tuple[Row, ...]:
    return (
        Row(f"{name}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), "gated"),
        Row(f"{name}.linear_fc2.weight", (f"{hf}.down_proj.weight",), "columns"),
    )


_MLP = _gated("mlp", "mlp")
_EXPERTS = (
    Row("mlp.router.weight", ("mlp.gate.weight",), "whole"),
    Row("mlp.experts.weight1", ("mlp.experts.gate_up_proj",), "expert_gated"),
    Row("mlp.experts.weight2", ("mlp.experts.down_proj",), "expert_columns"),
)
_SHARED = _gated("mlp.shared_experts", "mlp.shared_experts")
_GATED_SHARED = (
    *_gated("mlp.shared_experts", "mlp.shared_expert"),
    Row("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), "whole"),
)
_BIAS = (Row("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), "whole"),)
_SINKS = (
    Row("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), "whole"),
    Row("self_attention.core_attention.softmax_offset", ("self_attn.sinks",), "rows"),
)
_BIASED_EXPERTS = (
    Row("mlp.router.weight", ("mlp.router.weight",), "whole"),
    Row("mlp.router.bias", ("mlp.router.bias",), "whole"),
    Row("mlp.experts.weight1", ("mlp.experts.gate_up_proj",), "experts"),
    Row("mlp.experts.bias1", ("mlp.experts.gate_up_proj_bias",), "experts"),
    Row("mlp.experts.weight2", ("mlp.experts.down_proj",), "experts"),
    Row("mlp.experts.bias2", ("mlp.experts.down_proj_bias",), "experts"),
)
_DENSE = (*_NORMS, *_ATTENTION, *_MLP)
_PLAIN = {"attention_bias": False, "mlp_bias": False}

_SOFTMAX: dict[str, Any] = {
    "moe_router_pre_softmax": lambda model: not model.norm_topk_prob,
    "moe_ffn_hidden_size": attrgetter("moe_intermediate_size"),
}


def _grouped(key: str) -> Callable[[Any], int | None]:
    """Return a function that returns `key` of a HF config, or None if its router chooses from one group of experts."""
    return lambda model: getattr(model, key) if (model.n_group or 1) > 1 else None


_SIGMOID: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": attrgetter("routed_scaling_factor"),
    "moe_router_num_groups": _grouped("n_group"),
    "moe_router_group_topk": _grouped("topk_group"),
    "moe_ffn_hidden_size": attrgetter("moe_intermediate_size"),
    "moe_shared_expert_intermediate_size": lambda model: model.moe_intermediate_size * model.n_shared_experts,
}


def _scaled(key: str, default: float) -> Callable[[Any], float]:
    """Return a function that returns `key` of a HF config's YaRN, or `default` without YaRN or without the key."""

    def value(model: Any) -> float:
        rope = model.rope_parameters
        return float((rope.get(key) if rope["rope_type"] == "yarn" else None) or default)

    return value


FAMILIES: dict[str, Family] = {
    "llama": Family(_DENSE, only=_PLAIN),
    "mistral": Family(_DENSE),
    "qwen2": Family((*_DENSE, *_QKV_BIAS), {"add_qkv_bias": True}),
    "qwen3": Family((*_DENSE, *_HEAD_NORMS), {"qk_layernorm": True}, only=_PLAIN),
    "qwen3_moe": Family((*_DENSE, *_HEAD_NORMS, *_EXPERTS), {"qk_layernorm": True}, _SOFTMAX, _PLAIN),
    "qwen2_moe": Family(
        (*_DENSE, *_QKV_BIAS, *_EXPERTS, *_GATED_SHARED),
        {"add_qkv_bias": attrgetter("qkv_bias")},
        {
            **_SOFTMAX,
            "moe_shared_expert_intermediate_size": attrgetter("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        },
    ),
    "mixtral": Family(
        (*_NORMS, *_ATTENTION, *_EXPERTS),
        experts={"moe_router_pre_softmax": False, "moe_ffn_hidden_size": attrgetter("intermediate_size")},
    ),
    "glm4_moe": Family(
        (*_DENSE, *_QKV_BIAS, *_HEAD_NORMS, *_EXPERTS, *_BIAS, *_SHARED),
        {"add_qkv_bias": attrgetter("attention_bias"), "qk_layernorm": attrgetter("use_qk_norm")},
        _SIGMOID,
    ),
    "deepseek_v3": Family(
        (*_NORMS, *_LATENT, *_MLP, *_EXPERTS, *_BIAS, *_SHARED),
        {
            "multi_latent_attention": True,
            "q_lora_rank": attrgetter("q_lora_rank"),
            "kv_lora_rank": attrgetter("kv_lora_rank"),
            "qk_head_dim": attrgetter("qk_nope_head_dim"),
            "qk_pos_emb_head_dim": attrgetter("qk_rope_head_dim"),
            "v_head_dim": attrgetter("v_head_dim"),
            "rope_type": "yarn",  # Without YaRN its factors are 1.
            "rotary_scaling_factor": _scaled("factor", 1.0),
            "mscale_all_dim": _scaled("mscale_all_dim", 0.0),
        },
        _SIGMOID,
        {"attention_bias": False, "rope_interleave": True},
        latent=True,
        ropes=("default", "yarn"),
    ),
    "gpt_oss": Family(
        (*_NORMS, *_ATTENTION, *_QKV_BIAS, *_SINKS, *_BIASED_EXPERTS),
        {"add_bias_linear": True, "softmax_type": "learnable"},
        {
            "moe_router_pre_softmax": False,
            "moe_ffn_hidden_size": attrgetter("intermediate_size"),
            "activation_func_clamp_value": attrgetter("swiglu_limit"),
            "glu_linear_offset": 1.0,
        },
        {"attention_bias": True, "swiglu_alpha": 1.702},
        whole_experts=True,
    ),
}
"""The families that Megatron can train: `model_type` -> family."""


def require_family(path: str, model: Any) -> None:
    """Raise ValueError when megatron's layers do not express a model.

    path: its folder or hub id. model: its HF config.
    """
    if model.model_type not in FAMILIES:
        raise ValueError(
            f"model.path: got {path!r} of type {model.model_type!r}, expected one of {', '.join(FAMILIES)} with "
            "trainer.backend = 'megatron'"
        )
    act = () if model.hidden_act == "silu" else (("hidden_act", model.hidden_act, "silu"),)
    for key, got, wanted in (*act, *FAMILIES[model.model_type].unfit(model)):
        raise ValueError(
            f"model.path: got {path!r} with {key} = {got}, expected {wanted} with trainer.backend = 'megatron'"
        )
