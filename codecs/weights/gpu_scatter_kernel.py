"""Implements `gpu_scatter.Scatter` as one Triton kernel. The kernel reads a payload once, torch reads it twice.

The kernel needs a C compiler and Triton, which CUDA builds of torch include.
"""

# pyright: reportMissingImports=false
# Triton need not be installed where types are checked.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_STEPS = 8
SEGMENT = _BLOCK * _STEPS
"""Largest number of 8-byte words that one program (block of threads) of the kernel takes."""


@triton.jit
def _mixed(word, position, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the number that `word` at `position` contributes to the digest, as `gpu_scatter.mixed` does."""
    state = word.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * GOLDEN
    state = (state ^ (state >> 32)) * FIRST
    state = (state ^ (state >> 29)) * SECOND
    return (state ^ (state >> 32)).to(tl.int64, bitcast=True)


@triton.jit
def _scatter(
    payload,
    table,
    out,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    # Triton reads the annotations of this function, and accepts only its own types in them.
    row = table + tl.program_id(0) * 3
    begin = tl.multiple_of(tl.load(row).to(tl.int32), 8)
    num_words = tl.load(row + 1).to(tl.int32)
    target = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.int64)), 16)
    kept = tl.load(row + 2) != 0
    total = tl.zeros([BLOCK], dtype=tl.int64)
    if num_words == BLOCK * STEPS:  # No mask is needed, so each load reads two words.
        for step in range(STEPS):
            at = step * BLOCK + tl.arange(0, BLOCK)
            word = tl.load(payload + begin + at)
            if kept:
                tl.store(target + at, word)
            total += _mixed(word, begin + at, GOLDEN, FIRST, SECOND)
    else:
        for step in range(STEPS):
            at = step * BLOCK + tl.arange(0, BLOCK)
            word = tl.load(payload + begin + at, mask=at < num_words, other=0)
            if kept:
                tl.store(target + at, word, mask=at < num_words)
            total += tl.where(at < num_words, _mixed(word, begin + at, GOLDEN, FIRST, SECOND), 0)
    tl.atomic_add(out, tl.sum(total, axis=0))


def scatter(
    words: torch.Tensor, table: torch.Tensor, golden: int, mix: Sequence[tuple[int, int | None]]
) -> torch.Tensor:
    """Copy the words that `table` names to their destinations, and return their part of the digest as int64 `[1]`. The
    part is the sum of `gpu_scatter.mixed` over the words, modulo 2**64. The work is queued on the current stream.
    words: int64, contiguous. table: int64 `[rows, 3]`: the first word (a multiple of 8), the number of words (at most
    SEGMENT), and the address to copy them to (a multiple of 16; 0 copies nothing). All tensors are on one GPU. golden,
    mix: `gpu_scatter.GOLDEN` and `MIX`.
    """
    out = torch.zeros(1, dtype=torch.int64, device=words.device)
    first, second = _factors(mix)
    kernel: Any = _scatter
    launch = kernel[(len(table),)]
    with torch.cuda.device_of(words):  # Triton launches kernels on the current device.
        launch(words, table, out, GOLDEN=golden, FIRST=first, SECOND=second, BLOCK=_BLOCK, STEPS=_STEPS, num_warps=4)
    return out


def _factors(mix: Sequence[tuple[int, int | None]]) -> tuple[int | None, int | None]:
    (first_shift, first), (second_shift, second), (last_shift, _) = mix
    assert (first_shift, second_shift, last_shift) == (32, 29, 32), "as in _mixed"
    return first, second


@triton.jit
def _digests(
    table,
    out,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = table + tl.program_id(0) * 4
    words = tl.load(row).to(tl.pointer_type(tl.int64))
    begin = tl.load(row + 1).to(tl.int32)
    num_words = tl.load(row + 2).to(tl.int32)
    number = tl.load(row + 3)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for step in range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + at, mask=at < num_words, other=0)
        total += tl.where(at < num_words, _mixed(word, begin + at, GOLDEN, FIRST, SECOND), 0)
    tl.atomic_add(out + number, tl.sum(total, axis=0))


def digests(
    table: torch.Tensor, lengths: torch.Tensor, golden: int, mix: Sequence[tuple[int, int | None]]
) -> torch.Tensor:
    """Return the digests of several payloads, int64 `[N]`. The work is queued on the current stream. table: int64
    `[rows, 4]`: address, place in its payload and number of words (at most SEGMENT), and number of the payload.
    lengths: int64 `[N]`, the part of each payload's length; it is overwritten. golden, mix: `gpu_scatter.GOLDEN` and
    `MIX`.
    """
    first, second = _factors(mix)
    kernel: Any = _digests
    launch = kernel[(len(table),)]
    with torch.cuda.device_of(table):  # Triton launches kernels on the current device.
        launch(table, lengths, GOLDEN=golden, FIRST=first, SECOND=second, BLOCK=_BLOCK, STEPS=_STEPS, num_warps=4)
    return lengths
