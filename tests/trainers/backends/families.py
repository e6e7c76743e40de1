"""Writes tiny random models of many families, with parts that act on rows of a few tokens: windows, chunks, scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "qk_nope_head_dim": 8,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "sliding_window": 4, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 12,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 4}, "gemma": {}, "gemma2": {"sliding_window": 4}, "qwen2": {},
    "gemma3_text": GEMMA, "gemma4_text": {**GEMMA, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32}, "qwen3": {}, "qwen3_moe": EXPERTS,
    "mixtral": LOCAL, "phi": {}, "phi3": {"sliding_window": None}, "olmo2": {}, "olmo3": {"sliding_window": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "gpt2": {}, "gpt_neox": {}, "opt": {"ffn_dim": 96},
    "falcon": {"head_dim": ...}, "deepseek_v2": DEEPSEEK,
    "deepseek_v3": {**DEEPSEEK, "n_group": 2, "topk_group": 1, "head_dim": 8},
    "glm4": {}, "glm4_moe": {**DEEPSEEK, "num_key_value_heads": 2}, "granite": {"logits_scaling": 4.0},
    "granitemoe": LOCAL, "smollm3": {"no_rope_layer_interval": 2}, "cohere": {}, "cohere2": {"sliding_window": 4},
    "starcoder2": {}, "stablelm": {}, "nemotron": {}, "exaone4": {"num_hidden_layers": 4, "sliding_window": 4},
    "ernie4_5": {}, "minimax_m2": LOCAL, "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8,
              "use_mamba_kernels": False},
    "bamba": {**MAMBA, "mamba_chunk_size": 8, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8},
    "llama4_text": {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1,
                    "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 8,
                    "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.3},
}  # fmt: skip
"""Keys of each family beside `SIZES`: name of the family (a `model_type`) -> keys. `...` leaves a key out."""
SCALED: dict[str, dict[str, Any]] = {
    "phi3 longrope": {"sliding_window": None, "original_max_position_embeddings": 12, "rope_parameters": LONG},
    "llama dynamic": {
        "max_position_embeddings": 12,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    },
    "llama llama3": {"rope_parameters": LLAMA3},
    "ministral3 yarn": {"sliding_window": None, "rope_parameters": YARN},
}
"""The same for families with scaled positions: name of the family and of the scaling -> keys."""


def save_family(folder: Path, name: str, *, std: float | None = 0.2, vectors: bool = False, **keys: Any) -> str:
    """Write a random model as a HF folder.

    std: standard deviation of the matrices, large enough that log-probs spread by about 1 nat; None for the weights
    that transformers initialises. vectors: true to spread norms, and biases, those of experts too.
    """
    torch.manual_seed(11)
    keys = {**SIZES, **{**FAMILIES, **SCALED}.get(name, {}), **keys}
    config = AutoConfig.for_model(name.split()[0], **{key: value for key, value in keys.items() if value is not ...})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for path, param in model.named_parameters():
            if std is not None and param.ndim >= 2 and "conv" not in path and not path.endswith("A_log"):
                param.normal_(std=std)
        every = (*model.named_parameters(), *model.named_buffers()) if vectors else ()
        for path, value in every:
            if value.ndim == 1 and path.endswith(("norm.weight", "bias", "sinks")):
                value.add_(torch.randn_like(value), alpha=0.2)
    model.save_pretrained(folder)
    return str(folder)


LATENT_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 4, "mscale": 1.0,
    "mscale_all_dim": 0.7,
}  # fmt: skip
MEGATRON: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3}),
    "mistral": ("mistral", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"sliding_window": 4}),
    "shared": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "glm": ("glm4_moe", {}),
    "glm_normed": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.4}),
    "latent": (
        "deepseek_v3",
        {"rope_parameters": LATENT_YARN, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "sinks": (
        "gpt_oss",
        {
            **LOCAL,
            "num_hidden_layers": 4,
            "sliding_window": 3,
            "swiglu_limit": 0.4,
            "rope_parameters": {**LATENT_YARN, "mscale": None},
        },
    ),
    "latent_plain": ("deepseek_v3", {"q_lora_rank": None, "rms_norm_eps": 1e-4, "routed_scaling_factor": 1.7}),
}
"""Models of the families that the megatron backend trains: name of a model -> its family, and keys beside FAMILIES."""


def save_megatron(folder: Path) -> str:
    """Write the model of MEGATRON with the folder's name, with norms and biases that differ."""
    family, keys = MEGATRON[folder.name]
    return save_family(folder, family, std=0.15, vectors=True, **{"tie_word_embeddings": False, **keys})
