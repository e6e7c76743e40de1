"""Copies rows of tokens between packed memory, where they follow one another, and right-padded memory."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..gather import as_bytes, copy_runs
from ..memory import fresh
from ..schema import Field

ROWWISE_BYTES = 2048
"""Smallest number of bytes of a padded row at which rows are copied one by one, each as one piece of bytes. Shorter
rows are copied together through a mask of their valid tokens, because a copy of its own takes such a row longer than
the look at the mask."""


class PaddedRows:
    """Converts columns of the same N rows between their packed form and the right-padded one."""

    def __init__(self, lengths: np.ndarray, width: int) -> None:
        """lengths: number of valid tokens of each row, int64 `[N]`. width: number of tokens of a padded row, none of
        `lengths` is above it."""
        self._lengths = lengths
        self._width = width

    def pad(self, field: Field, values: torch.Tensor) -> torch.Tensor:
        """Return a PER_TOKEN field's packed values `[T, *trailing]` as a padded tensor `[N, width, *trailing]`. They
        are contiguous on the CPU; the field's pad value stands after each row."""
        assert field.dtype is not None
        # The whole tensor is filled: copies into memory that is in the cache by then save what that costs.
        out = fresh(field.dtype, (len(self._lengths), self._width, *field.trailing)).fill_(field.pad_value)
        if not values.numel():
            return out
        source, target, item_bytes = as_bytes(values), as_bytes(out), field.item_bytes
        row_bytes = self._width * item_bytes
        if row_bytes < ROWWISE_BYTES:
            _tokens(target, item_bytes).reshape(self._valid.shape)[self._valid] = _tokens(source, item_bytes)
            return out
        sizes = self._lengths * item_bytes
        ends = np.cumsum(sizes)
        read, written = source.data, target.data
        places = range(0, len(target), row_bytes)
        for at, begin, end in zip(places, (ends - sizes).tolist(), ends.tolist(), strict=True):
            written[at : at + end - begin] = read[begin:end]
        return out

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Return the valid tokens of a tensor `[N, width, *trailing]` as a contiguous tensor `[T, *trailing]`. The
        tensor may have any strides and be on any device; the result is on the CPU without grad."""
        tensor = padded.detach().cpu().resolve_neg()
        out = fresh(tensor.dtype, (int(self._lengths.sum()), *tensor.shape[2:]))
        if not out.numel():
            return out
        item_bytes = out[0].nbytes
        if self._width * item_bytes < ROWWISE_BYTES:
            tokens = _tokens(as_bytes(tensor.contiguous()), item_bytes).reshape(self._valid.shape)
            _tokens(as_bytes(out), item_bytes)[:] = tokens[self._valid]
            return out
        memory, row_bytes = _row_memory(tensor)
        number = np.arange(len(tensor))
        copy_runs(as_bytes(out), {0: memory}, np.zeros_like(number), number * row_bytes, self._lengths * item_bytes)
        return out

    @functools.cached_property
    def _valid(self) -> np.ndarray:
        """Mask of the valid tokens of the padded rows, bool `[N, width]`."""
        return np.arange(self._width) < self._lengths[:, None]


def _tokens(memory: np.ndarray, item_bytes: int) -> np.ndarray:
    """Return bytes as a 1-D array of tokens, without a copy. The tokens are opaque, so that one mask selects whole
    tokens of any dtype and trailing shape."""
    return memory.view(np.dtype((np.void, item_bytes)))


def _row_memory(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """Return the memory of a tensor `[N, width, *trailing]` as uint8 1-D, and its row stride in bytes. The stride runs
    from the beginning of a row to that of the next. Copies the tensor only if its rows have gaps in them; gaps between
    the rows do not matter, such as those of `tensor[:, :width]`."""
    if not tensor[0].is_contiguous():
        tensor = tensor.contiguous()
    step = tensor.stride(0)
    whole = tensor.as_strided(((len(tensor) - 1) * step + tensor[0].numel(),), (1,))
    return as_bytes(whole), step * tensor.itemsize
