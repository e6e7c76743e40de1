"""Floating-point operations of a train step, counted from a HF model's config, and what a device could do at best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BACKWARD = 3
"""Forward and backward cost three forwards: backward computes two products where forward has one."""

GATED = ("qwen3", "qwen3_moe", "llama", "qwen2", "mistral")
"""HF `model_type`s of the layer counted here: grouped-query attention, then a gated MLP or experts."""

BF16_PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""FLOP/s of dense bfloat16 products by the name that CUDA gives the device (NVIDIA's data sheets)."""


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Matrix products of a decoder; norms, activations, softmaxes and the optimizer are left out, as usual.

    Model FLOPs: what the model needs, not what is spent; recomputation and padding count for nothing.
    """

    per_token: int
    """Multiply-adds of one token in all layers' weights that it goes through: attention
    `H (n_q + 2 n_kv) d + n_q d H`, then `3 H I` for a gated MLP, or `H E + 3 k H I_e` for k of E experts."""
    per_pair: int
    """Multiply-adds of one (query, key) pair in all layers: `2 n_q d` (scores and values)."""
    per_logits: int
    """Multiply-adds of one token's logits: `H V`."""

    def step(self, lengths: np.ndarray, predicted: int) -> float:
        """FLOPs of forward and backward over rows of `lengths` (int64 `[N]`), logits for `predicted` tokens of them.

        A row of L tokens has `L (L + 1) / 2` causal pairs.
        """
        tokens = float(lengths.sum())
        pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
        adds = self.per_token * tokens + self.per_pair * pairs + self.per_logits * predicted
        return 2.0 * BACKWARD * adds


def flop_model(config: Any) -> FlopModel | None:
    """Of a HF config; None for an architecture whose products are not known here."""
    config = config.get_text_config()
    if config.model_type not in GATED:
        return None
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    shared = width * config.num_key_value_heads // heads
    attention = hidden * (width + 2 * shared) + width * hidden
    blocks = sum(_block(config, layer) for layer in range(config.num_hidden_layers))
    layers = config.num_hidden_layers
    return FlopModel(layers * attention + blocks, layers * 2 * width, hidden * config.vocab_size)


def _block(config: Any, layer: int) -> int:
    """Multiply-adds of one token in a layer's MLP or experts."""
    experts = getattr(config, "num_experts", 0)
    dense = layer in getattr(config, "mlp_only_layers", ()) or (layer + 1) % getattr(config, "decoder_sparse_step", 1)
    if not experts or dense:
        return 3 * config.hidden_size * config.intermediate_size
    active = 3 * config.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size
    return config.hidden_size * experts + active
