"""Computes on one rank with bfloat16 parameters, as FSDP does on several, while the float32 ones are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def half_parameters(module: nn.Module) -> Iterator[None]:
    """Let `module` have bfloat16 copies of its parameters, whose gradients reach the float32 ones.

    The backward pass must be inside, too, as parts of the forward pass may be computed again in it. A parameter with
    several owners has one copy. The copies take 2 bytes a parameter.
    """
    copies: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for child in module.modules():
            for name, param in child._parameters.items():
                if param is not None and param.is_floating_point():
                    if id(param) not in copies:
                        copies[id(param)] = param.to(torch.bfloat16)
                    replaced.append((child._parameters, name, param))
        for owner, name, param in replaced:
            owner[name] = copies[id(param)]
        yield
    finally:
        for owner, name, param in replaced:
            owner[name] = param
