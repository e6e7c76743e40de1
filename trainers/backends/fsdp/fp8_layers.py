"""Makes the linear layers of a HF model compute their matrix products in fp8, with torchao's float8 training.

In each pass a layer rounds its input, its weight, and the gradient of its result, each with scales that are computed
from the values themselves (Micikevicius et al. 2022, arXiv:2209.05433). Parameters stay as they are, and with them
checkpoints, exports and what is sent to engines. Only this module imports torchao's package for training.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ....actors.engines.hf.model import linear_layers
from ....dataplane.imports import MissingExtra

MULTIPLE = 16
"""Number that must divide both sizes of a weight, because the kernels compute in blocks of 16 bytes."""
OLDEST = (8, 9)
"""First compute capability of NVIDIA's GPUs that compute in fp8."""
_log = logging.getLogger(__name__)


@cache
def _library(name: str) -> Any:
    try:
        return importlib.import_module(f"torchao.float8{name}")
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torchao", "trainer.fp8", "quantized") from None


def use_fp8(model: Any, recipe: str, device: torch.device, tp: int, *, trained: bool) -> list[nn.Module]:
    """Make the linear layers of a HF causal LM's decoder compute in fp8, and return them.

    Routers, the output layer, and layers that `trainer.freeze` names are left out. recipe: value of `trainer.fp8`.
    device: that of the passes; a CPU computes the same numbers in float32. tp: number of ranks over which a layer can
    be split. trained: false for a model without an optimizer, whose parameters need no gradients. The model may be on
    the meta device. Raises ValueError, which names the key, if no layer can compute in fp8 or the GPU cannot, and
    MissingExtra without torchao.
    """
    gpu = device.type == "cuda"
    if gpu and torch.cuda.get_device_capability(device) < OLDEST:
        raise ValueError(
            f"trainer.fp8: got {recipe!r}, expected 'none' on a GPU of the kind {torch.cuda.get_device_name(device)}, "
            "which does not compute in fp8"
        )
    every = linear_layers(model)
    # torchao would compute the gradients of frozen weights, too, which costs more than the layer saves.
    wanted = {name: layer for name, layer in every.items() if layer.weight.requires_grad or not trained}
    chosen = {name for name, layer in wanted.items() if _fits(layer, MULTIPLE * tp)}
    if not chosen:
        raise ValueError(
            f"trainer.fp8: got {recipe!r}, expected 'none' for {type(model).__name__}, whose decoder has no trained "
            f"layer of torch's class Linear with sizes that are multiples of {MULTIPLE * tp}"
        )
    library = _library("")
    config = dataclasses.replace(library.Float8LinearConfig.from_recipe_name(recipe), emulate=not gpu)
    library.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    layers: list[Any] = [model.get_submodule(name) for name in chosen]
    for layer in layers:
        layer.multiply = _library(".float8_linear").matmul_with_hp_or_float8_args.apply
        layer.register_forward_pre_hook(_contiguous)
        layer.register_forward_hook(_changeable)
        # Gradients of weights are sums over tokens, whose number is arbitrary here. The other two products need no
        # padding, which would copy their operands even if nothing is missing.
        products = layer.linear_mm_config
        layer.linear_mm_config = products._replace(grad_weight=products.grad_weight._replace(pad_inner_dim=True))
    return layers


def log_layers(model: Any, recipe: str, layers: Collection[nn.Module], *, gpu: bool) -> None:
    """Log how many linear layers of a HF causal LM's decoder compute in fp8, and the names of the others. recipe: value
    of `trainer.fp8`. layers: those that compute in fp8."""
    every = linear_layers(model)
    share = sum(one.weight.numel() for one in every.values() if one in layers) / sum(
        map(torch.numel, model.parameters())
    )
    rest = ", ".join(sorted({name.rpartition(".")[2] for name, one in every.items() if one not in layers})) or "none"
    _log.info(
        "trainer.fp8=%s: %d linear layers with %.0f %% of the weights compute in fp8%s; left out: %s",
        recipe, len(layers), 100 * share, "" if gpu else ", which a CPU emulates", rest,
    )  # fmt: skip


def _contiguous(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a layer without gaps. torchao cannot make one of rows out of a transposed tensor that is
    rounded already, as Mamba's is."""
    return tuple(one.contiguous() for one in inputs)


def _changeable(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
    """Return the result of a layer as a tensor that the model may change in place, as Llama 4 does. torchao's is a view
    that a function of its own made, which autograd forbids to change."""
    return torch.ops.aten._unsafe_view(out, out.shape)  # pyright: ignore


def _fits(layer: nn.Linear, multiple: int) -> bool:
    """Return whether a layer is a plain linear layer with sizes that are multiples of `multiple`."""
    return type(layer) is nn.Linear and not (layer.in_features % multiple or layer.out_features % multiple)


@contextmanager
def exact(layers: Sequence[nn.Module]) -> Iterator[set[nn.Module]]:
    """Context in which the layers that `use_fp8` returned do not round. Checks of a model's formula need it: with a
    scale for a whole tensor, log-probs depend on all rows of a microbatch.

    Gives the set of the layers that have been called in the context. A layer whose weight is read by the model's own
    code, or by a kernel, is not called, and does not compute in fp8."""
    called = set[nn.Module]()
    if not layers:
        yield called
        return
    library, every = _library(""), [(layer, layer.config) for layer in layers]  # pyright: ignore
    off = library.CastConfig(scaling_type=library.ScalingType.DISABLED)
    plain = library.Float8LinearConfig(cast_config_input=off, cast_config_weight=off, cast_config_grad_output=off)
    hooks = [layer.register_forward_pre_hook(lambda layer, _: called.add(layer)) for layer in layers]
    try:
        for layer in layers:
            layer.config = plain
        yield called
    finally:
        for hook in hooks:
            hook.remove()
        for layer, config in every:
            layer.config = config


def product(layer: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return a linear layer's result, with a product in fp8 if the layer computes so.

    weight, bias: this rank's parts of the layer's weight, `[out, in]`, and of its bias."""
    if not hasattr(layer, "linear_mm_config"):
        return F.linear(hidden, weight, bias)
    out = layer.multiply(hidden, weight.t(), layer.linear_mm_config, layer.config)
    return out if bias is None else out + bias.to(out.dtype)
