"""Gives the linear layers of a HF model rounded weights, from which each pass restores the weight that it needs.

A layer keeps its class and its name. Instead of the parameter `weight` it has two buffers, which no rank shards, and
`weight` restores the weight from them. A pass keeps no restored weight for its backward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..checkpoint_files import on_first_rank
from ..hf_model import HfSource
from ..layers import uncompiled
from ..lora_config import LoraConfig
from .adapted_layers import find_targets
from .matrices import is_matrix
from .rounding import Rounding, restore_weight, round_weight


def round_layers(model: Any, kind: Rounding, dtype: torch.dtype) -> None:
    """Take the weights of the linear layers of a HF causal LM's decoder away, so that `fill_rounded` can round them.

    Routers and the output layer keep theirs. dtype: dtype in which passes compute.
    """
    for name in find_targets(model, LoraConfig()):
        layer: Any = model.get_submodule(name)
        del layer.weight
        layer.rounding, layer.computes = kind, dtype
        layer.__class__ = _rounded(type(layer))


class _Rounded(nn.Module):
    """Mixed into the class of a linear layer whose weight is rounded."""

    @property
    def weight(self) -> torch.Tensor:
        """The restored weight, `[out, in]`, in the dtype of passes. Some models read it themselves."""
        layer: Any = self
        return restored(layer, layer.computes)

    @uncompiled
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        own: Any = super()
        if own.forward.__func__ is not nn.Linear.forward:  # Such a layer reads `weight`.
            return own.forward(hidden)
        return _Product.apply(hidden, self, self.bias)


@functools.cache
def _rounded(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of layers of the class `kind` whose weights are rounded."""
    return type(kind.__name__, (_Rounded, kind), {"__module__": kind.__module__})


class _Product(torch.autograd.Function):
    """Computes `W x + b` of a frozen layer. The backward pass restores the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return F.linear(hidden, restored(layer, hidden.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0] @ restored(ctx.layer, grads[0].dtype), None, None


def restored(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a layer with a rounded weight, `[out, in]`, in `dtype`."""
    shape = (layer.out_features, layer.in_features)
    return restore_weight(layer.rounded_data, layer.rounded_scale, layer.rounding, shape, dtype)


def rounded_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with rounded weights by the names of their weights."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, _Rounded)}


def fill_rounded(
    model: nn.Module, original: str, rounded: str, *, device: torch.device, rank: int, world: int
) -> frozenset[str]:
    """Give the layers of `model` their rounded weights on `device`, and return the names of these weights. Collective.

    original: folder or hub id of the model before rounding, whose weights each rank reads and rounds on the CPU.
    rounded: folder of the engines' weights, with which rank 0 compares them. Raises ValueError on every rank, which
    names the weight, if one of them differs.
    """
    layers, source = rounded_layers(model), HfSource(original)
    for name, layer in layers.items():
        data, scale = round_weight(source.tensor(name), layer.rounding)
        # They are no part of checkpoints and folders.
        layer.register_buffer("rounded_data", data.to(device), persistent=False)
        layer.register_buffer("rounded_scale", scale.to(device), persistent=False)
    on_first_rank(lambda: _expect_rounded(model, source, rounded), rank, world)
    return frozenset(layers)


def _expect_rounded(model: nn.Module, original: HfSource, folder: str) -> None:
    """Raise ValueError unless the folder of the engines has the weights of `model`, bit by bit.

    Rounded weights are compared in float32 and in the dtype of passes, all others with those of `original`.
    """
    layers, rounded = rounded_layers(model), HfSource(folder)
    kept = [name for name, _ in model.named_parameters() if not is_matrix(name)]
    for name in (*layers, *kept):
        stored, layer = rounded.tensor(name), layers.get(name)
        if layer is None:
            same = torch.equal(stored, original.tensor(name))
        else:
            pairs = ((stored.to(dtype), restored(layer, dtype).cpu()) for dtype in (stored.dtype, layer.computes))
            same = stored.dtype == torch.float32 and all(torch.equal(one, other) for one, other in pairs)
        if not same:
            raise ValueError(
                f"trainer.lora.base: {name!r} in {folder} is not the rounded weight of model.path; the folder is "
                "damaged, or of another model or trainer.lora.base: delete it, and it is made again"
            )
