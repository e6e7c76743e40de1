"""Gives the RMS norms of a HF model a backward pass in closed form, for training on CPUs.

Autograd's own takes some ten passes over memory for each norm, and this one four. The forward pass is the same to the
bit. On GPUs `trainer.compile` fuses norms with what is around them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


def use_closed_form_norms(model: nn.Module) -> None:
    """Make the RMS norms of `model` use the closed form, for inputs and weights that are plain float32 tensors. Norms
    with another formula stay as they are. The model may be on the meta device."""
    for module in model.modules():
        closed = _closed_form(type(module)) if hasattr(module, "variance_epsilon") else None
        if closed is not None:
            module.__class__ = closed


@functools.cache
def _closed_form(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return a subclass of the norms `kind` that uses the closed form; None if they have another formula."""
    width, epsilon = 8, 1e-3
    with torch.device("cpu"), torch.no_grad():
        try:
            norm: Any = kind(width, eps=epsilon)
        except TypeError:
            return None
        weight = getattr(norm, "weight", None)
        if weight is None or weight.shape != (width,):
            return None
        steps = torch.arange(width, dtype=torch.float32)
        norm.weight.copy_(torch.sin(1 + steps))
        x = torch.stack([torch.cos(steps), torch.exp(steps / 4)])
        if not torch.equal(norm(x), _RmsNorm.apply(x, norm.weight, epsilon)):
            return None
    own: Any = kind.forward

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        plain = type(hidden_states) is torch.Tensor and type(self.weight) is nn.Parameter
        if not plain or not hidden_states.dtype == self.weight.dtype == torch.float32:
            return own(self, hidden_states)
        return _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


class _RmsNorm(torch.autograd.Function):
    """Computes `y = w * x * r` with `r = rsqrt(mean(x^2) + epsilon)` over the last dimension. It is Zhang and Sennrich
    2019, arXiv:1910.07467.

    With the gradient `g` of `y`, that of `x` is `r * w * g - x * r^3 * mean(g * w * x)`, and that of `w` is the sum of
    `g * x * r` over all positions.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        # Laid out as `x` is: the gradient of queries and keys comes transposed, and would be copied once more.
        product = torch.mul(x, grads[0], out=torch.empty_like(x))
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.mv(product.reshape(-1, width).t(), inverse.reshape(-1))
        factor = (product @ weight).unsqueeze(-1).mul_(inverse.pow(3)).div_(width)
        of_x = torch.mul(grads[0], weight, out=product).mul_(inverse).addcmul_(x, factor, value=-1)
        return of_x, of_weight, None
