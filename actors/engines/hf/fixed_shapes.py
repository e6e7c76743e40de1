"""Makes a Qwen3 compute each token in the same way in every batch, in products and sums whose shapes never change.

On CPUs a matrix product of one row can take another path than that of a hundred rows, and attention sums over keys in
an order that depends on where a row stands in its batch. Results then differ in the last bit between an engine, which
decodes token by token with cached keys, and a trainer, which computes whole rows. Here every product has ROWS rows,
and attention goes through blocks of KEYS keys that are counted from the first token of the row. It needs one thread,
because threads would divide the numbers of an activation at other places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

FIXED = "headrace_fixed"
"""Name of this attention among those of transformers."""
ROWS = 32
"""Number of rows of every matrix product."""
KEYS = 64
"""Number of keys in a block of attention."""
QUERIES = 16
"""Number of queries in a block of attention."""
OUTPUTS = 16
"""Smallest number of outputs of a product, to multiples of which heads are padded, too. With fewer than 12, MKL
computes the rows of a float32 product in other ways, by their places."""
_MOST_OUTPUTS = 4096

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns `x @ weight.T` for `x` of `[T, K]`."""


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x @ weight.T`, `[T, N]`, in products of ROWS rows and at least OUTPUTS columns. `x` is `[T, K]`."""
    padded, count = F.pad(x, (0, 0, 0, -len(x) % ROWS)), len(weight)
    weight = F.pad(weight, (0, 0, 0, OUTPUTS - count)) if count < OUTPUTS else weight
    return torch.cat([F.linear(part, weight) for part in padded.split(ROWS)])[: len(x), :count]


def divide(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits divided by the temperature, float32 as in `token_sampling`."""
    return logits.float() / temperature


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of one token of each row of divided logits, float32, and its logit: float32 `[T]`.

    The first is computed as in `token_sampling`. tokens: int64 `[T]`.
    """
    every = torch.log_softmax(logits, dim=-1)
    return every.gather(-1, tokens[:, None])[:, 0], logits.gather(-1, tokens[:, None])[:, 0]


def use_fixed_shapes(model: Any, product: Linear = linear) -> None:
    """Make a Hugging Face Qwen3 on a CPU compute each token in the same way in every batch. product: function with the
    values of `linear`, which may have a backward pass of its own. Raises ValueError if torch has several threads, or
    if products or attention depend on the place of a row on this machine."""
    if torch.get_num_threads() != 1:
        raise ValueError(
            f"torch.get_num_threads(): got {torch.get_num_threads()} with log-probs that are equal bit for bit, "
            "expected 1: call torch.set_num_threads(1) first"
        )
    AttentionInterface.register(FIXED, attend)
    AttentionMaskInterface.register(FIXED, _mask)
    model.set_attn_implementation(FIXED)
    linears: list[Any] = [one for one in model.modules() if isinstance(one, nn.Linear)]
    for module in linears:
        assert module.bias is None, "Qwen3's layers have no bias"
        module.forward = partial(_linear, product, module)
    _expect_alike({tuple(module.weight.shape) for module in linears}, model.config.head_dim)
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = partial(_activation, layer.mlp.act_fn.forward)


def _expect_alike(shapes: set[tuple[int, ...]], width: int) -> None:
    """Raise ValueError if products or attention depend on the place of a row on this machine.

    shapes: those of the weights. Of a vocabulary, only as many outputs are tried as show how the last ones are
    computed. width: that of the heads.
    """
    numbers = torch.Generator().manual_seed(0)
    turned, alike = torch.arange(ROWS).roll(1), True
    for outputs, inputs in shapes:
        count = outputs if outputs < _MOST_OUTPUTS else _MOST_OUTPUTS + outputs % _MOST_OUTPUTS
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = (torch.randn(size, inputs, generator=numbers).to(dtype) for size in (ROWS, count))
            alike &= torch.equal(linear(x[turned], weight), linear(x, weight)[turned])
    query, key, value = torch.randn(3, 1, 1, KEYS + QUERIES, width, generator=numbers)
    places = torch.arange(KEYS + QUERIES)[None]
    whole = _blocks(query, key, value, places, 1.0)
    for place in range(QUERIES):
        part = slice(place, place + 1)
        alike &= torch.equal(_blocks(query[:, :, part], key, value, places[:, part], 1.0), whole[:, :, part])
    if not alike:
        raise ValueError(
            "run.bitwise: got true on a CPU whose products depend on the place of a row, expected one on which they do "
            "not, such as one with MKL and oneDNN"
        )


def _mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    return attention_mask


def _linear(product: Linear, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return product(x.flatten(0, -2), module.weight).unflatten(0, x.shape[:-1])


def _activation(inner: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    # The last numbers of a tensor, if they do not fill a vector, are computed by another function.
    return inner(F.pad(x, (0, -x.shape[-1] % ROWS)))[..., : x.shape[-1]]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    row_ends: torch.Tensor | None = None,
    longest_row: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of `query` `[N, heads, Q, D]`, the last tokens of N rows of S tokens.

    `key` and `value` are `[N, kv_heads, S, D]`. attention_mask: 0 at the padding on the left of each row, `[N, S]`;
    None without padding. row_ends, longest_row: borders of packed rows, as in `RowLayout`, with which N is 1. Returns
    `[N, Q, heads, D]`.
    """
    if row_ends is not None:
        starts, lengths = row_ends[:-1].long(), row_ends.diff()
        own = torch.arange(longest_row)
        inside = own < lengths[:, None]
        index = (starts[:, None] + own).clamp(max=query.shape[2] - 1)
        q, k, v = (part[0][:, index].transpose(0, 1) for part in (query, key, value))
        out = _blocks(q, k, v, own.expand(len(lengths), -1), scaling)
        return out.transpose(1, 2)[inside][None], None
    count, size = key.shape[0], key.shape[2]
    padding = torch.zeros(count, dtype=torch.int64) if attention_mask is None else (attention_mask == 0).sum(-1)
    index = (torch.arange(size) + padding[:, None]).clamp(max=size - 1)[:, None, :, None]
    key, value = (part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3])) for part in (key, value))
    places = torch.arange(size - query.shape[2], size) - padding[:, None]
    return _blocks(query, key, value, places.clamp(min=0), scaling).transpose(1, 2), None


def _blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return causal attention of queries at `places` (int64 `[N, Q]`) of N rows, `[N, heads, Q, D]`.

    The first key of a row is that of place 0. Sums are in float32, as in flash attention (Dao 2023, arXiv:2307.08691).
    """
    _, heads, count, width = query.shape
    shared = heads // key.shape[1]
    extra, wider = -count % QUERIES, -width % OUTPUTS
    q = F.pad(query.float() * scaling, (0, wider, 0, extra)).unflatten(2, (-1, QUERIES))
    at = F.pad(places, (0, extra)).unflatten(1, (-1, QUERIES))[:, None, :, :, None]
    beyond = (0, wider, 0, -key.shape[2] % KEYS)
    k, v = (F.pad(one.float(), beyond).repeat_interleave(shared, 1).unflatten(2, (-1, KEYS)) for one in (key, value))
    k = k.transpose(-1, -2).contiguous()  # Every product then reads its numbers in the same order.
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total, mixed = torch.zeros_like(top), torch.zeros_like(q)
    for number in range(k.shape[2]):
        block = slice(number, number + 1)
        seen = torch.arange(number * KEYS, (number + 1) * KEYS) <= at
        scores = (q @ k[:, :, block]).masked_fill(~seen, -torch.inf)
        higher = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        chances, kept = (scores - higher).exp(), (top - higher).exp()
        total = total * kept + chances.sum(-1, keepdim=True)
        mixed = mixed * kept + chances @ v[:, :, block]
        top = higher
    return (mixed / total).flatten(2, 3)[:, :, :count, :width].to(query.dtype)
