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
from .library import MLASelfAttention, RowParallelLinear, is_layer_window_attention


class PackedAttention(nn.Module):
    """Computes scaled dot-product attention within packed rows, as the `core_attention` of a Megatron layer.

    The layer may have a window (`window_size` of Megatron's config) and learned sinks (`softmax_type`), and values may
    be narrower than keys.
    """

    def __init__(
        self, config: Any, layer_number: int, *, pg_collection: Any, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self._group: dist.ProcessGroup = pg_collection.cp
        self._scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        near = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window: int | None = config.window_size[0] + 1 if near else None
        self.softmax_offset: nn.Parameter | None = None
        """Logit of each head's sink, `[heads]`, which takes part of the attention but has no value; None without."""
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

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
        """Compute causal attention within rows. Returns `[S, 1, heads * V]`.

        `query` is `[S, 1, heads, D]`, `key` `[S, 1, kv_heads, D]` and `value` `[S, 1, kv_heads, V]`, or all three lack
        the dimension of size 1; each has the S tokens of this rank. V is at most D.
        """
        q, k, v = (part[:, 0] if part.ndim == 4 else part for part in (query, key, value))
        out = attend_by_plan(
            q, k, v, packed_seq_params, self._group, self._scale, window=self._window, sinks=self.softmax_offset
        )
        return out.flatten(1)[:, None]


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


class BiasedExperts(nn.Module):
    """The experts of one rank with biases and the clamped activation of gpt-oss (arXiv:2508.10925, section 2.2).

    Weights are as in HF: transposed, with gate and up columns in turn.
    """

    def __init__(self, num_local_experts: int, config: Any, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        assert pg_collection.expt_tp.size() == 1, "check_split refuses experts that are split"
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self._limit: float = config.activation_func_clamp_value
        self._offset: float = config.glu_linear_offset

        def parameter(*shape: int) -> nn.Parameter:
            made = nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype))
            # Megatron sums the gradients of parameters without this mark over the expert-data-parallel ranks.
            made.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            return made

        self.weight1, self.bias1 = parameter(hidden, 2 * width), parameter(2 * width)
        self.weight2, self.bias2 = parameter(width, hidden), parameter(hidden)

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return each token's output of its expert, `[T, hidden]`, times its weight, as `GroupedExperts` does."""
        experts = torch.arange(len(self.bias1), device=hidden.device)
        owner = experts.repeat_interleave(tokens_per_expert.to(hidden.device), output_size=len(hidden))
        both = grouped_linear(hidden, self.weight1.transpose(1, 2), tokens_per_expert) + self.bias1[owner]
        gate, up = both[:, ::2].clamp(max=self._limit), both[:, 1::2].clamp(-self._limit, self._limit)
        inner = (up + self._offset) * gate * torch.sigmoid(1.702 * gate)
        out = grouped_linear(inner, self.weight2.transpose(1, 2), tokens_per_expert) + self.bias2[owner]
        return (out * weights[:, None]).to(hidden.dtype), None


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


_LATENT_EPS = 1e-6
"""Summand of the norms in the latent space, for which transformers does not use the model's `rms_norm_eps`."""


class LatentAttention(MLASelfAttention):
    """Megatron's attention with keys and values in a latent space (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Rotary angles are those of the packed rows. Every rank has the projections down to the latent space whole, as with
    TransformerEngine. Megatron's other layers split them, and then the part of a rotary key that all heads share gets
    its gradient from the heads of one rank only.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.rotary_pos_emb = GivenAngles()
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, _LATENT_EPS)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, _LATENT_EPS)


class GivenAngles(nn.Module):
    """Takes the rotary angles of attention in a latent space from the plan of the microbatch's attention."""

    def get_rotary_seq_len(self, *args: Any) -> AttentionPlan:
        """Return the plan, the last of the arguments, in place of a length. Megatron passes it on to `forward`."""
        return args[-1]

    def forward(self, plan: AttentionPlan, **_: Any) -> tuple[torch.Tensor, float]:
        """Return the plan's angles and the factor of their cosines and sines."""
        assert plan.angles is not None, "the model sets the angles"
        return plan.angles, plan.concentration


class WholeLinear(nn.Linear):
    """Linear layer without bias that every tensor-parallel rank has whole, with Megatron's result of two values."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__(config.hidden_size, width, bias=False, dtype=config.params_dtype)
        # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the projection of `hidden`, `[..., hidden]`, and no bias."""
        return self._forward_impl(input=hidden), None

    def _forward_impl(self, **options: torch.Tensor) -> torch.Tensor:
        """Return the product for `input`, as the function of this name of Megatron's own layers does."""
        return super().forward(options["input"])
