"""The sum of `gpu_digest` as one Triton kernel, which reads at the speed of memory.

Torch's sums down columns reach a quarter of it (on an H200, 1 of 4 TB/s). Needs Triton, which CUDA builds of torch
bring, and a C compiler.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_STEPS = 16
MAX_WORDS = (1 << 31) - _BLOCK * _STEPS
"""Most that one call takes: they are counted in 32 bits."""


@triton.jit(do_not_specialize=["num_words"])
def _weighted_sum(words, weights, out, num_words, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    # Triton reads these annotations: it knows its own, and no others.
    start = tl.program_id(0) * BLOCK * STEPS
    total = tl.zeros([BLOCK], dtype=tl.int64)
    if start + BLOCK * STEPS <= num_words:  # nothing to leave out: two words a load
        for step in range(STEPS):
            at = start + step * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(words + at) * tl.load(weights + at % COLUMNS)
    else:
        for step in range(STEPS):
            at = start + step * BLOCK + tl.arange(0, BLOCK)
            word = tl.load(words + at, mask=at < num_words, other=0)
            total += word * tl.load(weights + at % COLUMNS)
    tl.atomic_add(out, tl.sum(total, axis=0))


def weighted_sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64, 0-d: the sum of `words[i] * weights[i % len(weights)]` modulo 2**64, queued on the current stream. words,
    weights: int64, contiguous, on one GPU."""
    out = torch.zeros(1, dtype=torch.int64, device=words.device)
    if len(words):
        grid: Any = (triton.cdiv(len(words), _BLOCK * _STEPS),)
        launch: Any = _weighted_sum[grid]
        with torch.cuda.device_of(words):  # Triton launches on the current device
            launch(words, weights, out, len(words), COLUMNS=len(weights), BLOCK=_BLOCK, STEPS=_STEPS, num_warps=8)
    return out[0]
