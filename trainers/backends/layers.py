"""Decides what decoder layers keep for the backward pass, and compiles them, in both backends.

The methods are those of Chen et al. 2016 (arXiv:1604.06174), who keep the inputs of layers only, and of Korthikanti et
al. 2022 (arXiv:2205.05198), who compute again what is large but cheap. Both wrap the forward of a layer, inside FSDP's
hooks, so that a layer's parameters are gathered once for its second forward pass and its backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .config import Recompute

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
    """Return `function` as one that `torch.compile` leaves as it is. torch declares a type for its own decorator under
    which methods cannot be called."""
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

    All layers of a kind share their compiled code. It is made when the first microbatches are seen, and made again for
    varying numbers of tokens at the second of them.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
