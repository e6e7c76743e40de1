"""Replaces modules of Megatron's layers that need TransformerEngine: attention, experts, norms, and a linear layer.

Experts are computed by grouped matrix products. Megatron's own grouped experts need TransformerEngine or the package
grouped_gemm. Here torch's `grouped_mm` multiplies each expert's tokens with its weights in one kernel, on GPUs in
bfloat16. On CPUs and in float32, for which torch has no such kernel everywhere, the products are made one after
another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..rows.context_attention import AttentionPlan, attend_by_plan
from .library import RowParallelLinear


class PackedAttention(nn.Module):
    """Computes scaled dot-product attention within packed rows, as the `core_attention` of a Megatron layer."""

    def __init__(self, config: Any, *, pg_collection: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._group: dist.ProcessGroup = pg_collection.cp
        self._scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: AttentionPlan,
        **_: Any,
    ) -> torch.Tensor:
        """Compute causal attention within rows. Returns `[S, 1, heads * D]`.

        `query` is `[S, 1, heads, D]`, `key` and `value` are `[S, 1, kv_heads, D]`; each has the S tokens of this rank.
        """
        parts = (query[:, 0], key[:, 0], value[:, 0])
        return attend_by_plan(*parts, packed_seq_params, self._group, self._scale).flatten(1)[:, None]


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
    """Multiply each group of consecutive rows by its own matrix.

    `rows` is `[T, K]`, `weights` `[groups, N, K]`, and `sizes` (integers `[groups]`, on any device) the number of rows
    of each group, which add up to T. Returns `[T, N]`.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows):
        ends = sizes.to(rows.device, non_blocking=True).cumsum(0).int()
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = rows.split(sizes.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


class RowLinear(RowParallelLinear):
    """Megatron's linear layer whose input is split over the tensor-parallel ranks.

    megatron-core 0.16.1 does not pass the layer's group to its own function. The function then warns at every call that
    it uses the default group, although this is the same group. torch.compile cannot trace a warning and would leave
    most of the layer uncompiled. Delete when the pin moves to a release that passes `tp_group`
    (tensor_parallel/layers.py, RowParallelLinear.forward).
    """

    def _forward_impl(self, *args: Any, **options: Any) -> torch.Tensor:
        return super()._forward_impl(*args, **{**options, "tp_group": self.tp_group})


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) in the precision of the parameters."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
