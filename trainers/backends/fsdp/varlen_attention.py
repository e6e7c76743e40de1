"""Lets HF models attend within packed rows on a GPU through torch's variable-length flash attention.

Without it, HF finds where packed rows begin from the position ids and gives SDPA a dense block-diagonal causal mask of
S x S, where S is the number of tokens of the microbatch, which `trainer.tokens_per_microbatch` bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from ..flash_attention import attend_rows

NAME = "headrace_varlen"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    row_ends: torch.Tensor,
    longest_row: int,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each packed row.

    `query` is `[1, heads, S, D]`, `key` and `value` are `[1, kv_heads, S, D]`. `row_ends` (int32 `[rows + 1]`) and
    `longest_row` are `ends` and `longest` of `RowLayout`. Returns `[1, S, heads, D]` in the dtype of `value`. Raises
    ValueError for layers with sliding-window attention, because every token would see the whole past of its row.
    """
    if sliding_window is not None:
        raise ValueError(
            f"trainer.packing: got 'packed', expected 'none' or 'dynamic' for a model with sliding-window attention "
            f"(window {sliding_window})"
        )
    assert attention_mask is None, "HF makes a mask only for attention functions that have a mask function"
    # Some models leave normalised queries and keys in float32, but flash attention takes half precision only.
    q, k, v = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
    out = attend_rows(q, k, v, row_ends, row_ends, (longest_row, longest_row), scaling)
    return out[None], None


def use_varlen_attention(model: Any) -> None:
    """Make a HF model use `attend`. Its forward then needs the arguments `row_ends` and `longest_row`.

    Raises ValueError for a model whose attention function cannot be replaced.
    """
    if not model._supports_attention_backend:
        raise ValueError(
            f"trainer.packing: got 'packed', expected 'none' or 'dynamic' for {type(model).__name__}, whose attention "
            "function cannot be replaced"
        )
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
