"""Counts the floating-point operations of a train step from a HF model's config, and lists the peaks of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BACKWARD = 3
"""Cost of forward and backward together, in forwards: backward computes two matrix products for each of forward's."""

GATED = ("qwen3", "qwen3_moe", "llama", "qwen2", "mistral")
"""HF `model_type`s whose layers are counted here: grouped-query attention, then a gated MLP or experts."""

BF16_PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Peak FLOP/s of dense bfloat16 products by the name that CUDA gives the device (from NVIDIA's data sheets)."""


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Counts the matrix products of a decoder; norms, activations, softmaxes and the optimizer are left out, as usual.

    These are model FLOPs, which the model needs, not hardware FLOPs: recomputation and padding are not counted.
    """

    per_token: int
    """Number of multiply-adds of one token in the weights of all layers that it goes through.

    Attention takes `H (n_q + 2 n_kv) d + n_q d H`, a gated MLP `3 H I`, and k of E experts `H E + 3 k H I_e`.
    """
    per_pair: int
    """Number of multiply-adds of one (query, key) pair in all layers, `2 n_q d` each (scores and values)."""
    per_logits: int
    """Number of multiply-adds of one token's logits, `H V`."""

    def step(self, lengths: np.ndarray, predicted: int) -> float:
        """Return the FLOPs of forward and backward over rows of `lengths` (int64 `[N]`), with logits for `predicted`
        of their tokens.

        A row of L tokens has `L (L + 1) / 2` causal pairs.
        """
        tokens = float(lengths.sum())
        pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
        adds = self.per_token * tokens + self.per_pair * pairs + self.per_logits * predicted
        return 2.0 * BACKWARD * adds


def flop_model(config: Any) -> FlopModel | None:
    """Return the FLOP count of the model with HF `config`; None for an architecture that is not known here."""
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
    """Return the number of multiply-adds of one token in a layer's MLP or experts."""
    experts = getattr(config, "num_experts", 0)
    dense = layer in getattr(config, "mlp_only_layers", ()) or (layer + 1) % getattr(config, "decoder_sparse_step", 1)
    if not experts or dense:
        return 3 * config.hidden_size * config.intermediate_size
    active = 3 * config.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size
    return config.hidden_size * experts + active
