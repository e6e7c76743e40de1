"""Distributes the experts of a HF model over ranks, to which each token is sent for the experts that it has chosen.

Ranks have different tokens (data- and context-parallel ranks), or the same ones (tensor-parallel ranks, of which each
then takes a part). A token goes to the ranks of its experts by one all-to-all, and the experts' answers come back by
another (GShard, Lepikhin et al. 2020, arXiv:2006.16668). The experts themselves are computed by transformers' own
function for experts, which is a grouped matrix product where torch has one. Every rank computes with all tokens that
chose its experts, so the gradients of its experts are complete but for ranks that hold the same experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ....actors.engines.hf.model import find_experts
from ..layers import uncompiled
from .causal_lm import CausalLM
from .grouped_experts import permute
from .tensor_parallel import gather, own_experts, share_out, split


def require_experts(model: nn.Module, ep: int) -> list[nn.Module]:
    """Return the modules of `find_experts`, of which each of `ep` ranks is to hold an equal part.

    Raises ValueError, naming `trainer.ep`, if the model has no experts that can be distributed, or if their number is
    not divisible.
    """
    found = [experts for _, experts in find_experts(model)]
    if not found:
        raise ValueError(
            f"trainer.ep: got {ep}, expected 1 for {type(model).__name__}, which has no module of experts that takes "
            "tokens and their choice of experts"
        )
    for count in {len(next(experts.parameters())) for experts in found}:
        if count % ep:
            raise ValueError(f"trainer.ep: got {ep}, expected a divisor of the model's {count} experts")
    return found


def distribute_experts(module: CausalLM, mesh: DeviceMesh, same_tokens: dist.ProcessGroup | None) -> list[nn.Module]:
    """Give each rank of the one-dimensional `mesh` an equal part of the experts of `module`, in place.

    same_tokens: the ranks that compute with the same tokens; None if there are none. Before the call, all ranks hold
    the same whole weights. Returns the modules of experts. Raises what `require_experts` raises.
    """
    found = require_experts(module.model, mesh.size())
    for experts in found:
        split(experts, mesh, 0)
        experts.forward = functools.partial(_forward, experts, mesh.get_group(), same_tokens)
    return found


def holds_experts(param: torch.Tensor) -> bool:
    """Return whether `param` holds the experts of one rank, which other ranks of the mesh do not have."""
    return isinstance(param, DTensor) and "ep" in (param.device_mesh.mesh_dim_names or ())


@uncompiled  # The numbers of tokens that are exchanged differ in each pass.
def _forward(
    experts: nn.Module,
    group: dist.ProcessGroup,
    same_tokens: dist.ProcessGroup | None,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute the experts' contribution to all tokens. hidden_states: `[T, H]`. top_k_index: the experts of each token,
    int64 `[T, k]`. top_k_weights: their weights, `[T, k]`. Returns `[T, H]`. Collective."""
    if same_tokens is None:
        return _dispatch(experts, group, hidden_states, top_k_index, top_k_weights)
    tokens = len(hidden_states)
    parts: Any = [share_out(part, same_tokens) for part in (hidden_states, top_k_index, top_k_weights)]
    out = _dispatch(experts, group, *parts)
    return gather(out, same_tokens, 0)[:tokens].clone()  # FSDP warns of views.


def _dispatch(
    experts: nn.Module,
    group: dist.ProcessGroup,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    part = own_experts(experts)
    count = part.num_experts
    chosen, top_k = index.flatten(), index.shape[1]
    order = chosen.argsort(stable=True)
    inverse = order.argsort()
    sent = torch.bincount(chosen, minlength=count * group.size()).view(group.size(), count)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_send, to_receive = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    got = sum(to_receive)
    tokens: Any = _Exchange.apply(permute(hidden, order, inverse, top_k), to_receive, to_send, group)
    shares: Any = _Exchange.apply(weights.flatten()[order, None], to_receive, to_send, group)
    expert = torch.arange(count, device=index.device).repeat(group.size())
    expert = expert.repeat_interleave(received.flatten(), output_size=got)[:, None]
    if not got:  # With a token of zeros this rank has gradients of its experts, too, for which other ranks may wait.
        tokens, shares, expert = (F.pad(one, (0, 0, 0, 1)) for one in (tokens, shares, expert))
    forward: Any = type(experts).forward
    out = forward(part, tokens, expert, shares)
    back: Any = _Exchange.apply(out[:got], to_send, to_receive, group)
    return permute(back, inverse, order).view(len(hidden), top_k, -1).sum(1).to(hidden.dtype)


class _Exchange(torch.autograd.Function):
    """Sends `to_send[i]` rows of a tensor to rank i, and receives `to_receive[i]` rows from it. Backward sends the
    gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, to_receive: list[int], to_send: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (to_send, to_receive), group
        return _exchange(rows, to_receive, to_send, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        to_receive, to_send = ctx.sizes
        return _exchange(grads[0], to_receive, to_send, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, to_receive: list[int], to_send: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    got = rows.new_empty(sum(to_receive), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), to_receive, to_send, group=group)
    return got
