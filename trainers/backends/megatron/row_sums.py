"""Sums over rows whose tokens stand on several context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def whole_counts(counts: torch.Tensor, cp: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """int64 `[N]`, CPU: tokens of whole rows, from this rank's `counts`. Collective over `cp`."""
    if cp.size() == 1:
        return counts
    total = counts.to(device)
    dist.all_reduce(total, group=cp)
    return total.cpu()


def sum_rows(cp: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """`LossInputs.reduce_rows`: `values` `[N]` summed over `cp`, differentiable. Collective, in backward too."""
    summed = _SumRows.apply(values, cp)
    assert isinstance(summed, torch.Tensor)
    return summed


class _SumRows(torch.autograd.Function):
    """Every rank's loss uses the sum, and what is differentiated is the losses' sum; so its gradient is the sum of
    theirs."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
