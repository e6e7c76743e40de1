"""Splits a HF model over tensor-parallel ranks by the plan that transformers declares for the model.

A plan says how each projection is split (`base_model_tp_plan`, transformers 5). The method is that of Megatron-LM
(Shoeybi et al. 2019, arXiv:1909.08053): the input projections of a block are split by columns and its output
projections by rows, so that the block needs one all-reduce in forward and one in backward. Where a plan gathers what
was split by columns, a block's own code sees whole tensors. Embedding and output layer are split by vocabulary. Experts
are not split: each rank holds some of them and computes what these contribute to every token, and one all-reduce adds
up the contributions.

Weights are stored as DTensors for FSDP and checkpoints, but nothing is computed on DTensors. Computing on them would
give every rank the whole vocabulary's embedding gradient, does not support fused experts, and costs a dispatch per
operation. Therefore the styles of a plan are implemented here, on plain tensors.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ....codecs.integers import ceil_div
from ..lora.adapted_layers import with_adapter
from ..vocab.logprobs import VocabShard
from .causal_lm import CausalLM
from .fp8_layers import product

_PARTIAL = "_gradients_are_of_own_heads"
"""Attribute that marks modules whose weights every rank has whole but applies to its own heads only."""
_IN_BLOCKS = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
"""Styles of the modules of a block that shares its input between all its projections."""


_OF_EXPERTS = {"moe_tp_experts", "moe_identity_expert"}


def split_over(module: CausalLM, mesh: DeviceMesh, *, with_experts: bool) -> None:
    """Split the weights of `module` over the ranks of the one-dimensional `mesh`, in place.

    Before the call, all ranks hold the same whole weights. Afterwards the output layer computes only this rank's
    logits, and `module.vocab` says which tokens these logits belong to. with_experts: false when expert-parallel ranks
    share the experts. Raises ValueError, naming `trainer.tp`, when
    transformers declares no plan for the model, when the plan has an unknown style, or when a size does not divide.
    """
    model, group = module.model, mesh.get_group()
    plan = dict(model.tp_plan or {})
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    # The names are collected first, because a block is wrapped after its parts were split.
    found = [(name, child, plan.get(_pattern(name))) for name, child in model.named_modules() if child not in ends]
    if not any(style for _, _, style in found):
        raise ValueError(
            f"trainer.tp: got {mesh.size()}, expected 1 for {type(model).__name__}, because transformers declares no "
            "tensor-parallel plan for it"
        )
    blocks = [child for name, child, _ in found if _shares_input(child, name, plan)]
    shared = {id(part) for block in blocks for part in block.children()}
    for name, child, style in found:
        if style in _OF_EXPERTS and not with_experts:
            continue
        if style is not None:
            _apply(style, name, child, mesh, model, alone=id(child) not in shared)
            continue
        own = {part for part, _ in child.named_parameters(recurse=False) if plan.get(_pattern(f"{name}.{part}"))}
        if own:
            split(child, mesh, 0, own)
            child.forward = functools.partial(_with_local, child.forward, child, own)
    for block in blocks:
        block.forward = functools.partial(_block, block.forward, group)
    width = _split_vocabulary(model, mesh)
    size = model.config.get_text_config().vocab_size
    module.vocab = VocabShard(group, mesh.get_local_rank() * width, width, size)


def _pattern(name: str) -> str:
    """Return a module's name as plans have it, with `*` for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _shares_input(block: nn.Module, name: str, plan: dict[str, str]) -> bool:
    """Return whether all parts of a block with weights are split by columns or rows and nothing else.

    Its columns then all read the block's own input, whose gradient needs one all-reduce instead of one for each of
    them.
    """
    weighty = [part for part, child in block.named_children() if next(child.parameters(), None) is not None]
    styles = {plan.get(_pattern(f"{name}.{part}")) for part in weighty}
    return {"colwise", "rowwise"} <= styles <= _IN_BLOCKS


def _apply(style: str, name: str, child: Any, mesh: DeviceMesh, model: Any, *, alone: bool) -> None:
    """Split one module in the style that the plan gives it. alone: true when the module is not part of a block that
    shares its input."""
    group = mesh.get_group()
    if style in ("colwise", "colwise_gather_output", "colwise_rep"):
        split(child, mesh, 0)
        _split_adapter(child, mesh, 0)
        child.forward = functools.partial(_columns, child)
        if alone:
            child.forward = functools.partial(_block, child.forward, group)
        if style != "colwise":
            _require_even(name, child.weight, 0, mesh)
            child.forward = functools.partial(_then, child.forward, functools.partial(gather, group=group))
    elif style in ("rowwise", "rowwise_split_input", "rowwise_rep"):
        _require_even(name, child.weight, 1, mesh)
        split(child, mesh, 1)
        _split_adapter(child, mesh, 1)
        child.forward = functools.partial(_rows, child, group)
        if style != "rowwise":
            child.forward = functools.partial(_of_part, child.forward, group)
    elif style == "moe_tp_experts":
        _split_experts(child, mesh)
    elif style == "replicated_with_grad_allreduce":
        setattr(child, _PARTIAL, True)
    elif style == "mla_kv_a_proj":
        width = model.config.get_text_config().qk_rope_head_dim
        child.forward = functools.partial(_then, child.forward, functools.partial(_share_rotary, group, width))
    elif style == "all_reduce":
        child.forward = functools.partial(_then, child.forward, lambda out: _Sum.apply(out, group))
    elif style == "moe_identity_expert":
        child.forward = functools.partial(_then, child.forward, lambda out: out / mesh.size())
    else:
        raise ValueError(
            f"trainer.tp: got {mesh.size()}, expected 1, because the model's plan splits {name} in the style {style!r}"
        )


def _require_even(name: str, weight: torch.Tensor, dim: int, mesh: DeviceMesh) -> None:
    if weight.shape[dim] % mesh.size():
        raise ValueError(f"trainer.tp: got {mesh.size()}, expected a divisor of {weight.shape[dim]}, a size of {name}")


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
    params = [p for child in module.modules() if getattr(child, _PARTIAL, False) for p in child.parameters()]
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


def _joined(part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


class _Gather(torch.autograd.Function):
    """Joins the ranks' parts of a dimension. All ranks then compute the same, so backward keeps a rank's own part of
    the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.width = group, dim, tensor.shape[dim]
        return _joined(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].narrow(ctx.dim, ctx.group.rank() * ctx.width, ctx.width), None, None


def gather(part: torch.Tensor, group: dist.ProcessGroup, dim: int = -1) -> torch.Tensor:
    """Return the ranks' parts of dimension `dim`, joined in rank order."""
    whole: Any = _Gather.apply(part, group, dim)
    return whole


class _Part(torch.autograd.Function):
    """Takes this rank's part of a dimension of a tensor that is equal on all ranks; backward joins the parts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        width = tensor.shape[dim] // group.size()
        return tensor.narrow(dim, group.rank() * width, width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _joined(grads[0], ctx.group, ctx.dim), None, None


def share_out(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows of a tensor that is equal on all ranks, after rows of zeros that make them divisible."""
    rows = F.pad(rows, (0,) * (2 * rows.ndim - 1) + (-len(rows) % group.size(),))
    part: Any = _Part.apply(rows, group, 0)
    return part


# ---------------- These functions are the forward passes of split modules.


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _block(forward: Any, group: dist.ProcessGroup, *inputs: Any, **arguments: Any) -> Any:
    """Run an attention or MLP block, or one projection, with one all-reduce in backward, for the gradient of its input.

    The gradient is first summed over all projections of the block on each rank and then, by this all-reduce, over the
    ranks.
    """
    if inputs:
        return forward(_Share.apply(inputs[0], group), *inputs[1:], **arguments)
    return forward(**{**arguments, "hidden_states": _Share.apply(arguments["hidden_states"], group)})


def _then(forward: Any, change: Callable[[torch.Tensor], Any], *inputs: Any, **arguments: Any) -> Any:
    return change(forward(*inputs, **arguments))


def _of_part(forward: Any, group: dist.ProcessGroup, hidden: torch.Tensor) -> Any:
    return forward(_Part.apply(hidden, group, -1))


def _share_rotary(group: dist.ProcessGroup, width: int, out: torch.Tensor) -> torch.Tensor:
    """Share the last `width` numbers of the keys of latent attention, which all heads use directly.

    The others go through a projection that is split and shares its own input (DeepSeek-V2, arXiv:2405.04434).
    """
    rotary: Any = _Share.apply(out[..., -width:], group)
    return torch.cat([out[..., :-width], rotary], dim=-1)


def _with_local(forward: Any, module: nn.Module, names: set[str], *inputs: Any, **arguments: Any) -> Any:
    """Run a module whose own code uses its parameters `names`, of which it then sees this rank's parts."""
    whole = {name: module._parameters[name] for name in names}
    module._parameters.update({name: local_part(param) for name, param in whole.items()})  # pyright: ignore
    try:
        return forward(*inputs, **arguments)
    finally:
        module._parameters.update(whole)


def _columns(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    out = product(linear, hidden, local_part(linear.weight), None if linear.bias is None else local_part(linear.bias))
    return with_adapter(linear, out, hidden)


def _rows(linear: nn.Linear, group: dist.ProcessGroup, hidden: torch.Tensor) -> torch.Tensor:
    own = with_adapter(linear, product(linear, hidden, local_part(linear.weight)), hidden)
    total: Any = _Sum.apply(own, group)
    return total if linear.bias is None else total + linear.bias


class _SplitEmbedding(nn.Embedding):
    """An embedding of which each rank has some tokens. Models with embeddings of their own, which scale them, keep
    their class in front of this one."""

    split: tuple[dist.ProcessGroup, int]
    """Group of the ranks, and the first token of this rank."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        group, start = self.split
        weight = local_part(self.weight)
        local = input_ids - start
        here = (local >= 0) & (local < len(weight))
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        found = F.embedding(local.where(here, 0), weight, padding)
        total: Any = _Sum.apply(found.masked_fill(~here[..., None], 0.0), group)
        return total


class ExpertsPart:
    """Stand-in for a HF experts module that has only the experts of one rank. All other attributes come from the
    original module."""

    def __init__(self, module: nn.Module, **own: Any) -> None:
        self.__dict__.update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def own_experts(experts: nn.Module, **more: Any) -> ExpertsPart:
    """Return a stand-in for `experts` that has only those of this rank. more: other attributes of the stand-in."""
    weights = {name: local_part(param) for name, param in experts.named_parameters(recurse=False)}
    return ExpertsPart(experts, num_experts=len(next(iter(weights.values()))), **weights, **more)


def _experts(
    experts: nn.Module,
    group: dist.ProcessGroup,
    start: int,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    # HF marks experts on other ranks by an index one past the last and by `_is_expert_parallel`.
    part = own_experts(experts, _is_expert_parallel=True)
    count = part.num_experts
    local = top_k_index - start
    elsewhere = (local < 0) | (local >= count)
    shares: Any = _Share.apply(top_k_weights, group)
    forward: Any = type(experts).forward
    out = forward(
        part, _Share.apply(hidden, group), local.masked_fill(elsewhere, count), shares.masked_fill(elsewhere, 0.0)
    )
    total: Any = _Sum.apply(out, group)
    return total


def _sorted_experts(experts: nn.Module, group: dist.ProcessGroup, start: int, hidden: torch.Tensor) -> torch.Tensor:
    """Run experts of which each gets all tokens, `[E * T, H]`, weighted before (Llama 4)."""
    part = own_experts(experts)
    count = part.num_experts
    tokens = len(hidden) // (count * group.size())
    own: Any = _Share.apply(hidden, group)
    forward: Any = type(experts).forward
    out = forward(part, own[start * tokens : (start + count) * tokens])
    rest = len(hidden) - (start + count) * tokens
    total: Any = _Sum.apply(F.pad(out, (0, 0, start * tokens, rest)), group)
    return total


# ---------------- These functions split the weights of modules.


def split(module: nn.Module, mesh: DeviceMesh, dim: int, only: set[str] | None = None) -> None:
    """Split the weights of a module along `dim`. Biases belong to output features, so they are split only when `dim` is
    0. only: names of the parameters to split; None for all."""
    for name, param in list(module.named_parameters(recurse=False)):
        if (only is None or name in only) and (dim == 0 or name == "weight"):
            # Without a source rank, each rank cuts its part from its own copy of the weights, without communication.
            part = distribute_tensor(param.detach(), mesh, [Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))


def _split_adapter(layer: Any, mesh: DeviceMesh, dim: int) -> None:
    """Split the matrix of an adapter that has the dimension along which the layer is split. Every rank has the other
    one whole and applies it to its own part, so that its gradients are parts of a sum."""
    if hasattr(layer, "lora"):
        own, whole = (layer.lora_B, layer.lora_A) if dim == 0 else (layer.lora_A, layer.lora_B)
        split(own, mesh, dim)
        setattr(whole, _PARTIAL, True)


def _split_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    count = len(next(experts.parameters()))
    if count % mesh.size():
        raise ValueError(f"trainer.tp: got {mesh.size()}, expected a divisor of the model's {count} experts")
    split(experts, mesh, 0)
    start = mesh.get_local_rank() * (count // mesh.size())
    sorted_already = len(inspect.signature(type(experts).forward).parameters) == 2
    forward = _sorted_experts if sorted_already else _experts
    experts.forward = functools.partial(forward, experts, mesh.get_group(), start)


def _split_vocabulary(model: Any, mesh: DeviceMesh) -> int:
    """Split the embedding and the output layer by vocabulary. Returns the largest number of vocabulary entries that any
    rank holds."""
    embedding, head, group = model.get_input_embeddings(), model.get_output_embeddings(), mesh.get_group()
    tied = head.weight is embedding.weight
    width = ceil_div(model.config.get_text_config().vocab_size, mesh.size())
    split(embedding, mesh, 0)
    if tied:
        head.weight = embedding.weight
    else:
        split(head, mesh, 0)
    kind = type(embedding)
    embedding.split = group, mesh.get_local_rank() * width
    bases = (_SplitEmbedding,) if kind is nn.Embedding else (kind, _SplitEmbedding)
    embedding.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    head.forward = functools.partial(_block, functools.partial(_columns, head), group)
    return width
