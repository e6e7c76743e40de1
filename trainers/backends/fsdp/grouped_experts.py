"""Computes the experts of a HF model by grouped matrix products, without sorting in the backward pass.

transformers' own function gathers the tokens of each expert by indices. Autograd does not know that these are a
permutation, and adds up gradients by sorting the indices once more, which takes longer than the products themselves on
a GPU. Here the gradient is gathered by the inverse permutation. Gates are applied to the narrow values between the two
products where the experts have no bias. The function is registered with transformers, which calls it in place of its
own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..lora.adapted_layers import LoraSwitch

NAME = "headrace_grouped"
"""Name under which transformers knows the function."""


def use_grouped_experts(model: Any) -> None:
    """Make the experts of a HF model use `compute_experts`, where they have the interface of transformers."""
    if any(hasattr(child, "is_transposed") and hasattr(child, "has_gate") for child in model.modules()):
        ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
        model.set_experts_implementation(NAME)


def compute_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the experts' contribution to all tokens, `[T, H]`.

    module: experts of transformers, stacked. hidden_states: `[T, H]`. top_k_index: the experts of each token, int64
    `[T, k]`; one past the last for an expert of another rank, which contributes nothing. top_k_weights: `[T, k]`.
    """
    top_k, count = top_k_index.shape[1], module.num_experts
    chosen, order = top_k_index.flatten().sort(stable=True)
    inverse = order.argsort()
    ends = torch.searchsorted(chosen, torch.arange(1, count + 1, device=chosen.device), out_int32=True)
    x = permute(hidden_states, order, inverse, top_k)
    shares = top_k_weights.flatten()[order, None].to(x.dtype)
    apart = getattr(module, "_is_expert_parallel", False)  # transformers has this attribute since 5.19.
    elsewhere = (chosen >= count)[:, None] if apart else None
    expert = chosen.clamp(max=count - 1)
    first = module.gate_up_proj if module.has_gate else module.up_proj
    first_bias = last_bias = None
    if module.has_bias:
        first_bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert]
        last_bias = module.down_proj_bias[expert]
    inner = _products(x, first, ends, first_bias, elsewhere, transposed=module.is_transposed)
    inner = _with_adapter(module, "gate_up_proj" if module.has_gate else "up_proj", inner, x, ends, elsewhere)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    inner = inner if module.has_bias else inner * shares
    out = _products(inner, module.down_proj, ends, last_bias, elsewhere, transposed=module.is_transposed)
    out = _with_adapter(module, "down_proj", out, inner, ends, elsewhere)
    out = out * shares if module.has_bias else out
    back = permute(out, inverse, order)
    return back.view(-1, top_k, back.shape[-1]).sum(1).to(hidden_states.dtype)


def _with_adapter(
    module: Any, name: str, out: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, elsewhere: torch.Tensor | None
) -> torch.Tensor:
    """Return `out` with the products of the weight's adapter added, if it has one and its switch is on.

    out: products of the rows of each expert, which end at `ends`, with the weight `name`. elsewhere: as in `_products`.
    """
    switch: LoraSwitch | None = getattr(module, "lora", None)
    if switch is None or not switch.on:
        return out
    first, second = (getattr(module, f"{name}_lora_{matrix}") for matrix in "AB")
    rows = F.dropout(rows, switch.dropout, training=switch.drops)
    inner = _products(rows, first, ends, None, elsewhere, transposed=False)
    return out + _products(inner, second, ends, None, elsewhere, transposed=False) * switch.scaling


def _products(
    rows: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    elsewhere: torch.Tensor | None,
    *,
    transposed: bool,
) -> torch.Tensor:
    """Multiply the rows of each expert, which end at `ends`, with the expert's matrix. elsewhere: bool `[S, 1]`, true
    for the last rows, which have no expert here and become zeros; None if there are none."""
    if elsewhere is not None:  # The kernel leaves these rows without values, in the backward pass too.
        rows = rows.masked_fill(elsewhere, 0.0)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        out = F.grouped_mm(rows, weights if transposed else weights.transpose(1, 2), offs=ends)
    else:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = rows.split([*sizes, len(rows) - sum(sizes)])
        done = [F.linear(part, one.T if transposed else one) for part, one in zip(parts, weights, strict=False)]
        out = torch.cat([*done, rows.new_zeros(len(parts[-1]), done[0].shape[1])])
    out = out if bias is None else out + bias
    return out if elsewhere is None else out.masked_fill(elsewhere, 0.0)


class _Permute(torch.autograd.Function):
    """Returns `rows[order // k]`, in which each row is `k` times. `inverse` is the inverse of the permutation `order`,
    by which backward gathers the gradients of a row and sums them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return rows.index_select(0, order // k if k > 1 else order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [inverse] = ctx.saved_tensors
        found = grads[0].index_select(0, inverse)
        return found.view(-1, ctx.k, found.shape[-1]).sum(1) if ctx.k > 1 else found, None, None, None


def permute(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Return `rows[order // k]`, `[len(order), ...]`. inverse: the inverse of the permutation `order`."""
    found: Any = _Permute.apply(rows, order, inverse, k)
    return found
