"""Copies the pieces of a bucket on a GPU to where they belong, and computes its digest on the way."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .integers import round_up

# ---------------- The GPU computes the digest of bytes that it holds, queued like any other work, so that nobody waits.
#
# It is one pass over the bytes. 8-byte words are summed down the columns of rows of a prime length, and the sums are
# weighted by odd numbers, all modulo 2**64. Any one changed word changes it, and so does a piece that is missing,
# stale or moved, unless it moved by a multiple of 4099 words, which no tensor's size is. Several changes that cancel
# out go unseen; no accident does that, but an adversary could.

WORD = 8
_COLUMNS = 4099
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def device_digest(payload: torch.Tensor) -> torch.Tensor:
    """Return the digest as int64, 0-d, on the payload's device, queued on its current stream.

    payload: uint8 `[n]`, contiguous. The same bytes give the same digest on any device.
    """
    length = len(payload)
    if (payload.data_ptr() if payload.is_cuda else payload.storage_offset()) % WORD:
        payload = payload.clone()  # words must start where words can
    num_words = length // WORD
    words = payload[: num_words * WORD].view(torch.int64)
    weights = column_weights(payload.device)
    rows = num_words // _COLUMNS
    sums = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    rest = words[rows * _COLUMNS :]
    if len(rest):
        sums[: len(rest)].add_(rest)  # one row more, not a full one
    found = (sums * weights).sum()
    if length % WORD:
        last = torch.zeros(WORD, dtype=torch.uint8, device=payload.device)
        last[: length % WORD] = payload[num_words * WORD :]
        found = found + last.view(torch.int64)[0] * weights[num_words % _COLUMNS]
    return found + length_part(length)


def length_part(nbytes: int) -> int:
    """Return what a payload's length adds to the digest."""
    return as_signed(nbytes * _GOLDEN)


def as_signed(digest: int) -> int:
    """Return a digest of 64 bits as int64 holds it."""
    digest &= _MASK
    return digest - (1 << 64) if digest >> 63 else digest


@functools.cache
def column_weights(device: torch.device) -> torch.Tensor:
    """Return int64 `[_COLUMNS]`, odd: the weight of word i, i modulo their number."""
    state = (np.arange(1, _COLUMNS + 1, dtype=np.uint64)) * np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state ^= state >> np.uint64(31)
    return torch.from_numpy((state | np.uint64(1)).view(np.int64)).to(device)


_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_START = 64
"""Number of bytes to whose multiples pieces are aligned in a payload."""
_TARGET = 16
"""Number of bytes to whose multiples the places are aligned to which pieces are copied."""

_log = logging.getLogger(__name__)


class Scatter:
    """Processes the payloads of one bucket, again and again."""

    def __init__(
        self, nbytes: int, pieces: Sequence[tuple[int, torch.Tensor]], device: torch.device, kernel: Any
    ) -> None:
        """nbytes: size of the payload. pieces: (first byte in the payload, the place to copy to, uint8 `[n]`,
        contiguous, on `device`), in order. kernel: from `scatter_kernel`; None uses torch, in two passes."""
        self._nbytes = nbytes
        self._pieces = [(begin, target) for begin, target in pieces if len(target)]
        fits = 0 < nbytes < WORD << 31 and nbytes % WORD == 0
        fits &= all(
            begin % _START == 0 and len(target) % WORD == 0 and target.data_ptr() % _TARGET == 0
            for begin, target in self._pieces
        )
        self._kernel = kernel if fits else None
        self._table = None if self._kernel is None else self._rows(self._kernel.SEGMENT).to(device)

    def __call__(self, payload: torch.Tensor) -> torch.Tensor:
        """Copy the pieces and return the payload's `device_digest`, both queued on the current stream.

        payload: uint8 `[nbytes]`, contiguous. The bytes that align the next piece's start are zero.
        """
        if len(payload) != self._nbytes:
            raise ValueError(f"payload: got {len(payload)} bytes, expected {self._nbytes}")
        if self._kernel is not None and payload.data_ptr() % _TARGET == 0:
            found = self._kernel.scatter(payload.view(torch.int64), self._table, column_weights(payload.device))
            return found[0] + length_part(self._nbytes)
        if self._pieces:
            targets = [target for _, target in self._pieces]
            _copy_all(targets, [payload[begin : begin + len(target)] for begin, target in self._pieces])
        return device_digest(payload)

    def _rows(self, segment: int) -> torch.Tensor:
        """Build the kernel's table: the pieces, and the gaps between them, in segments."""
        rows: list[np.ndarray] = []
        end = 0

        def add(begin: int, upto: int, address: int) -> None:
            starts = np.arange(begin // WORD, upto // WORD, segment, dtype=np.int64)
            sizes = np.minimum(upto // WORD - starts, segment)
            addresses = address + (starts - begin // WORD) * WORD if address else np.zeros_like(starts)
            rows.append(np.stack([starts, sizes, addresses], 1))

        for begin, target in self._pieces:
            add(end, begin, 0)
            end = begin + len(target)
            add(begin, end, target.data_ptr())
            end = round_up(end, _START) if end < self._nbytes else end
        add(end, self._nbytes, 0)
        return torch.from_numpy(np.concatenate(rows))


@functools.cache
def scatter_kernel(device: torch.device) -> Any:
    """Import the kernel, if it does what torch does; otherwise log a warning and return None."""
    if device.type != "cuda":
        return None
    try:
        from . import gpu_scatter_kernel as kernel

        if check(kernel, device):
            return kernel
        reason = "its results are wrong"
    except Exception as error:  # no Triton, no compiler, a driver it does not know
        reason = f"{type(error).__name__}: {error}"
    _log.warning("weights: buckets on %s are read twice, there is no Triton kernel: %s", device, reason)
    return None


def check(kernel: Any, device: torch.device) -> bool:
    """Return whether the kernel does what torch does, on a piece of a few words and one that several programs share."""
    first, second = _START, 2 * kernel.SEGMENT * WORD + 5 * WORD
    nbytes = 3 * _START + second + 10 * WORD
    payload = torch.arange(nbytes, device=device).mul_(41).to(torch.uint8)
    payload[3 * _START + second : 4 * _START + second - 5 * WORD] = 0  # the gap up to what comes next
    targets = [torch.zeros(length, dtype=torch.uint8, device=device) for length in (first, second)]
    pieces = [(_START, targets[0]), (3 * _START, targets[1])]
    found = Scatter(nbytes, pieces, device, kernel)(payload)
    copied = all(torch.equal(target, payload[begin : begin + len(target)]) for begin, target in pieces)
    return copied and bool(found == device_digest(payload))
