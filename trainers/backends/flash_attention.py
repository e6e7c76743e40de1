"""Computes causal attention within packed rows on GPUs, in one kernel that compiled layers contain."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

LONG_ROW = 8192
"""Least number of tokens of a row that has a call of cuDNN's kernel to itself. On an H200 that takes half of the time
of the variable-length kernel at 4k to 64k tokens, but cuDNN makes a plan for each new length: only long rows make up
for it."""
_WIDEST_HEAD = 128
"""Largest width of a head for cuDNN's kernel."""
_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.12 has it, 2.11 has not


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """Compute causal attention within rows, in bfloat16 or float16. Returns `[Q, heads, D]`.

    `q` is `[Q, heads, D]`, `k` and `v` are `[K, kv_heads, D]`, row by row. The queries of a row are the last of its
    keys. `query_ends` and `key_ends` (int32 `[rows + 1]`) are 0, then the end of each row; `longest` has the largest
    number of queries and of keys of a row. A long row that is alone is computed by cuDNN where the GPU has its kernel.
    """
    if len(query_ends) == 2 and len(q) == len(k) >= LONG_ROW and q.shape[-1] <= _WIDEST_HEAD and _is_hopper():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            query, key, value = (part.transpose(0, 1)[None] for part in (q, k, v))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    options: dict[str, Any] = {"enable_gqa": True} if _SHARED_HEADS else {}
    if not _SHARED_HEADS:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    out = varlen_attn(q, k, v, query_ends, key_ends, *longest, scale=scale, window_size=(-1, 0), **options)
    assert isinstance(out, torch.Tensor)
    return out


@torch.compiler.assume_constant_result
def _is_hopper() -> bool:
    """Return whether the GPU is of the H100's generation or later, where cuDNN's kernel is the faster one."""
    return torch.cuda.get_device_capability() >= (9, 0)
