"""Replaces modules of Megatron's layers that need TransformerEngine: attention, experts, norms, and a linear layer.

Attention is causal over packed rows. With context parallelism the keys and values of all ranks are gathered, one
all-gather per layer, and each of a rank's two chunks of a row sees the row up to the chunk's end (Llama 3,
arXiv:2407.21783, section 3.3.2). Every rank therefore needs memory for the keys of the whole microbatch. The queries of
a chunk are always the last of the tokens that they see, so one kernel with a causal mask aligned at the lower right
covers all cases.

Experts are computed by grouped matrix products. Megatron's own grouped experts need TransformerEngine or the package
grouped_gemm. Here torch's `grouped_mm` multiplies each expert's tokens with its weights in one kernel, on GPUs in
bfloat16. On CPUs and in float32, for which torch has no such kernel everywhere, the products are made one after
another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ....codecs.integers import exclusive_cumsum
from ..layers import attend_rows, uncompiled
from ..row_layout import to_device
from .library import MLASelfAttention, RowParallelLinear, is_layer_window_attention


@dataclass(frozen=True, slots=True)
class Reach:
    """Input of one call of the attention kernel: spans of queries, each with all keys up to its last query."""

    queries: torch.Tensor | None
    """Indices of the queries among this rank's tokens, one span after the other: int64; None for all tokens."""
    keys: torch.Tensor | None
    """Indices of the keys among all ranks' tokens, one span after the other: int64; None for all tokens."""
    query_sizes: tuple[int, ...]
    """Number of queries of each span, 1 or more."""
    key_sizes: tuple[int, ...]
    """Number of keys of each span, at least its number of queries."""
    longest: tuple[int, int]
    """Largest number of queries and largest number of keys of a span. A compiled layer that read the sizes of all spans
    would be compiled again for other sizes."""
    query_ends: torch.Tensor
    """Boundaries of the spans among the queries: 0, then the end of each span, int32 `[spans + 1]`."""
    key_ends: torch.Tensor
    """Boundaries of the spans among the keys: 0, then the end of each span, int32 `[spans + 1]`."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Plan of which tokens of one microbatch may attend to which. Megatron passes it to its layers as
    `packed_seq_params`."""

    reaches: tuple[Reach, ...]
    """Inputs of the calls of the attention kernel. Together they contain every query once."""
    angles: torch.Tensor | None = None
    """Rotary angles of this rank's tokens, float32 `[S, 1, rotary width]`, for attention in a latent space."""
    concentration: float = 1.0
    """Factor of the cosines and sines of `angles`."""
    qkv_format: str = "rows"
    """Name of the layout of queries and keys, which Megatron reads. It must not be `thd`, because Megatron would then
    apply rotary embeddings row by row itself."""
    local_cp_size: None = None
    """Number of context-parallel ranks of the microbatch if it varies, which Megatron reads. Here it does not."""


def plan_attention(padded: np.ndarray, cp: int, rank: int, device: torch.device) -> AttentionPlan:
    """Plan the attention of one microbatch on context-parallel rank `rank` of `cp`.

    `padded` has the number of tokens of each row with its padding (int64 `[N]`). With context parallelism these numbers
    must be multiples of 2 * cp.
    """
    if cp == 1:
        sizes = padded[padded > 0]
        return AttentionPlan((_reach(None, None, sizes, sizes, device),))
    size = padded // (2 * cp)
    local = 2 * exclusive_cumsum(size)
    total = 2 * int(size.sum())
    reaches = []
    for half, chunk in enumerate((rank, 2 * cp - 1 - rank)):
        queries = runs(local + half * size, size)
        seen = (chunk + 1) * size
        row = np.repeat(np.arange(len(size)), seen)
        part, within = np.divmod(runs(np.zeros_like(seen), seen), np.maximum(size, 1)[row])
        owner = np.where(part < cp, part, 2 * cp - 1 - part)
        keys = owner * total + local[row] + (part >= cp) * size[row] + within
        reaches.append(_reach(queries, keys, size[size > 0], seen[size > 0], device))
    return AttentionPlan(tuple(reaches))


def _reach(
    queries: np.ndarray | None, keys: np.ndarray | None, query_sizes: np.ndarray, key_sizes: np.ndarray,
    device: torch.device,
) -> Reach:  # fmt: skip
    def tensor(values: np.ndarray | None) -> torch.Tensor | None:
        return None if values is None else to_device(torch.from_numpy(values), device)

    def ends(sizes: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)), device)

    return Reach(
        *(tensor(queries), tensor(keys)),
        *(tuple(query_sizes.tolist()), tuple(key_sizes.tolist())),
        (int(query_sizes.max(initial=0)), int(key_sizes.max(initial=0))),
        *(ends(query_sizes), ends(key_sizes)),
    )


def runs(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate ranges of integers, each given by its start and its size. Returns int64 `[sum(sizes)]`."""
    return np.arange(int(sizes.sum())) + np.repeat(starts - exclusive_cumsum(sizes), sizes)


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
        self._cp = self._group.size()
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
        width = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v  # The kernels need one width.
        if self._cp > 1:
            k, v = _gathered(k, v, self._group)
        out: torch.Tensor | None = None
        for reach in packed_seq_params.reaches:
            parts = (
                q if reach.queries is None else q[reach.queries],
                k if reach.keys is None else k[reach.keys],
                v if reach.keys is None else v[reach.keys],
            )
            if self.softmax_offset is None:
                part = attend(*parts, reach, self._scale, self._window)
            else:
                parts, reach_ = with_sinks(*parts, reach, self.softmax_offset / self._scale)
                part = attend(*parts, reach_, self._scale, self._window, sinks=True)[..., : q.shape[-1]]
            if reach.queries is None:
                out = part
            else:
                out = (torch.zeros_like(q) if out is None else out).index_copy(0, reach.queries, part)
        assert out is not None
        return out[..., :width].flatten(1)[:, None]


@uncompiled  # Numbers of rows differ, and torch would compile the function again for each of them.
def with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: Reach, sinks: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Reach]:
    """Return queries, keys, values and the reach with a sink as the first key of each span.

    q, k, v: as in `attend`. sinks: logit of each head's sink divided by the scale of the attention, `[heads]`. Each
    head gets 8 more columns. In the first of them queries have their head's logit and sinks a 1. Values of sinks are 0.
    """
    tokens, width = torch.arange(len(k), device=k.device), k.shape[-1]
    spans = torch.arange(len(reach.key_ends), device=k.device, dtype=reach.key_ends.dtype)
    ends = reach.key_ends + spans
    place = tokens + torch.searchsorted(reach.key_ends, tokens.to(ends.dtype), right=True)
    blank = k.new_zeros(len(k) + len(spans) - 1, k.shape[1], width + 8)
    marked = blank.clone()
    marked[ends[:-1].long(), :, width] = 1
    logits = F.pad(sinks.to(q.dtype)[:, None], (0, 7)).expand(len(q), -1, -1)
    wide = (
        torch.cat([q, logits], -1),
        marked.index_copy(0, place, F.pad(k, (0, 8))),
        blank.index_copy(0, place, F.pad(v, (0, 8))),
    )
    sizes = tuple(size + 1 for size in reach.key_sizes)
    longest = (reach.longest[0], reach.longest[1] + 1)
    return wide, replace(reach, key_sizes=sizes, key_ends=ends, longest=longest)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reach: Reach,
    scale: float,
    window: int | None = None,
    *,
    sinks: bool = False,
) -> torch.Tensor:
    """Compute the attention of all spans of `reach`. Returns `[Q, heads, D]`.

    `q` is `[Q, heads, D]`, `k` and `v` are `[K, kv_heads, D]`, all span by span. With `window` a query sees only that
    many keys, the last of them its own. sinks: true if the first key of each span is a sink, which windows do not hide.
    On GPUs in half precision one variable-length flash kernel computes all spans, which compiled layers contain.
    Otherwise, and for windows with sinks, SDPA is used.
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and not (sinks and window):
        return attend_rows(q, k, v, reach.query_ends, reach.key_ends, reach.longest, scale, window)
    return _attend_by_span(q, k, v, reach, scale, window, sinks)


@uncompiled  # Span sizes differ, and torch would compile the method again for each of them.
def _attend_by_span(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: Reach, scale: float, window: int | None, sinks: bool
) -> torch.Tensor:
    """Compute what `attend` does with one call of SDPA if all spans have the same size, else with one for each span."""
    options: Any = {"scale": scale, "window": window, "sinks": sinks}
    if len(set(reach.query_sizes)) == 1 and len(set(reach.key_sizes)) == 1:
        return _spans(*(part.unflatten(0, (len(reach.query_sizes), -1)) for part in (q, k, v)), **options).flatten(0, 1)
    parts = zip(q.split(reach.query_sizes), k.split(reach.key_sizes), v.split(reach.key_sizes), strict=True)
    return torch.cat([_spans(q_[None], k_[None], v_[None], **options)[0] for q_, k_, v_ in parts])


def _spans(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, sinks: bool
) -> torch.Tensor:
    """Compute causal attention within n spans of one size; the queries are the last Q of the K tokens of their span.

    `q` is `[n, Q, heads, D]`, `k` and `v` are `[n, K, kv_heads, D]`. Returns `[n, Q, heads, D]`.
    """
    more = k.shape[1] - q.shape[1]
    mask = None
    near = window if window is not None and window < k.shape[1] else None
    if more or near is not None:  # SDPA's own causal mask is aligned at the upper left.
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(more)
        mask = mask if near is None else mask.triu(more - near + 1)
        mask[:, 0] |= sinks
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    ).transpose(1, 2)


@uncompiled
def _gathered(k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    return _Gather.apply(torch.stack([k, v]), group)


class _Gather(torch.autograd.Function):
    """Gathers the keys and values of all ranks and concatenates them in rank order. Backward sums the ranks'
    gradients."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.group = group
        every = both.new_empty(group.size() * len(both), *both.shape[1:])
        dist.all_gather_into_tensor(every, both.contiguous(), group=group)
        k, v = every.unflatten(0, (group.size(), 2)).unbind(1)
        return k.flatten(0, 1), v.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        every = torch.stack([grad.unflatten(0, (ctx.group.size(), -1)) for grad in grads], dim=1).flatten(0, 1)
        own = every.new_empty(2, *every.shape[1:])
        dist.reduce_scatter_tensor(own, every, group=ctx.group)
        return own, None


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
        return super().forward(hidden), None
