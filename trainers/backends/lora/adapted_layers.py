"""Adds LoRA's matrices to the linear layers of a HF model, and switches them on and off.

A target layer keeps its class, its weight and its name; two children, `lora_A` and `lora_B`, hold the matrices. The
layer's result gets `scaling * B A x` added. Everything else of the model is frozen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ....actors.engines.hf.model import find_experts, linear_layers
from ..lora_config import ALL_LINEAR, LoraConfig
from .matrices import is_matrix, target_of

MATRICES = ("lora_A", "lora_B")
"""Names of the two children of a target layer."""


@dataclass(slots=True)
class LoraSwitch:
    """Switches the adapter of a model on and off in its passes. All of its layers share one switch."""

    scaling: float
    dropout: float = 0.0
    on: bool = True
    drops: bool = False
    """True in training passes, in which inputs are dropped."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the model is the base, without its adapter."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Context of a training pass, in which inputs of the adapter are dropped."""
        self.drops = True
        try:
            yield
        finally:
            self.drops = False


def find_targets(model: Any, config: LoraConfig) -> list[str]:
    """Return the names of the linear layers of a HF causal LM that get an adapter.

    Raises ValueError, which names the key, if a target fits no layer of the decoder, or if there is none.
    """
    if config.targets == ALL_LINEAR:
        found = list(linear_layers(model))
        if not found:
            raise ValueError(
                f"trainer.lora.targets: got {ALL_LINEAR!r}, expected a model with linear layers; "
                f"{type(model).__name__} has none in its decoder"
            )
        return found
    layers = linear_layers(model, with_routers=True)
    for target in config.targets:
        if not any(_fits(name, target) for name in layers):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none"
            raise ValueError(
                f"trainer.lora.targets: got {target!r}, which no linear layer of {type(model).__name__} is called, "
                f"expected {ALL_LINEAR!r} or names among {there}"
            )
    return [name for name in layers if any(_fits(name, target) for target in config.targets)]


def _fits(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def add_adapter(model: Any, config: LoraConfig) -> LoraSwitch:
    """Freeze a HF causal LM and give its target layers the matrices of an adapter. Returns the adapter's switch.

    The matrices are in float32, on the device of the layer, and have no values yet. Raises what `find_targets` raises,
    and ValueError, which names the key, for experts that cannot have an adapter.
    """
    names = find_targets(model, config)
    model.requires_grad_(False)
    switch, device = LoraSwitch(config.scaling, config.dropout), next(model.parameters()).device
    for name in names:
        layer: Any = model.get_submodule(name)
        options: dict[str, Any] = {"bias": False, "dtype": torch.float32, "device": device}
        layer.lora_A = nn.Linear(layer.in_features, config.rank, **options)
        layer.lora_B = nn.Linear(config.rank, layer.out_features, **options)
        layer.lora = switch
        layer.__class__ = _adapted(type(layer))
    if config.experts:
        _add_to_experts(model, config, switch)
    return switch


def _add_to_experts(model: Any, config: LoraConfig, switch: LoraSwitch) -> None:
    """Give all weights of all stacked experts of a model the matrices of an adapter. Raises ValueError if it has no
    experts, or none that are computed by a function that can be replaced."""
    found = find_experts(model)
    if not found or not all(hasattr(experts, "is_transposed") and hasattr(experts, "has_gate") for _, experts in found):
        raise ValueError(
            f"trainer.lora.experts: got true, expected false for {type(model).__name__}, which has "
            f"{'experts with code of their own' if found else 'no stacked experts'}"
        )
    for _, experts in found:
        layer: Any = experts
        layer.lora = switch
        for name, param in list(layer.named_parameters(recurse=False)):
            if param.ndim == 3:
                count, outputs, inputs = param.shape
                outputs, inputs = (inputs, outputs) if layer.is_transposed else (outputs, inputs)
                options: dict[str, Any] = {"dtype": torch.float32, "device": param.device}
                for matrix, size in (("A", (config.rank, inputs)), ("B", (outputs, config.rank))):
                    layer.register_parameter(
                        f"{name}_lora_{matrix}", nn.Parameter(torch.empty(count, *size, **options))
                    )


class _Adapted(nn.Module):
    """Mixed into the class of a target layer, whose result it adds the adapter's to."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return with_adapter(self, super().forward(hidden), hidden)


@functools.cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of target layers of the class `kind`. All have the same, because torch.compile compiles code
    again for each class."""
    return type(kind.__name__, (_Adapted, kind), {"__module__": kind.__module__})


def with_adapter(layer: Any, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return `out` with the result of the layer's adapter added, if it has one and its switch is on.

    out: result of the linear layer for `hidden`. With tensor parallelism, it and the matrices are this rank's parts.
    """
    switch: LoraSwitch | None = getattr(layer, "lora", None)
    if switch is None or not switch.on:
        return out
    hidden = F.dropout(hidden, switch.dropout, training=switch.drops)
    first, second = (_local(getattr(layer, part).weight) for part in MATRICES)
    narrow = F.linear(hidden.to(first.dtype), first) * switch.scaling
    if second.dtype != out.dtype:
        return out + F.linear(narrow, second).to(out.dtype)
    # One kernel multiplies and adds; a sum of its own would read and write both results once more.
    return torch.addmm(out.flatten(0, -2), narrow.flatten(0, -2), second.t()).view(out.shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def matrix_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters of a model that are matrices of its adapter."""
    return [name for name, _ in model.named_parameters() if is_matrix(name)]


def expect_gradients(model: nn.Module) -> None:
    """Raise ValueError if the adapter of a layer took no part in the passes of a step, but others did.

    The error names the layer. Some models read the weight of a layer without calling the layer, so that the adapter
    would have no effect.
    """
    params = {name: param for name, param in model.named_parameters() if is_matrix(name)}
    idle = [name for name, param in params.items() if param.grad is None]
    if idle and len(idle) < len(params):
        target, _ = target_of(idle[0])
        left = {target_of(name)[0].split(".")[-2] for name in params.keys() - set(idle)}
        raise ValueError(
            f"trainer.lora.targets: the adapter of {target!r} took no part in the model's passes, because the model "
            f"reads this weight itself; expected a list without it, such as {sorted(left)}"
        )
