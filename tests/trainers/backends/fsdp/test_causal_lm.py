"""Tests that norms in closed form and packed attention compute what HF's own norms and dense attention compute."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2LMHeadModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from headrace.trainers.backends.fsdp.causal_lm import attend_varlen, use_closed_form_norms, use_varlen_attention
from headrace.trainers.backends.fsdp.output_checks import head_of
from headrace.trainers.backends.layers import LONG_ROW


def pair(kind: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """One norm as it is, and a copy that was given to `use_closed_form_norms`."""
    torch.manual_seed(0)
    own = kind(16, 1e-6).to(dtype)
    torch.nn.init.normal_(own.weight)
    changed = torch.nn.Sequential(copy.deepcopy(own))
    use_closed_form_norms(changed)
    return own, changed[0]


def passes(norm: Any, x: torch.Tensor, of_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    norm.weight.grad = None
    y = norm(x.transpose(0, 1))  # as queries and keys are, not contiguous
    y.backward(of_y.transpose(0, 1))
    assert x.grad is not None and norm.weight.grad is not None
    return y.detach(), x.grad, norm.weight.grad


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Qwen3MoeRMSNorm, LlamaRMSNorm])
def test_outputs_are_the_same_bits_and_gradients_are_close(kind: Any) -> None:
    own, changed = pair(kind)
    assert type(changed) is not kind and isinstance(changed, kind)
    x, of_y = torch.randn(5, 7, 16) * 3, torch.randn(5, 7, 16)
    wanted, found = passes(own, x, of_y), passes(changed, x, of_y)
    assert torch.equal(found[0], wanted[0])
    assert not torch.equal(found[1], wanted[1]), "another order of operations, so this is the closed form"
    for got, expected in zip(found[1:], wanted[1:], strict=True):
        assert torch.linalg.norm(got - expected) <= 1e-6 * torch.linalg.norm(expected)


def test_gradients_are_right_to_double_precision() -> None:
    from headrace.trainers.backends.fsdp.causal_lm import _RmsNorm

    x, weight = torch.randn(3, 4, 5).double().requires_grad_(), torch.randn(5).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: _RmsNorm.apply(x, weight, 1e-3), (x, weight))


def test_other_norms_and_other_precisions_stay_as_they_are() -> None:
    _, gemma = pair(GemmaRMSNorm)
    assert type(gemma) is GemmaRMSNorm, "it multiplies by 1 + w"
    own, changed = pair(Qwen3RMSNorm, torch.bfloat16)
    x, of_y = torch.randn(5, 7, 16).bfloat16(), torch.randn(5, 7, 16).bfloat16()
    for got, expected in zip(passes(changed, x, of_y), passes(own, x, of_y), strict=True):
        assert torch.equal(got, expected)


def test_what_it_cannot_do_is_told(caplog: pytest.LogCaptureFixture) -> None:
    nothing: Any = SimpleNamespace()
    q = torch.zeros(1, 2, 3, 4)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    extras: tuple[dict[str, Any], ...] = ({"softcap": 2.0}, {"s_aux": torch.zeros(2)})
    for extra in extras:
        with pytest.raises(ValueError, match="packed rows need attention without soft cap and sinks"):
            attend_varlen(nothing, q, q, q, None, scaling=1.0, row_ends=ends, longest_row=3, **extra)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    model._supports_attention_backend = False
    before = model.config._attn_implementation
    use_varlen_attention(model)
    assert model.config._attn_implementation == before and "keeps its own attention" in caplog.text


def near(tokens: int, window: int | None) -> torch.Tensor:
    """Return which of a row's tokens each of them sees, bool `[tokens, tokens]`, on the GPU."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").tril()
    return seen if window is None else seen.triu(1 - window)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("lengths", [(5, 1, 130, 64), (LONG_ROW,), (LONG_ROW, 3)], ids=["short", "long alone", "long"])
def test_packed_rows_attend_as_if_alone(lengths: tuple[int, ...], window: int | None) -> None:
    """Also the long row that is alone, which another kernel computes."""
    torch.manual_seed(0)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    shape = (sum(lengths), 64)
    q, k, v = (torch.randn(1, h, *shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    options: dict[str, Any] = {"scaling": 0.125, "sliding_window": window}
    out, _ = attend_varlen(torch.nn.Identity(), q, k, v, None, row_ends=ends, longest_row=max(lengths), **options)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
    rows = zip(*(part.float().split(lengths, dim=2) for part in (q, k, v)), strict=True)
    alone = [
        F.scaled_dot_product_attention(a, b, c, attn_mask=near(a.shape[2], window), scale=0.125, enable_gqa=True)
        for a, b, c in rows
    ]
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    wanted = torch.autograd.grad((expected * weight.float()).sum(), (q, k, v))
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("cap", [1.0, 30.0, 1000.0, None])
def test_a_soft_cap_of_any_size_needs_all_logits(cap: float | None) -> None:
    """Gemma 2 has a cap of 30, which hardly changes small logits."""
    sizes: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    config = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, final_logit_softcapping=cap)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert head_of(model, "auto") == ("selected" if cap is None else "full")
