"""Plans and computes attention within packed rows whose tokens are split over context-parallel ranks.

The keys and values of all ranks are gathered, one all-gather per layer, and each of a rank's two chunks of a row sees
the row up to the chunk's end (Llama 3, arXiv:2407.21783, section 3.3.2). Every rank therefore needs memory for the keys
of the whole microbatch. The queries of a chunk are always the last of the tokens that they see, so one kernel with a
causal mask aligned at the lower right covers all cases. Both backends use this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ....codecs.integers import exclusive_cumsum
from ..layers import attend_rows, uncompiled
from .row_layout import to_device


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


def attend_by_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    group: dist.ProcessGroup,
    scale: float,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within the rows of `plan`. Returns `[S, heads, V]`. Collective over `group`.

    `q` is `[S, heads, D]`, `k` `[S, kv_heads, D]` and `v` `[S, kv_heads, V]`; each has the S tokens of this rank. V is
    at most D. group: the context-parallel ranks. With `window` a query sees only that many keys, the last of them its
    own. sinks: logit of each head's sink, `[heads]`, which takes part of the attention but has no value; None without.
    """
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v  # The kernels need one width.
    if group.size() > 1:
        k, v = _gathered(k, v, group)
    out: torch.Tensor | None = None
    for reach in plan.reaches:
        parts = (
            q if reach.queries is None else q[reach.queries],
            k if reach.keys is None else k[reach.keys],
            v if reach.keys is None else v[reach.keys],
        )
        if sinks is None:
            part = attend(*parts, reach, scale, window)
        else:
            parts, reach_ = with_sinks(*parts, reach, sinks / scale)
            part = attend(*parts, reach_, scale, window, sinks=True)[..., : q.shape[-1]]
        if reach.queries is None:
            out = part
        else:
            out = (torch.zeros_like(q) if out is None else out).index_copy(0, reach.queries, part)
    assert out is not None
    return out[..., :width]


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
