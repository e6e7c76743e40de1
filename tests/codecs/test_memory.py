"""Recycled host memory: used again when no reader holds it, and never before."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from headrace.codecs import memory
from headrace.codecs.memory import HUGE_PAGE, POOLED_FROM_BYTES, Pool, flat_bytes, fresh


def test_memory_comes_back_when_its_last_view_goes() -> None:
    pool = Pool()
    array = pool.take(200_000)
    address = array.ctypes.data
    view = array[1000:2000].reshape(10, 100)[3:]
    del array
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.take(200_000)
    assert other.ctypes.data != address
    del view
    again = pool.take(199_000)  # of the same size class
    assert again.ctypes.data == address and len(again) == 199_000


@pytest.mark.parametrize(
    "view", [lambda t: t[5:50], lambda t: t.view(torch.uint8)[3:].numpy(), lambda t: t.split(7)[2]]
)
def test_views_of_tensors_hold_it(monkeypatch: pytest.MonkeyPatch, view: object) -> None:
    pool = Pool()
    monkeypatch.setattr(memory, "_POOL", pool)
    tensor = fresh(torch.float32, (POOLED_FROM_BYTES, 3))
    kept = view(tensor)  # type: ignore[operator]
    del tensor
    assert pool.idle_bytes == 0
    del kept
    assert pool.idle_bytes > 0


def test_what_is_in_use_is_never_handed_out_again() -> None:
    pool, chance, held = Pool(kept_bytes=4 << 20), random.Random(0), []
    for number in range(2000):
        if held and chance.random() < 0.5:
            array, mark = held.pop(chance.randrange(len(held)))
            assert (array == mark).all()
        array = pool.take(chance.randrange(1, 300_000))
        array[:] = number % 251
        held = [*held, (array[:], number % 251)][-12:]
    assert pool.idle_bytes <= 4 << 20


def test_sizes_alignment_and_the_bound() -> None:
    pool = Pool(kept_bytes=1 << 20)
    for nbytes in (1, 63, 64, 65, 1000, 4095, 70_000, (1 << 20) + 1, 3 * HUGE_PAGE + 5):
        array = pool.take(nbytes)
        assert array.shape == (nbytes,) and array.dtype == np.uint8 and array.flags.writeable
        assert array.ctypes.data % (HUGE_PAGE if nbytes >= HUGE_PAGE else 64) == 0
    del array
    assert pool.idle_bytes <= 1 << 20


def test_shapes_and_dtypes() -> None:
    for shape in ((0,), (3, 4), (POOLED_FROM_BYTES, 2)):
        for dtype in (torch.uint8, torch.float32, torch.int64, torch.bfloat16):
            tensor = fresh(dtype, shape)
            assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()


@pytest.mark.parametrize("tensor", [
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    torch.arange(6, dtype=torch.bfloat16)[::2][:1],  # torch calls it contiguous, and does not view it as bytes
    torch.arange(6, dtype=torch.int64).reshape(2, 3).t()[1:2, 1:2],
    torch.tensor(3.0, requires_grad=True),
    torch.from_numpy(np.zeros((0, 3), np.float32)),
    torch.zeros(4, 0, 3),
])  # fmt: skip
def test_bytes_of_contiguous_tensors(tensor: torch.Tensor) -> None:
    flat = flat_bytes(tensor)
    assert flat.shape == (tensor.nbytes,) and flat.data_ptr() == tensor.data_ptr()
    assert flat.view(tensor.dtype).tolist() == tensor.flatten().tolist()


def test_bytes_of_other_tensors_are_refused() -> None:
    with pytest.raises(RuntimeError, match="view"):
        flat_bytes(torch.zeros(2, 3).t())
