"""Lists the families of models that are tested, and writes a tiny random model of each as a Hugging Face folder.

A family is a `model_type` of transformers. Its sizes are chosen so that each of its parts acts on rows of a few tokens:
windows and chunks are shorter than the rows, and every kind of layer, expert, gate and scaling occurs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCAB = 40
CONTEXT = 24
"""Number of tokens that no row exceeds. Each row of a model in `LENGTHS` has this length."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_nope_head_dim": 8,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "sliding_window": 4, "query_pre_attn_scalar": 16, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 32}
SCALES: dict[str, Any] = {
    "logits_scaling": 0.7, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}, "gemma3_text": GEMMA,
    "gpt_oss": {**LOCAL, "sliding_window": 4}, "phi3": {"sliding_window": None}, "mixtral": LOCAL,
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1, "head_dim": 8}, "olmo2": {}, "gpt2": {}, "gpt_neox": {},
    "falcon": {"head_dim": ...}, "granite": SCALES, "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "qwen3_next": {**LINEAR, **SHARED}, "qwen3_5_text": LINEAR,
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8,
              "use_mamba_kernels": False},
    "llama4_text": {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1,
                    "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 8,
                    "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.3},
    "gemma": {}, "qwen2_moe": {**SHARED, "decoder_sparse_step": 1}, "phi": {}, "ministral3": {"sliding_window": None},
    "olmo3": {"sliding_window": 4}, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4}, "gptj": {"rotary_dim": 8},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "bloom": {"head_dim": ...},
    "mpt": {"max_seq_len": 128, "head_dim": ...}, "deepseek_v2": LATENT, "glm4_moe": ROUTED, "glm4": {},
    "granitemoe": {**SCALES, **LOCAL}, "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 4, "logit_scale": 0.5}, "starcoder2": {"sliding_window": 4}, "stablelm": {},
    "nemotron": {},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 4}, "ernie4_5": {}, "minimax_m2": LOCAL,
    "gemma3": {"text_config": GEMMA, "mm_tokens_per_image": 4, "image_token_index": 39, "boi_token_index": 38,
               "eoi_token_index": 37,
               "vision_config": {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
                                 "patch_size": 14}},
    "gemma4_text": {**GEMMA, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
                    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "num_kv_shared_layers": 2},
    "qwen3_5": {"text_config": LINEAR,
                "vision_config": {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
                                  "num_position_embeddings": 16}},
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {**ROUTED, "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
                   "num_hidden_layers": ..., "moe_shared_expert_intermediate_size": 32, "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 8},
    "mamba": {"state_size": 8},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "key_multiplier": 0.5, "lm_head_multiplier": 2.0,
                  "ssm_in_multiplier": 0.7},
    "lfm2_moe": {**EXPERTS, "num_hidden_layers": 3, "num_dense_layers": 1,
                 "layer_types": ["conv", "full_attention", "conv"]},
    "granitemoehybrid": {**SCALES, **LOCAL, **MAMBA, "shared_intermediate_size": 32, "position_embedding_type": "rope",
                         "layer_types": ["mamba", "attention"]},
    "qwen3_5_moe_text": {**LINEAR, **SHARED}, "glm4_moe_lite": {**LATENT, "head_dim": 8},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_intermediate_size": 32},
    "mimo_v2_flash": {**ROUTED, "sliding_window": 4, "v_head_dim": 8, "num_hidden_layers": 3,
                      "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "hunyuan_v1_dense": {},
}  # fmt: skip
"""Keys of each family beside `SIZES`: `model_type` -> keys. `...` leaves a key out."""
WITH_EXPERTS = frozenset(
    "qwen3_moe gpt_oss mixtral deepseek_v3 qwen3_next jamba llama4_text qwen2_moe olmoe deepseek_v2 glm4_moe granitemoe"
    " minimax_m2 nemotron_h lfm2_moe granitemoehybrid qwen3_5_moe_text glm4_moe_lite ernie4_5_moe mimo_v2_flash".split()
)
"""Families whose models have experts."""


def _rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **keys}}


VARIANTS: dict[str, dict[str, Any]] = {
    "llama llama3": _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position_embeddings=16),
    "llama dynamic": {"max_position_embeddings": 12, **_rope("dynamic", factor=4.0)},
    "mistral window": {"sliding_window": 4},
    "qwen3 window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "phi3 longrope": {"sliding_window": None, "original_max_position_embeddings": 12,
                      **_rope("longrope", short_factor=[1.0] * 8, long_factor=[3.0] * 8,
                              original_max_position_embeddings=12)},
    "falcon alibi": {"head_dim": ..., "alibi": True, "parallel_attn": False, "multi_query": False},
    "ministral3 yarn": {"sliding_window": None, **_rope("yarn", factor=4.0, original_max_position_embeddings=4,
                                                        llama_4_scaling_beta=0.3)},
}  # fmt: skip
"""The same for variants of families: the family and a word for the variant -> keys."""
LENGTHS = frozenset(("llama dynamic", "phi3 longrope"))
"""Variants whose positions depend on the length of a row. Their rows all have CONTEXT tokens, for which the trainer
chooses the positions."""
KEPT = ("A_log", "dt_bias", ".D")
"""Ends of the names of the weights that keep the values of transformers: rates of state-space layers."""


def save_family(folder: Path | str, name: str, **changes: Any) -> str:
    """Write the random model `name` as a HF folder. Its weights are large, so that log-probs spread by about 1 nat.
    changes: other keys of its config."""
    torch.manual_seed(11)
    keys = {**FAMILIES, **VARIANTS}[name] | changes
    if "text_config" in keys:
        keys = {**keys, "text_config": {**SIZES, **keys["text_config"]}}
    else:
        keys = {**SIZES, **keys}
    config = AutoConfig.for_model(name.split()[0], **{key: value for key, value in keys.items() if value is not ...})
    kind = AutoModelForImageTextToText if "vision_config" in keys else AutoModelForCausalLM
    model = kind.from_config(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for path, param in model.named_parameters():
            if path.endswith(KEPT):
                continue
            noise = torch.randn(param.shape, generator=generator)
            if param.ndim >= 2 and "conv" not in path:
                embeds = any(word in path for word in ("embed", "wte", "word_emb"))
                # Gemma multiplies embeddings by a root of their size: larger ones would make tokens predict themselves.
                own = 9.6 / config.get_text_config().hidden_size if name.startswith("gemma") else 0.3
                param.copy_(noise * (own if embeds else 0.15))
            else:
                param.add_(noise * 0.1)
        for path, buffer in model.named_buffers():
            if path.endswith("_bias"):  # A router's biases, which it adds before it chooses experts.
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return str(folder)
