"""Sorts a model's parameters by role and by name: which are trained, and at which rate and weight decay.

Names are those of the Hugging Face model. In patterns, `*` stands for any text.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..config import ParameterGroupConfig, TrainerConfig

VISION = "vision"
"""Word that stands for all weights of the vision tower in `trainer.freeze`."""


def freeze(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Exclude the parameters whose names match one of `patterns` from training, and return these names. VISION stands
    for those of the vision tower.

    Raises ValueError, which names the key, if a pattern matches no parameter or all of them are frozen.
    """
    params, frozen = dict(model.named_parameters(remove_duplicate=False)), set[str]()
    for pattern in patterns:
        pattern = f"{_tower(model)}.*" if pattern == VISION else pattern
        frozen.update(_matches(params, pattern, "trainer.freeze"))
    for name in frozen:
        params[name].requires_grad_(False)
    if frozen and not any(param.requires_grad for param in params.values()):
        raise ValueError(
            f"trainer.freeze: got {list(patterns)}, which freezes all weights of {type(model).__name__}, expected "
            "patterns that leave some to train"
        )
    return frozen


def _tower(model: Any) -> str:
    """Return the name of the vision tower of a HF model. Raises ValueError, which names the key, if it has none."""
    tower = model.get_encoder(modality="image")
    name = next((name for name, module in model.named_modules() if module is tower), "")
    if not name:
        raise ValueError(
            f"trainer.freeze: got {VISION!r}, expected patterns of names, because {type(model).__name__} has no vision "
            "tower"
        )
    return name


def settings_by_name(model: nn.Module, config: TrainerConfig) -> dict[str, tuple[float, float]]:
    """Return the weight decay and the factor of the learning rate of each trained parameter of `model`, by name. A tied
    parameter has all of its names.

    Raises ValueError, which names the key, if a pattern of `trainer.groups` matches no trained parameter.
    """
    trained = {name: param for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
    chosen: dict[int, ParameterGroupConfig] = {}
    for group in config.groups:
        for name in _matches(trained, group.pattern, "trainer.groups"):
            chosen.setdefault(id(trained[name]), group)  # The first pattern decides.
    without, found = undecayed(model), dict[str, tuple[float, float]]()
    for name, param in trained.items():
        own = chosen.get(id(param), ParameterGroupConfig(pattern="*"))
        decay = 0.0 if id(param) in without else config.weight_decay
        found[name] = (decay if own.weight_decay is None else own.weight_decay, own.lr_factor)
    return found


def parameter_groups(model: nn.Module, config: TrainerConfig) -> list[dict[str, Any]]:
    """Return the groups of trained parameters of `model`, as torch's optimizers take them.

    Each group has `params`, `weight_decay`, `lr_factor` (by which the run's learning rate is multiplied) and `hidden`
    (true for the matrices that `muon` can orthogonalise). Its parameters are DTensors of one mesh, or plain tensors,
    because fused kernels take no mixture. Raises what `settings_by_name` raises.
    """
    settings, hidden = settings_by_name(model, config), hidden_matrices(model)
    sorts: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            sorts.setdefault((*settings[name], id(param) in hidden, mesh), []).append(param)
    return [
        {"params": params, "weight_decay": decay, "lr_factor": factor, "hidden": is_hidden}
        for (decay, factor, is_hidden, _), params in sorts.items()
    ]


def undecayed(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter whose role excludes it from weight decay: norms, biases, rates and scales.

    The role decides, not the shape: GPT-OSS has a matrix of biases for its experts, Cohere norms for each head, and
    Mamba a matrix `A_log` of rates. Every vector is a bias, a scale or a rate.
    """
    return {id(param) for kind, param in _roles(model) if kind == "scale"}


def hidden_matrices(model: nn.Module) -> set[int]:
    """Return the `id` of each matrix between embedding and output layer, which `muon` orthogonalises.

    Experts that a model keeps as one stacked tensor are not among them, because torch's Muon takes matrices only.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    own = set() if head is None else {id(param) for param in head.parameters()}
    return {
        id(param)
        for kind, param in _roles(model)
        if kind == "matrix" and param.ndim == 2 and id(param) not in own
    }  # fmt: skip


def _roles(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield `scale`, `embedding` or `matrix` with each parameter. A tied one comes once for each of its owners."""
    for module in model.modules():
        norm = "norm" in type(module).__name__.lower()
        for name, param in module.named_parameters(recurse=False):
            if norm or param.ndim < 2 or name.endswith("bias") or name == "A_log":
                yield "scale", param
            else:
                yield "embedding" if isinstance(module, nn.Embedding) else "matrix", param


def _matches(params: dict[str, nn.Parameter], pattern: str, key: str) -> list[str]:
    found = [name for name in params if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(
            f"{key}: got the pattern {pattern!r}, which matches no trained weight, expected one with `*` for any text, "
            f"which matches names such as {next(iter(params), 'none')!r}"
        )
    return found
