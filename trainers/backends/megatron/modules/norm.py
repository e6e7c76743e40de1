"""Provides an RMSNorm for Megatron layers that does not need TransformerEngine and supports sequence parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) in the precision of the parameters."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
