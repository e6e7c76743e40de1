"""Computes all experts of a rank by grouped matrix products, in place of Megatron's loop over one expert at a time.

Megatron's own grouped experts need TransformerEngine or the package grouped_gemm. Here torch's `grouped_mm` multiplies
each expert's tokens with its weights in one kernel, on GPUs in bfloat16. On CPUs and in float32, for which torch has no
such kernel everywhere, the products are made one after another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class GroupedExperts(nn.Module):
    """The experts of one rank, gated MLPs whose weights are stacked, as the `experts` of a Megatron MoE layer."""

    def __init__(self, num_local_experts: int, config: Any, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        hidden, dtype = config.hidden_size, config.params_dtype
        self.weight1 = nn.Parameter(torch.empty(num_local_experts, 2 * width, hidden, dtype=dtype))
        """Gate and up matrices of each expert, `[experts, 2 * width, hidden]`."""
        self.weight2 = nn.Parameter(torch.empty(num_local_experts, hidden, width, dtype=dtype))
        """Down matrix of each expert, `[experts, hidden, width]`."""
        for weight in (self.weight1, self.weight2):
            # Megatron sums the gradients of parameters without this mark over the expert-data-parallel ranks.
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return each token's output of its expert, `[T, hidden]`, times its weight.

        `hidden` `[T, hidden]` has the tokens of the first expert, then those of the second, and so on.
        `tokens_per_expert` (integers `[experts]`) has their numbers, and `weights` (`[T]`) the router's weights.
        """
        gate, up = grouped_linear(hidden, self.weight1, tokens_per_expert).chunk(2, -1)
        inner = (F.silu(gate) * up * weights[:, None]).to(hidden.dtype)
        return grouped_linear(inner, self.weight2, tokens_per_expert), None


def grouped_linear(rows: torch.Tensor, weights: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Multiply groups of consecutive rows with a matrix each.

    `rows` is `[T, K]`, `weights` `[groups, N, K]`, and `sizes` (integers `[groups]`, on any device) the number of rows
    of each group, which add up to T. Returns `[T, N]`.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows):
        ends = sizes.to(rows.device, non_blocking=True).cumsum(0).int()
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = rows.split(sizes.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])
