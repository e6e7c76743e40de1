"""Tests packed attention by torch's variable-length kernel against dense attention row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from headrace.trainers.backends.fsdp.causal_lm import attend_varlen, use_varlen_attention
from headrace.trainers.backends.layers import LONG_ROW


def test_what_it_cannot_do_is_told() -> None:
    nothing: Any = SimpleNamespace()
    q = torch.zeros(1, 2, 3, 4)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"for a model with sliding-window attention \(window 8\)"):
        attend_varlen(nothing, q, q, q, None, scaling=1.0, row_ends=ends, longest_row=3, sliding_window=8)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    model._supports_attention_backend = False
    with pytest.raises(ValueError, match="trainer.packing: got 'packed', expected .* for GPT2LMHeadModel, whose"):
        use_varlen_attention(model)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(5, 1, 130, 64), (LONG_ROW,), (LONG_ROW, 3)], ids=["short", "long alone", "long"])
def test_packed_rows_attend_as_if_alone(lengths: tuple[int, ...]) -> None:
    """Also the long row that is alone, which another kernel computes."""
    torch.manual_seed(0)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    shape = (sum(lengths), 64)
    q, k, v = (torch.randn(1, h, *shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    out, _ = attend_varlen(torch.nn.Identity(), q, k, v, None, scaling=0.125, row_ends=ends, longest_row=max(lengths))
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
    rows = zip(*(part.float().split(lengths, dim=2) for part in (q, k, v)), strict=True)
    alone = [F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=0.125, enable_gqa=True) for a, b, c in rows]
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    wanted = torch.autograd.grad((expected * weight.float()).sum(), (q, k, v))
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=5e-2, atol=5e-2)
