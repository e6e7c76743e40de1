"""Says which layers of a model engines run in 8 bits, for the trainer and the engines alike."""

from __future__ import annotations

from typing import Any

import torch

from ....codecs.weights.quantization import BLOCK, Quantization, Scheme

KEY = "rollout.quantization"


def quantization_of(model: str, scheme: Scheme) -> Quantization:
    """Return the quantization of a model: all its linear layers but the output layer. No weights are loaded.

    model: a folder or hub id. Raises ValueError with one sentence for a model whose layers cannot be quantized so.
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
    head = meta.get_output_embeddings()
    linear = {
        f"{name}.weight": module.weight
        for name, module in meta.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    stacked = next((name for name, weight in meta.named_parameters() if weight.ndim > 2), None)
    if stacked is not None or not linear:
        why = f"{stacked!r} is no matrix" if stacked else "it has no linear layers"
        raise ValueError(f"{KEY}: got {scheme!r}, expected 'none' for {model!r}, because {why}")
    if scheme == "fp8_block":
        for name, weight in linear.items():
            if any(size % BLOCK for size in weight.shape):
                raise ValueError(
                    f"{KEY}: got 'fp8_block', expected 'fp8' for {model!r}, because {name!r} has the shape "
                    f"{tuple(weight.shape)}, which blocks of {BLOCK} do not divide"
                )
    return Quantization(scheme, frozenset(linear))
