"""Tests of grouped matrix products: those of a loop over groups, with their gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("sizes", [(3, 0, 4), (0, 0, 0), (7, 0, 0)])
def test_each_group_is_multiplied_with_its_own_matrix(sizes: tuple[int, ...]) -> None:
    from headrace.trainers.backends.megatron.modules import grouped_linear

    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.randn(sum(sizes), 16, generator=generator).to(device).requires_grad_()
    weights = torch.randn(3, 24, 16, generator=generator).to(device).requires_grad_()
    every = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    out = grouped_linear(rows, weights, torch.tensor(sizes))
    wanted = torch.einsum("tk,tnk->tn", rows, weights[every])
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    mix = torch.randn(out.shape, generator=generator).to(device)
    ours = torch.autograd.grad((out * mix).sum(), (rows, weights), retain_graph=True)
    theirs = torch.autograd.grad((wanted * mix).sum(), (rows, weights))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_the_grouped_kernel_does_what_the_loop_does() -> None:
    from headrace.trainers.backends.megatron.modules import grouped_linear

    torch.manual_seed(0)
    sizes = torch.tensor([130, 0, 7, 63])
    rows = torch.randn(200, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(4, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mix = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    ours = grouped_linear(rows, weights, sizes)
    parts = [F.linear(part, weight) for part, weight in zip(rows.split(sizes.tolist()), weights, strict=True)]
    torch.testing.assert_close(ours, torch.cat(parts), rtol=2e-2, atol=2e-2)
    got = torch.autograd.grad((ours * mix).sum(), (rows, weights), retain_graph=True)
    wanted = torch.autograd.grad((torch.cat(parts) * mix).sum(), (rows, weights))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=0.3)


def test_expert_parallel_weights_are_marked() -> None:
    """Megatron would otherwise sum their gradients over ranks that hold other experts."""
    from headrace.trainers.backends.megatron.modules import GroupedExperts

    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 2))
    for ep in (1, 2):
        config: Any = SimpleNamespace(
            moe_ffn_hidden_size=12, hidden_size=8, params_dtype=torch.bfloat16, expert_model_parallel_size=ep
        )
        experts = GroupedExperts(3, config, pg_collection=groups)
        assert experts.weight1.shape == (3, 12, 8) and experts.weight2.shape == (3, 8, 6)
        assert [getattr(weight, "allreduce", None) for weight in experts.parameters()] == [ep == 1] * 2
