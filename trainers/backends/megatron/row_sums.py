"""Computes sums over rows whose tokens are split over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def whole_counts(counts: torch.Tensor, cp: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the tokens of each of N rows, the sum of the context-parallel ranks' `counts`: int64 `[N]` on the CPU.
    Collective over `cp`."""
    if cp.size() == 1:
        return counts
    total = counts.to(device)
    dist.all_reduce(total, group=cp)
    return total.cpu()


def sum_rows(cp: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """Sum `values` `[N]` over the context-parallel ranks, differentiably, as `LossInputs.reduce_rows` requires.

    Collective over `cp`, also in backward.
    """
    summed = _SumRows.apply(values, cp)
    assert isinstance(summed, torch.Tensor)
    return summed


class _SumRows(torch.autograd.Function):
    """Sums values over ranks in forward, and gradients over ranks in backward.

    The gradients are summed because every rank's loss uses the sum and the losses of all ranks are added up.
    """

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
