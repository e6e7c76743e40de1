"""Tests that products and attention of fixed shapes are right, and that no token depends on its batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headrace.actors.engines.hf import fixed_shapes

WIDTH, HEADS, KV_HEADS = 8, 4, 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parts(count: int, size: int, width: int = WIDTH) -> list[torch.Tensor]:
    torch.manual_seed(size)
    return [torch.randn(count, heads, size, width) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, **rows: Any
) -> torch.Tensor:
    out, _ = fixed_shapes.attend(nn.Identity(), query, key, value, mask, scaling=query.shape[-1] ** -0.5, **rows)
    return out.transpose(1, 2)


@pytest.mark.parametrize("size", [1, 17, 64, 150])
def test_attention_is_that_of_torch(size: int) -> None:
    query, key, value = (part.requires_grad_() for part in parts(3, size))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = attend(query, key, value)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    weights = torch.randn_like(found)
    wanted, got = (torch.autograd.grad((one * weights).sum(), (query, key, value)) for one in (expected, found))
    for theirs, ours in zip(wanted, got, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [5, 6, 8, 10, 64])
def test_a_token_has_the_same_values_alone_with_cached_keys_and_packed(width: int) -> None:
    """Without padding, heads of 5 to 7 and of 9 to 11 numbers are computed by the place of a query in its block."""
    lengths = [5, 150, 1, 64]
    rows = [parts(1, size, width) for size in lengths]
    whole = [attend(*row)[0] for row in rows]
    packed = [torch.cat([row[index] for row in rows], dim=2) for index in range(3)]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    together = attend(packed[0], packed[1], packed[2], row_ends=ends, longest_row=max(lengths))
    assert torch.equal(together[0], torch.cat(whole, dim=1))
    # On the left of each row is padding, and only the last two tokens have queries.
    keys, values = (
        torch.cat([F.pad(row[index], (0, 0, max(lengths) - size, 0)) for row, size in zip(rows, lengths, strict=True)])
        for index in (1, 2)
    )
    queries = torch.cat([F.pad(row[0], (0, 0, 1, 0))[:, :, -2:] for row in rows])
    shown = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    last = attend(queries, keys, values, shown.long())
    for row, size in enumerate(lengths):
        count = min(size, 2)
        assert torch.equal(last[row][:, -count:], whole[row][:, -count:])


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 64), (8, 10), (2, 9), (11, 13), (1, 5), (15, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_does_not_depend_on_the_others(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(100, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    whole = fixed_shapes.linear(x, weight)
    torch.testing.assert_close(whole, F.linear(x, weight), rtol=0, atol=1e-5 if dtype == torch.float32 else 0.2)
    for first, count in ((0, 1), (7, 1), (31, 2), (50, 33), (99, 1)):
        assert torch.equal(fixed_shapes.linear(x[first : first + count], weight), whole[first : first + count])
    assert fixed_shapes.linear(x[:0], weight).shape == (0, outputs)


def test_a_machine_whose_products_depend_on_the_place_of_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_shapes._expect_alike({(2, 9), (5000, 7)}, 10)
    for name in ("linear", "_blocks"):
        with monkeypatch.context() as patch:
            exact = getattr(fixed_shapes, name)
            patch.setattr(fixed_shapes, name, lambda *given, exact=exact: by_place(exact(*given)))
            with pytest.raises(ValueError, match="run.bitwise: got true on a CPU whose products depend on the place"):
                fixed_shapes._expect_alike({(40, 64)}, 16)


def by_place(found: torch.Tensor) -> torch.Tensor:
    """Results with the last bits of every second row changed."""
    found[..., 1::2, :] *= 1 + 2**-7
    return found
