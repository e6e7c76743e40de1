"""Adds LoRA's matrices to the linear layers of a HF model, and switches them on and off.

A target layer keeps its class, its weight and its name; two children, `lora_A` and `lora_B`, hold the matrices. The
layer's result gets `scaling * B A x` added. Everything else of the model is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from .config import ALL_LINEAR, LoraConfig

MATRICES = ("lora_A", "lora_B")
"""Names of the two children of a target layer."""
_CHOOSERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of the layers that choose experts or weigh them, which `all-linear` leaves out."""


@dataclass(slots=True)
class LoraSwitch:
    """Whether the adapter of a model takes part in its passes. All of its layers share one."""

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
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    layers = {
        f"{prefix}.{name}": module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
    }
    if config.targets == ALL_LINEAR:
        found = [name for name in layers if name.rpartition(".")[2] not in _CHOOSERS]
        if not found:
            raise ValueError(
                f"trainer.lora.targets: got {ALL_LINEAR!r}, expected a model with linear layers; "
                f"{type(model).__name__} has none in its decoder"
            )
        return found
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
    """Freeze a HF causal LM and give its target layers the matrices of an adapter, in float32 on the device of the
    model and without values. Returns the switch of the adapter. Raises what `find_targets` raises."""
    names = find_targets(model, config)
    model.requires_grad_(False)
    switch, device = LoraSwitch(config.scaling, config.dropout), next(model.parameters()).device
    for name in names:
        layer: Any = model.get_submodule(name)
        options: dict[str, Any] = {"bias": False, "dtype": torch.float32, "device": device}
        layer.lora_A = nn.Linear(layer.in_features, config.rank, **options)
        layer.lora_B = nn.Linear(config.rank, layer.out_features, **options)
        layer.lora = switch
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (_Adapted, kind), {"__module__": kind.__module__})
    return switch


class _Adapted(nn.Module):
    """Mixed into the class of a target layer, whose result it adds the adapter's to."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return with_adapter(self, super().forward(hidden), hidden)


def with_adapter(layer: Any, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return `out`, the result of a linear layer for `hidden`, with that of the layer's adapter added, if it has one
    and its switch is on. With tensor parallelism, `out` and the matrices are this rank's parts."""
    switch: LoraSwitch | None = getattr(layer, "lora", None)
    if switch is None or not switch.on:
        return out
    hidden = F.dropout(hidden, switch.dropout, training=switch.drops)
    first, second = (_local(getattr(layer, part).weight) for part in MATRICES)
    return out + F.linear(F.linear(hidden.to(first.dtype), first), second).to(out.dtype) * switch.scaling


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def target_names(model: nn.Module) -> list[str]:
    """Return the names of the layers that have an adapter."""
    return [name for name, module in model.named_modules() if hasattr(module, "lora_A")]


def expect_gradients(model: nn.Module) -> None:
    """Raise ValueError, which names the layer, if a layer's adapter took no part in the passes of a step, but others
    did.

    Some models read the weight of a layer without calling the layer, so that the adapter would have no effect.
    """
    names = target_names(model)
    idle = [name for name in names if model.get_submodule(f"{name}.lora_B").weight.grad is None]
    if len(idle) < len(names):
        for name in idle:
            others = sorted({one.rpartition(".")[2] for one in set(names) - set(idle)})
            raise ValueError(
                f"trainer.lora.targets: the adapter of {name!r} took no part in the model's passes, because the model "
                f"reads the layer's weight itself; expected a list without it, such as {others}"
            )


def is_matrix(name: str) -> bool:
    """Return whether the parameter `name` belongs to an adapter."""
    return name.split(".")[-2] in MATRICES if "." in name else False


def module_of(name: str) -> str:
    """Return the name of the target layer of the parameter `name` of an adapter."""
    return name.rsplit(".", 2)[0]
