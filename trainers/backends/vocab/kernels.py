"""Triton kernels that read and replace the logits of a chunk of tokens once, in the precision in which they come.

Plain torch would first copy the logits of a chunk to float32 and then write the softmax, the loss and their gradients
as further copies of that size, which takes as long as the matrix product. `logprobs` has the same functions in plain
torch.
"""

from __future__ import annotations

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false
# Types are also checked on machines without Triton. A kernel's grid is an index, and its sums have no types.
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 4096
"""Number of logits that a program reads at a time."""
_WARPS = 16


@triton.jit
def _sums_kernel(
    logits, stride, targets, log_totals, picked, entropies, width, inverse_temperature,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    # For each lane the maximum m, the sum of exp(z - m), and that of exp(z - m) (z - m); all are joined at the end.
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < width
        z = tl.load(base + place, mask=inside, other=-1e30).to(tl.float32) * inverse_temperature
        z = tl.where(inside, z, -1e30)
        higher = tl.maximum(top, z)
        scale, new = tl.exp(top - higher), tl.exp(z - higher)
        if WITH_ENTROPY:
            weighted = (weighted + total * (top - higher)) * scale + new * (z - higher)
        total = total * scale + new
        top = higher
    highest = tl.max(top, axis=0)
    scale = tl.exp(top - highest)
    whole = tl.sum(total * scale, axis=0)
    tl.store(log_totals + row, highest + tl.log(whole))
    target = tl.load(targets + row)
    tl.store(picked + row, tl.load(base + target).to(tl.float32) * inverse_temperature)
    if WITH_ENTROPY:
        moved = (weighted + total * (top - highest)) * scale
        tl.store(entropies + row, tl.log(whole) - tl.sum(moved, axis=0) / whole)


@triton.jit
def _gradient_kernel(
    logits, stride, targets, log_totals, of_logprobs, entropies, of_entropies, width, inverse_temperature,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    target, log_total, of_logprob = tl.load(targets + row), tl.load(log_totals + row), tl.load(of_logprobs + row)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < width
        z = tl.load(base + place, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        chance = tl.exp(z - log_total)
        gradient = tl.where(place == target, of_logprob, 0.0) - chance * of_logprob
        if WITH_ENTROPY:
            entropy, of_entropy = tl.load(entropies + row), tl.load(of_entropies + row)
            gradient -= chance * (z - log_total + entropy) * of_entropy
        tl.store(base + place, (gradient * inverse_temperature).to(logits.dtype.element_ty), mask=inside)


def softmax_sums(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Do what `logprobs.softmax_sums` does, in one kernel."""
    rows, width = logits.shape
    log_totals, picked = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    entropies = torch.empty_like(picked) if with_entropy else None
    if rows:
        kernel: Any = _sums_kernel[(rows,)]
        kernel(
            logits, logits.stride(0), targets, log_totals, picked, picked if entropies is None else entropies, width,
            1.0 / temperature, WITH_ENTROPY=with_entropy, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return log_totals, picked - log_totals, entropies


def softmax_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    log_totals: torch.Tensor,
    of_logprobs: torch.Tensor,
    entropies: torch.Tensor | None,
    of_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """Do what `logprobs.softmax_gradient` does, in one kernel that overwrites `logits`."""
    rows, width = logits.shape
    with_entropy = entropies is not None and of_entropies is not None
    if rows:
        kernel: Any = _gradient_kernel[(rows,)]
        kernel(
            logits, logits.stride(0), targets, log_totals, of_logprobs, entropies if with_entropy else log_totals,
            of_entropies if with_entropy else log_totals, width, 1.0 / temperature,
            WITH_ENTROPY=with_entropy, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return logits
