"""Translates a HF config and the train mesh to a Megatron config, and checks that Megatron can train the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ....codecs.tokens.routes import is_expert_layer
from ..config import BackendConfig
from ..model_split import MODEL_TYPES, check_split, expert_tensor_size, mesh_problems
from .library import TransformerConfig


def check_fits(config: BackendConfig, model: Any) -> None:
    """Raise ValueError, naming the key, when Megatron cannot train the model under the settings in `config`. `model` is
    the model's HF config."""
    _check_model(config, model)
    for problem in mesh_problems(config.trainer):
        raise ValueError(problem)
    check_split(config.trainer, model)


def _check_model(config: BackendConfig, model: Any) -> None:
    if config.trainer.offload:
        raise ValueError("trainer.offload: got True, expected False with trainer.backend = 'megatron'")
    if config.trainer.head == "full":
        raise ValueError("trainer.head: got 'full', expected 'auto' or 'selected' with trainer.backend = 'megatron'")
    if model.model_type not in MODEL_TYPES:
        raise ValueError(
            f"model.path: got {config.model!r} of type {model.model_type!r}, expected one of "
            f"{', '.join(MODEL_TYPES)} with trainer.backend = 'megatron'"
        )
    for name, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
    ):
        if getattr(model, name, wanted) != wanted:
            raise ValueError(
                f"model.path: got {config.model!r} with {name} = {getattr(model, name)}, expected {wanted} with "
                "trainer.backend = 'megatron'"
            )
    if getattr(model, "num_experts_per_tok", 2) == 1 and model.norm_topk_prob:
        raise ValueError(f"model.path: got {config.model!r} with one expert per token, expected two or more")
    rotary_frequencies(model)


def head_width(model: Any) -> int:
    """Return the width of one attention head."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def rotary_frequencies(model: Any) -> torch.Tensor:
    """Return the rotary frequencies in radians per position, float32 `[head_width / 2]`, as HF computes them.

    Raises ValueError when the `rope_type` is not `default`, `linear` or `llama3`.
    """
    settings = model.rope_parameters
    kind = settings["rope_type"]
    if kind == "default":
        width = head_width(model)
        return 1.0 / settings["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"model.path: got rope_type {kind!r}, expected 'default', 'linear' or 'llama3' with "
            "trainer.backend = 'megatron'"
        )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](model, device=torch.device("cpu"))
    assert scale == 1.0, (kind, scale)
    return frequencies


def transformer_config(config: BackendConfig, model: Any) -> TransformerConfig:
    """Build Megatron's config from the train settings and the HF config `model`. Dropout is off, as in the other
    backends."""
    topology = config.topology
    half = config.trainer.mixed_precision
    dtype = torch.bfloat16 if half else torch.float32
    recompute: dict[str, Any] = {}
    if config.trainer.recompute == "full":
        count = config.trainer.recompute_layers or model.num_hidden_layers
        recompute = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=head_width(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=model.model_type != "llama",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=half,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,  # Every weight is read from the HF folder.
        tensor_model_parallel_size=topology.tp,
        sequence_parallel=config.trainer.sequence_parallel,
        pipeline_model_parallel_size=topology.pp,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=expert_tensor_size(topology),
        variable_seq_lengths=True,
        calculate_per_token_loss=True,  # Losses and gradients stay sums; Megatron must not divide them.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        moe_token_dispatcher_type="alltoall",
        **recompute,
        **_experts(model),
    )


def _experts(model: Any) -> dict[str, Any]:
    layers = [int(is_expert_layer(model, layer)) for layer in range(model.num_hidden_layers)]
    if not any(layers):
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_router_load_balancing_type": "none",  # Megatron must not add a balancing loss.
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }
