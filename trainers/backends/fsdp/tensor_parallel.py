"""Splits HF Qwen3, Qwen3-MoE and Llama models over tensor-parallel ranks, each of which computes with its own part.

The method is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053). In each attention and MLP block, the input
projections are split by columns and the output projections by rows, so that the block needs one all-reduce in forward
and one in backward. Embedding and output layer are split by vocabulary. Experts are not split: each rank holds some of
them and computes what these contribute to every token, and one all-reduce adds up the contributions.

Weights are stored as DTensors for FSDP and checkpoints, but nothing is computed on DTensors. Computing on them would
give every rank the whole vocabulary's embedding gradient, does not support fused experts, and costs a dispatch per
operation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ....codecs.integers import ceil_div
from ..vocab.logprobs import VocabShard
from .causal_lm import CausalLM

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")
_PER_HEAD = ("q_norm", "k_norm")


def split_over(module: CausalLM, mesh: DeviceMesh) -> None:
    """Split the weights of `module` over the ranks of the one-dimensional `mesh`, in place.

    Before the call, all ranks hold the same whole weights. Afterwards the output layer computes only this rank's
    logits, and `module.vocab` says which tokens these logits belong to. `check_split` must have accepted the model.
    """
    model, group = module.model, mesh.get_group()
    child: Any
    for layer in module.layers():
        for name, child in layer.named_modules():
            kind = name.rpartition(".")[2]
            if kind in _COLUMNS:
                _split(child, mesh, 0)
                child.forward = functools.partial(_columns, child)
            elif kind in _ROWS:
                _split(child, mesh, 1)
                child.forward = functools.partial(_rows, child, group)
            elif kind == "experts":
                _split_experts(child, mesh)
            elif kind == "self_attn" or (kind == "mlp" and not hasattr(child, "experts")):
                child.forward = functools.partial(_block, child.forward, group)
    width = _split_vocabulary(model, mesh)
    module.vocab = VocabShard(group, mesh.get_local_rank() * width, width)


def split_dim(param: torch.Tensor) -> int | None:
    """Return the dimension along which tensor-parallel ranks split `param`; None when every rank has all of it."""
    if not isinstance(param, DTensor) or "tp" not in (names := param.device_mesh.mesh_dim_names or ()):
        return None
    placement = param.placements[names.index("tp")]
    return placement.dim if isinstance(placement, Shard) else None


def sum_per_head_gradients(module: CausalLM, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum over ranks the gradients of weights that each rank has whole but applies to its own heads only. Collective.

    These weights are the norms of queries and keys, a few hundred numbers per layer. The function is called once per
    step, on gradients that are already summed over the microbatches. `device` is the device on which the group
    communicates; the gradients may be offloaded to the host.
    """
    params = [p for name, p in module.named_parameters() if name.rpartition(".")[0].endswith(_PER_HEAD)]
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads]).to(device)
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


# ---------------- These functions communicate in forward and backward passes.


class _Share(torch.autograd.Function):
    """Passes on a tensor that is equal on all ranks but used differently by each. Backward sums the ranks'
    gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Sums a tensor over the ranks; backward passes the gradient of the sum to every rank's tensor unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


# ---------------- These functions are the forward passes of split modules.


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _block(forward: Any, group: dist.ProcessGroup, hidden_states: torch.Tensor, **arguments: Any) -> Any:
    """Run an attention or MLP block with one all-reduce in backward, for the gradient of the block's input.

    The gradient is first summed over all projections of the block on each rank and then, by this all-reduce, over the
    ranks.
    """
    return forward(_Share.apply(hidden_states, group), **arguments)


def _columns(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, _local(linear.weight), None if linear.bias is None else _local(linear.bias))


def _rows(linear: nn.Linear, group: dist.ProcessGroup, hidden: torch.Tensor) -> torch.Tensor:
    total: Any = _Sum.apply(F.linear(hidden, _local(linear.weight)), group)
    return total if linear.bias is None else total + linear.bias


def _embedding(embedding: nn.Embedding, group: dist.ProcessGroup, start: int, input_ids: torch.Tensor) -> torch.Tensor:
    weight = _local(embedding.weight)
    local = input_ids - start
    here = (local >= 0) & (local < len(weight))
    padding = None if embedding.padding_idx is None else embedding.padding_idx - start
    if padding is not None and not 0 <= padding < len(weight):
        padding = None
    found = F.embedding(local.where(here, 0), weight, padding)
    total: Any = _Sum.apply(found.masked_fill(~here[..., None], 0.0), group)
    return total


class _ExpertsPart:
    """Stand-in for a HF experts module that has only the experts of one rank. All other attributes come from the
    original module."""

    def __init__(self, module: nn.Module, **own: Any) -> None:
        self.__dict__.update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _experts(
    experts: nn.Module,
    group: dist.ProcessGroup,
    start: int,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    weights = {name: _local(param) for name, param in experts.named_parameters(recurse=False)}
    count = len(next(iter(weights.values())))
    # HF marks experts on other ranks by an index one past the last and by `_is_expert_parallel`.
    part = _ExpertsPart(experts, num_experts=count, _is_expert_parallel=True, **weights)
    local = top_k_index - start
    elsewhere = (local < 0) | (local >= count)
    shares: Any = _Share.apply(top_k_weights, group)
    forward: Any = type(experts).forward
    out = forward(
        part, _Share.apply(hidden, group), local.masked_fill(elsewhere, count), shares.masked_fill(elsewhere, 0.0)
    )
    total: Any = _Sum.apply(out, group)
    return total


# ---------------- These functions split the weights of modules.


def _split(module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Split the weights of a module along `dim`. Biases belong to output features, so they are split only when `dim` is
    0."""
    for name, param in list(module.named_parameters(recurse=False)):
        if dim == 0 or name == "weight":
            # Without a source rank, each rank cuts its part from its own copy of the weights, without communication.
            part = distribute_tensor(param.detach(), mesh, [Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))


def _split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    _split(experts, mesh, 0)
    first = next(experts.parameters())
    start = mesh.get_local_rank() * (len(first) // mesh.size())
    experts.forward = functools.partial(_experts, experts, mesh.get_group(), start)


def _split_vocabulary(model: Any, mesh: DeviceMesh) -> int:
    """Split the embedding and the output layer by vocabulary. Returns the largest number of vocabulary entries that any
    rank holds."""
    embedding, head, group = model.get_input_embeddings(), model.get_output_embeddings(), mesh.get_group()
    tied = head.weight is embedding.weight
    width = ceil_div(model.config.vocab_size, mesh.size())
    _split(embedding, mesh, 0)
    if tied:
        head.weight = embedding.weight
    else:
        _split(head, mesh, 0)
    embedding.forward = functools.partial(_embedding, embedding, group, mesh.get_local_rank() * width)
    head.forward = functools.partial(_block, functools.partial(_columns, head), group)
    return width
