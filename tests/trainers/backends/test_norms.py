"""Tests that norms with a backward pass in closed form compute what HF's own compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from headrace.trainers.backends.fsdp.causal_lm import use_closed_form_norms


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
