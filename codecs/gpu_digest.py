"""A digest of bytes on a GPU that the GPU computes: queued like any other work, so that nobody waits for it.

One pass over the bytes: 8-byte words are summed down the columns of rows of a prime length, and the sums are weighted
by odd numbers, all modulo 2**64. Any one changed word changes it, and so does a piece that is missing, stale or moved,
unless it moved by a multiple of 4099 words, which no tensor's size is. Several changes that cancel out go unseen: no
accident does that, an adversary could.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch

_WORD = 8
_COLUMNS = 4099
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ODD = 0x5851F42D4C957F2D

_log = logging.getLogger(__name__)


def device_digest(payload: torch.Tensor) -> torch.Tensor:
    """int64, 0-d, on the payload's device and queued on its current stream; payload: uint8 `[n]`, contiguous.

    The same bytes give the same digest on any device.
    """
    length = len(payload)
    if (payload.data_ptr() if payload.is_cuda else payload.storage_offset()) % _WORD:
        payload = payload.clone()  # words must start where words can
    num_words = length // _WORD
    words = payload[: num_words * _WORD].view(torch.int64)
    weights = _weights(payload.device)
    kernel = _kernel(payload.device) if payload.is_cuda else None
    if kernel is None or num_words > kernel.MAX_WORDS:
        found = _weighted_sum(words, weights)
    else:
        found = kernel.weighted_sum(words, weights)
    if length % _WORD:
        last = torch.zeros(_WORD, dtype=torch.uint8, device=payload.device)
        last[: length % _WORD] = payload[num_words * _WORD :]
        found = found + last.view(torch.int64)[0] * weights[num_words % _COLUMNS]
    return found + as_signed(length * _GOLDEN)


def as_signed(digest: int) -> int:
    """A digest of 64 bits as an int64 has it."""
    digest &= _MASK
    return digest - (1 << 64) if digest >> 63 else digest


def _weighted_sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `gpu_digest_kernel.weighted_sum`, anywhere."""
    rows = len(words) // _COLUMNS
    sums = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    rest = words[rows * _COLUMNS :]
    if len(rest):
        sums[: len(rest)] += rest  # one row more, not a full one
    return (sums * weights).sum()


@functools.cache
def _kernel(device: torch.device) -> Any:
    """The module of the kernel, once it was seen to find what torch finds; None, and a warning, where it does not."""
    words = torch.arange(1 << 20, device=device) * _ODD
    weights = _weights(device)
    try:
        from . import gpu_digest_kernel

        if bool(gpu_digest_kernel.weighted_sum(words, weights) == _weighted_sum(words, weights)):
            return gpu_digest_kernel
        reason = "its sum is wrong"
    except Exception as error:  # no Triton, no compiler, a driver it does not know
        reason = f"{type(error).__name__}: {error}"
    _log.warning("weights: digests on %s take four times as long, there is no Triton kernel: %s", device, reason)
    return None


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """int64 `[_COLUMNS]`, odd."""
    state = (np.arange(1, _COLUMNS + 1, dtype=np.uint64)) * np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state ^= state >> np.uint64(31)
    return torch.from_numpy((state | np.uint64(1)).view(np.int64)).to(device)
