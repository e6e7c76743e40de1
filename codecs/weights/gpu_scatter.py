"""Copies the tensors in a weight bucket on a GPU to their destinations, and computes the bucket's digest on the way."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..integers import round_up

# ---------------- A GPU computes the digest of its bytes as queued work, so that the host does not wait.
#
# The digest takes one pass over the bytes. Each 8-byte word is added to a multiple of its position, and mixed by an
# invertible function in which every bit of the word affects every bit of the result. The results are summed modulo
# 2**64. A change of one word always changes the digest. Several changes, such as signs flipped in pairs, a bit that is
# stuck in every word or blocks in exchanged places, cancel out as rarely as random numbers do. An adversary could
# choose changes that cancel out.

WORD = 8
GOLDEN = 0x9E3779B97F4A7C15
"""Factor of the digest for the position of each 8-byte word and for the length of the payload."""
MIX = ((32, 0xD6E8FEB86659FD93), (29, 0xBF58476D1CE4E5B9), (32, None))
"""Mixing steps of the digest, each (shift, factor): XOR a word with itself shifted right by `shift` bits, then multiply
it by `factor`, if that is not None."""
_MASK = (1 << 64) - 1
_CHUNK_WORDS = 1 << 22
"""Number of 8-byte words that torch mixes at a time. The mixing needs temporary memory of three times their size."""


def device_digest(payload: torch.Tensor) -> torch.Tensor:
    """Compute a 64-bit digest of `payload` on its own device. Returns an int64 tensor without dimensions (0-d).

    payload: uint8 `[n]`, contiguous. The same bytes give the same digest on any device. On a GPU the work is queued on
    the current stream, and the Triton kernel computes the digest in one pass; without the kernel, torch needs about
    ten.
    """
    length = len(payload)
    if payload.is_cuda and length and (kernel := scatter_kernel(payload.device)) is not None:
        scatter = _digest_only(length, payload.device, kernel)
        return scatter(payload)
    return _digest_by_torch(payload)


def device_digests(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the `device_digest` of each payload, int64 `[N]`. On a GPU, one kernel computes all if they are aligned,
    which saves a launch for each."""
    kernel = scatter_kernel(payloads[0].device) if payloads else None
    fit = [
        kernel is not None and 0 < len(one) < WORD << 31 and not len(one) % WORD and not one.data_ptr() % WORD
        for one in payloads
    ]
    if not all(fit) or not payloads:
        return torch.stack([device_digest(one) for one in payloads]) if payloads else torch.zeros(0, dtype=torch.int64)
    return _digest_together(payloads, kernel)


def _digest_together(payloads: Sequence[torch.Tensor], kernel: Any) -> torch.Tensor:
    words = np.array([len(one) // WORD for one in payloads], dtype=np.int64)
    addresses = np.array([one.data_ptr() for one in payloads], dtype=np.int64)
    segments = -(-words // kernel.SEGMENT)
    number = np.repeat(np.arange(len(words)), segments)
    begin = (np.arange(len(number)) - np.repeat(np.cumsum(segments) - segments, segments)) * kernel.SEGMENT
    sizes = np.minimum(words[number] - begin, kernel.SEGMENT)
    rows = np.stack([addresses[number] + begin * WORD, begin, sizes, number], 1)
    lengths = torch.tensor([length_part(len(one)) for one in payloads], dtype=torch.int64)
    device = payloads[0].device
    return kernel.digests(torch.from_numpy(rows).to(device), lengths.to(device), GOLDEN, MIX)


def _digest_by_torch(payload: torch.Tensor) -> torch.Tensor:
    length = len(payload)
    if (payload.data_ptr() if payload.is_cuda else payload.storage_offset()) % WORD:
        payload = payload.clone()  # Words must be aligned to their size.
    num_words = length // WORD
    words = payload[: num_words * WORD].view(torch.int64)
    found = torch.full((), length_part(length), dtype=torch.int64, device=payload.device)
    for first in range(0, num_words, _CHUNK_WORDS):
        found += mixed(words[first : first + _CHUNK_WORDS], first).sum()
    if length % WORD:
        last = torch.zeros(WORD, dtype=torch.uint8, device=payload.device)
        last[: length % WORD] = payload[num_words * WORD :]
        found += mixed(last.view(torch.int64), num_words).sum()
    return found


def mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    """Return the number that each 8-byte word contributes to the digest of a payload, int64 `[n]`. words: int64 `[n]`.
    first: position of `words[0]` in the payload, counted in words."""
    state = torch.arange(first + 1, first + 1 + len(words), dtype=torch.int64, device=words.device)
    state.mul_(as_signed(GOLDEN)).add_(words)
    for shift, factor in MIX:
        state.bitwise_xor_((state >> shift).bitwise_and_(_MASK >> shift))
        if factor is not None:
            state.mul_(as_signed(factor))
    return state


def length_part(nbytes: int) -> int:
    """Return the number that the length of a payload contributes to its digest, as a signed 64-bit integer."""
    return as_signed(nbytes * GOLDEN)


def as_signed(digest: int) -> int:
    """Return the signed 64-bit integer that has the same bits as the unsigned `digest`."""
    digest &= _MASK
    return digest - (1 << 64) if digest >> 63 else digest


_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_START = 64
"""Alignment in bytes of the pieces (tensors or parts of tensors) in the payload of a weight bucket."""
TARGET = 16
"""Alignment in bytes that the kernel needs for payloads and for the destinations of pieces."""

_log = logging.getLogger(__name__)


class Scatter:
    """Copies the tensors in a weight bucket to their destinations and computes the digest of its bytes. One instance
    serves all payloads that arrive for the same bucket, one per weight update."""

    def __init__(
        self, nbytes: int, pieces: Sequence[tuple[int, torch.Tensor]], device: torch.device, kernel: Any
    ) -> None:
        """Prepare for payloads of `nbytes` bytes. pieces: (first byte in the payload, destination: uint8 `[n]`,
        contiguous, on `device`), in the order of the payload. kernel: from `scatter_kernel`; if None, torch does the
        work, in two passes."""
        self._nbytes = nbytes
        self._pieces = [(begin, target) for begin, target in pieces if len(target)]
        fits = 0 < nbytes < WORD << 31 and nbytes % WORD == 0
        fits &= all(
            begin % _START == 0 and len(target) % WORD == 0 and target.data_ptr() % TARGET == 0
            for begin, target in self._pieces
        )
        self._kernel = kernel if fits else None
        self._table = None
        if self._kernel is not None:
            segment = self._kernel.SEGMENT
            self._table = (
                self._rows(segment).to(device) if self._pieces else whole_rows(nbytes // WORD, segment, device)
            )
        self._unread = 0 if self._kernel is None else self._zeros_between()
        """Contribution to the digest that the kernel does not compute: that of the length and of the zeros between
        pieces."""

    def __call__(self, payload: torch.Tensor) -> torch.Tensor:
        """Copy the pieces and return the payload's `device_digest`, both queued on the current stream.

        payload: uint8 `[nbytes]`, contiguous; the padding between a piece and the next must be zero. Raises ValueError
        for a payload of another size.
        """
        if len(payload) != self._nbytes:
            raise ValueError(f"payload: got {len(payload)} bytes, expected {self._nbytes}")
        if self._kernel is not None and payload.data_ptr() % TARGET == 0:
            return self._kernel.scatter(payload.view(torch.int64), self._table, GOLDEN, MIX)[0] + self._unread
        if self._pieces:
            targets = [target for _, target in self._pieces]
            _copy_all(targets, [payload[begin : begin + len(target)] for begin, target in self._pieces])
        return _digest_by_torch(payload)

    def _zeros_between(self) -> int:
        """Return the digest's part from the payload's length and the zero padding after each piece."""
        found = length_part(self._nbytes)
        for begin, target in self._pieces:
            end = begin + len(target)
            if end < self._nbytes:
                gap = (min(round_up(end, _START), self._nbytes) - end) // WORD
                found += int(mixed(torch.zeros(gap, dtype=torch.int64), end // WORD).sum())
        return as_signed(found)

    def _rows(self, segment: int) -> torch.Tensor:
        """Build the kernel's table, int64 `[rows, 3]`, with one row per segment of at most `segment` words. A row has
        the segment's first word, number of words and destination address. The segments cover all pieces and, with
        address 0 (no copy), the bytes between pieces that are not padding."""
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
            end = min(round_up(end, _START), self._nbytes)
        add(end, self._nbytes, 0)
        return torch.from_numpy(np.concatenate(rows))


def whole_rows(num_words: int, segment: int, device: torch.device) -> torch.Tensor:
    """Return the kernel's table for a payload of which nothing is copied. It is made on `device`, because a copy from
    the host would wait for the work that is queued there."""
    starts = torch.arange(0, num_words, segment, device=device)
    return torch.stack([starts, (num_words - starts).clamp(max=segment), torch.zeros_like(starts)], 1)


@functools.lru_cache(maxsize=64)
def _digest_only(nbytes: int, device: torch.device, kernel: Any) -> Scatter:
    """Return a `Scatter` for payloads of one size that copies nothing and only computes the digest."""
    return Scatter(nbytes, [], device, kernel)


@functools.cache
def scatter_kernel(device: torch.device) -> Any:
    """Return the module of the Triton kernel, or None if the kernel cannot be used on `device`. It is used only on a
    CUDA device on which it gives the same results as torch. A warning is logged if it gives other results or cannot be
    imported."""
    if device.type != "cuda":
        return None
    try:
        from . import gpu_scatter_kernel as kernel

        if check(kernel, device):
            return kernel
        reason = "its results are wrong"
    except Exception as error:  # Triton or a compiler may be missing, or the driver unknown.
        reason = f"{type(error).__name__}: {error}"
    _log.warning("weights: buckets on %s are read twice, there is no Triton kernel: %s", device, reason)
    return None


def check(kernel: Any, device: torch.device) -> bool:
    """Return whether the kernel gives the same results as torch. The test payload contains one piece of a few words,
    and one piece so long that several blocks of threads copy it."""
    first, second = _START, 2 * kernel.SEGMENT * WORD + 5 * WORD
    nbytes = 3 * _START + second + 10 * WORD
    payload = torch.arange(nbytes, device=device).mul_(41).to(torch.uint8)
    payload[3 * _START + second : 4 * _START + second - 5 * WORD] = 0  # Zeros fill the gap before the next piece.
    targets = [torch.zeros(length, dtype=torch.uint8, device=device) for length in (first, second)]
    pieces = [(_START, targets[0]), (3 * _START, targets[1])]
    found = Scatter(nbytes, pieces, device, kernel)(payload)
    copied = all(torch.equal(target, payload[begin : begin + len(target)]) for begin, target in pieces)
    right = copied and bool(found == _digest_by_torch(payload))
    parts = [payload, payload[WORD : 5 * WORD]]
    return right and _digest_together(parts, kernel).tolist() == [int(_digest_by_torch(part)) for part in parts]
