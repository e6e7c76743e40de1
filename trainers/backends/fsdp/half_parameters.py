"""Lets a single rank compute in bfloat16: with copies of its float32 parameters, or, without training, with no others.

On several ranks FSDP makes such copies itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def halve_parameters(module: nn.Module) -> None:
    """Change the dtype of the parameters of `module` to bfloat16, for a module that is not trained. Passes compute with
    the same values as those in `half_parameters`."""
    for param in module.parameters():
        if param.is_floating_point():
            param.data = param.data.to(torch.bfloat16)


@contextmanager
def half_parameters(module: nn.Module) -> Iterator[None]:
    """Replace the parameters of `module` by bfloat16 copies inside the context. Gradients flow to the float32
    originals.

    The backward pass must be inside the context too, because parts of the forward pass may be computed again in it. A
    parameter that several modules share has one copy. The copies take 2 bytes per parameter; a parameter that is in
    bfloat16 already is not copied.
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
