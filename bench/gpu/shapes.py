"""Holds the shapes of the models that `headrace bench gpu` fills with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a model of the family Qwen3, dense or with experts in every layer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    """Number of query heads of each layer."""
    key_value_heads: int
    head_dim: int
    vocabulary: int
    """Number of rows of the embedding. A model has more rows than its tokenizer has tokens."""
    tokens: int
    """Number of tokens of the tokenizer, special ones included."""
    positions: int
    """Largest number of tokens of a sequence that the model is made for."""
    tied: bool = True
    """True if the output layer is the embedding."""
    experts: int = 0
    """Number of experts of each layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    """Width of the gated MLP of an expert."""

    def options(self) -> dict[str, Any]:
        """Return the dimensions by their names in the model's Hugging Face configuration."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            **self._expert_options(),
        }

    def _expert_options(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_intermediate,
            "norm_topk_prob": True,
        }


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 16, vocabulary=1024, tokens=1000, positions=256),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128, vocabulary=151936, tokens=151646, positions=40960),
    "1.7b": Shape(2048, 6144, 28, 16, 8, 128, vocabulary=151936, tokens=151646, positions=40960),
    "2g": Shape(2048, 6144, 28, 16, 8, 128, vocabulary=151936, tokens=151646, positions=2048, tied=False),
    "4b": Shape(2560, 9728, 36, 32, 8, 128, vocabulary=151936, tokens=151646, positions=40960),
    "tiny-moe": Shape(
        64, 128, 2, 4, 2, 16, vocabulary=1024, tokens=1000, positions=256, tied=False,
        experts=8, experts_per_token=2, expert_intermediate=32,
    ),
    "30b-a3b": Shape(
        2048, 6144, 48, 32, 4, 128, vocabulary=151936, tokens=151646, positions=40960, tied=False,
        experts=128, experts_per_token=8, expert_intermediate=768,
    ),
}  # fmt: skip
"""Name of a size -> its shape. `0.6b`, `1.7b` and `4b` are the shapes of Qwen3-0.6B, Qwen3-1.7B and Qwen3-4B; `2g` has
2.03 G parameters. `30b-a3b` is that of Qwen3-30B-A3B, of which benchmarks use a few layers."""
