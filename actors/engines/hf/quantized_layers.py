"""Says which layers of a model engines run in 8 bits, for the trainer and the engines alike."""

from __future__ import annotations

from typing import Any

import torch

from ....codecs.weights.quantization import BLOCK, Quantization, Scheme

KEY = "rollout.quantization"
_STACKED = {"gate_up_proj", "down_proj"}
"""Names of the weights of stacked experts, of which each row makes one output."""


def quantization_of(model: str, scheme: Scheme) -> Quantization:
    """Return the quantization of a model, of which no weights are loaded.

    All linear layers and experts of its text part are quantized, without routers and the output layer. Routers stay as
    they are, because rounding changes the choice, and vLLM does not quantize them. model: a folder or hub id. Raises
    ValueError with one sentence for a model whose layers cannot be quantized so.
    """
    # The imports take seconds, and the driver only passes this function on.
    from transformers import AutoConfig

    from .model import auto_class

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        meta: Any = auto_class(config).from_config(config)
    return quantization_of_layers(meta, model, scheme)


def quantization_of_layers(meta: Any, model: str, scheme: Scheme) -> Quantization:
    """Return the quantization of a model that is on the meta device. model: its folder or hub id, for errors."""
    from .model import find_experts, linear_layers

    def refusal(why: str, other: str = "none") -> ValueError:
        return ValueError(f"{KEY}: got {scheme!r}, expected {other!r} for {model!r}, because {why}")

    weights = {f"{name}.weight": layer.weight for name, layer in linear_layers(meta).items()}
    for name, module in find_experts(meta):
        stacked = dict(module.named_parameters(recurse=False))
        if stacked.keys() != _STACKED or getattr(module, "is_transposed", False):
            raise refusal(f"the experts {name!r} are no stacked matrices {' and '.join(sorted(_STACKED))}")
        weights |= {f"{name}.{key}": weight for key, weight in stacked.items()}
    if not weights:
        raise refusal("it has no linear layers")
    for name, weight in weights.items() if scheme == "fp8_block" else ():
        rows, columns = weight.shape[-2:]
        rows //= 2 if name.endswith("gate_up_proj") and weight.ndim > 2 else 1  # Engines keep both apart.
        if rows % BLOCK or columns % BLOCK:
            raise refusal(f"{name!r} has the shape {tuple(weight.shape)}, which blocks of {BLOCK} do not divide", "fp8")
    return Quantization(scheme, frozenset(weights))
