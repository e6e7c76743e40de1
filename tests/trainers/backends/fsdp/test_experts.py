"""Tests of experts: own grouped products equal those of transformers, and what cannot be distributed is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from headrace.actors.engines.hf.model import find_experts
from headrace.trainers.backends.fsdp.grouped_experts import NAME, compute_experts, use_grouped_experts

SMALL: dict[str, Any] = dict(
    vocab_size=16, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, num_experts_per_tok=2,
)  # fmt: skip
MODELS = {
    "gated": Qwen3MoeConfig(**SMALL, num_experts=5, moe_intermediate_size=8),
    "biased and transposed": GptOssConfig(**SMALL, num_local_experts=5),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5),
}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["all here", "some elsewhere"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_grouped_products_equal_those_of_transformers(config: Any, elsewhere: bool) -> None:
    """Also the gradients, and tokens whose expert another rank has."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    [(_, experts)] = find_experts(model)
    module: Any = experts
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.3)
    module._is_expert_parallel = elsewhere
    x, weights = torch.randn(17, 32, requires_grad=True), torch.rand(17, 2)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(17)])
    if elsewhere:
        index[::3, 0], weights[::3, 0] = 5, 0.0
    weights.requires_grad_()
    of_out = torch.randn(17, 32)
    found = []
    for run in (module, lambda *given: compute_experts(module, *given)):
        out = run(x, index, weights)
        grads = torch.autograd.grad(out, (x, weights, *module.parameters()), of_out)
        found.append((out, grads[0], grads[1] * (index < 5), *grads[2:]))
    for own, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_a_model_uses_them_if_it_has_experts() -> None:
    moe: Any = AutoModelForCausalLM.from_config(MODELS["gated"])
    ids = torch.arange(6)[None]
    before = moe(input_ids=ids).logits
    use_grouped_experts(moe)
    assert moe.config._experts_implementation == NAME
    torch.testing.assert_close(moe(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)
    dense: Any = AutoModelForCausalLM.from_config(LlamaConfig(**{**SMALL, "num_experts_per_tok": 0}))
    use_grouped_experts(dense)
    assert find_experts(dense) == []
