"""Makes decoder layers fast in both backends: attention within packed rows, kept activations, and compilation.

Attention within packed rows is one kernel on GPUs, which compiled layers contain. The choice of activations that are
kept for the backward pass follows Chen et al. 2016 (arXiv:1604.06174), who keep the inputs of layers only, and
Korthikanti et al. 2022 (arXiv:2205.05198), who compute again what is large but cheap. Recomputation and compilation
wrap the forward of a layer inside FSDP's hooks, so that a layer's parameters are gathered once for its second forward
pass and its backward pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .config import Recompute

LONG_ROW = 8192
"""Smallest number of tokens of a row that cuDNN's kernel computes in a separate call. On an H200 this kernel takes half
the time of the variable-length kernel at 4k to 64k tokens. For each new length cuDNN makes a plan, whose cost only long
rows recover."""
_WIDEST_HEAD = 128
"""Largest width of a head for cuDNN's kernel."""
# torch 2.12 has this parameter; 2.11 does not.
_SHARED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Compute causal attention within rows, in bfloat16 or float16. Returns `[Q, heads, D]`.

    `q` is `[Q, heads, D]`, `k` and `v` are `[K, kv_heads, D]`, row by row. The queries of a row belong to the last
    tokens of the row. `query_ends` and `key_ends` (int32 `[rows + 1]`) are 0, then the end of each row; `longest` has
    the largest number of queries and of keys of a row. With `window` a query sees only that many keys, the last of them
    its own. A long row that is alone is computed by cuDNN where the GPU has
    its kernel.
    """
    alone = len(query_ends) == 2 and len(q) == len(k) >= LONG_ROW
    if alone and window is None and q.shape[-1] <= _WIDEST_HEAD and _is_hopper():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            query, key, value = (part.transpose(0, 1)[None] for part in (q, k, v))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    options: dict[str, Any] = {"enable_gqa": True} if _SHARED_HEADS else {}
    if not _SHARED_HEADS:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    seen = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, query_ends, key_ends, *longest, scale=scale, window_size=seen, **options)
    assert isinstance(out, torch.Tensor)
    return out


@torch.compiler.assume_constant_result
def _is_hopper() -> bool:
    """Return whether the GPU is of the H100's generation or later, where cuDNN's kernel is the faster one."""
    return torch.cuda.get_device_capability() >= (9, 0)


_KEPT = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward", "torch_attn::_varlen_attn",
)  # fmt: skip
"""Operators whose results `selective` keeps: matrix products and attention, which take most of the time. Norms, rotary
embeddings, activations and sums are computed again."""

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return `function` marked so that `torch.compile` does not compile it. With the type that torch declares for its
    own decorator, type checkers reject calls of methods."""
    return cast(Function, torch.compiler.disable(function))


def recompute_layers(layers: Sequence[nn.Module], mode: Recompute, count: int | None = None) -> None:
    """Make the first `count` layers (None: all) keep for the backward pass what `mode` says, and recompute the rest.

    HF's own option works in training mode only, which would also turn dropout on.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers[:count]:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile each layer's forward with torch.compile. It fuses its norms, rotary embeddings, activations and sums.

    All layers of a kind share their compiled code. The code is compiled at the first microbatch, and once more at the
    second for varying numbers of tokens.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
