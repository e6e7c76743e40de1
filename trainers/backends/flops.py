"""Counts the floating-point operations of a train step from a HF model's config, and lists the peak FLOP/s of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BACKWARD = 3
"""Cost of a forward and a backward pass relative to a forward pass alone. The backward pass computes two matrix
products for each one of the forward pass."""

GATED = ("qwen3", "qwen3_moe", "llama", "qwen2", "mistral")
"""Values of `model_type` in HF configs whose FLOPs this module can count. Each layer of these models is a grouped-query
attention, then a gated MLP or experts."""

BF16_PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Peak FLOP/s of dense bfloat16 matrix products, from NVIDIA's data sheets: CUDA device name -> FLOP/s."""


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Counts the FLOPs of a decoder's matrix products. Norms, activations, softmaxes and the optimizer are left out, as
    usual.

    These are model FLOPs, which the model needs, not hardware FLOPs: recomputation and padding are not counted.
    """

    per_token: int
    """Number of multiply-adds per token in the weights of all layers. Of the experts, only those that the token is
    routed to count.

    With hidden size H, n_q query heads and n_kv key-value heads of width d, attention takes `H (n_q + 2 n_kv) d + n_q d
    H`. A gated MLP of width I takes `3 H I`. A layer with E experts of width I_e takes `H E + 3 k H I_e` when each
    token is routed to k of them.
    """
    per_pair: int
    """Number of multiply-adds per pair of query and key token, summed over all layers. Each layer takes `2 n_q d` for
    scores and values, with n_q query heads of width d."""
    per_logits: int
    """Number of multiply-adds that the logits of one token take: the hidden size times the size of the vocabulary."""

    def step(self, lengths: np.ndarray, predicted: int) -> float:
        """Return the FLOPs of a forward and backward pass over rows of `lengths` tokens (int64 `[N]`).

        `predicted` is the number of tokens whose logits are computed. A row of L tokens has `L (L + 1) / 2` causal
        (query, key) pairs.
        """
        tokens = float(lengths.sum())
        pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
        adds = self.per_token * tokens + self.per_pair * pairs + self.per_logits * predicted
        return 2.0 * BACKWARD * adds


def flop_model(config: Any) -> FlopModel | None:
    """Return the `FlopModel` of the model with HF config `config`; None for a `model_type` that is not in GATED."""
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
    """Return the number of multiply-adds per token in the MLP or the experts of decoder layer `layer`."""
    experts = getattr(config, "num_experts", 0)
    dense = layer in getattr(config, "mlp_only_layers", ()) or (layer + 1) % getattr(config, "decoder_sparse_step", 1)
    if not experts or dense:
        return 3 * config.hidden_size * config.intermediate_size
    active = 3 * config.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size
    return config.hidden_size * experts + active
