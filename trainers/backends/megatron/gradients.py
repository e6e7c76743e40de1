"""Sums gradients over Megatron's ranks, computes their norm, and steps AdamW on each rank's share of the parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..config import BackendConfig
from ..train_step import scale_
from .library import (
    ChainedOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    finalize_model_grads,
    get_megatron_optimizer,
)
from .model import PolicyModel
from .weight_groups import overrides_of


def wrap_model(config: BackendConfig, model: PolicyModel) -> DistributedDataParallel:
    """Wrap `model` with float32 gradient buffers, which are reduced over ranks only when `sum_gradients` is called."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,  # Gradients are reduced after the last of a step's backward passes.
        use_distributed_optimizer=config.trainer.distributed_optimizer,
    )
    return DistributedDataParallel(model.config, settings, model)


def build_optimizer(config: BackendConfig, model: DistributedDataParallel) -> ChainedOptimizer:
    """Build AdamW for the groups of parameters that `group_parameters` has marked. The optimizer keeps float32 copies
    of bfloat16 parameters."""
    half = config.trainer.mixed_precision
    wanted = config.trainer
    settings = OptimizerConfig(
        optimizer="adam",
        decoupled_weight_decay=True,
        lr=wanted.lr,
        weight_decay=wanted.weight_decay,
        adam_beta1=wanted.betas[0],
        adam_beta2=wanted.betas[1],
        adam_eps=wanted.eps,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        use_distributed_optimizer=config.trainer.distributed_optimizer,
        clip_grad=0.0,  # `apply` scales and clips in one multiplication.
    )
    optimizer = get_megatron_optimizer(settings, [model], overrides_of(model), use_gloo_process_groups=False)
    assert isinstance(optimizer, ChainedOptimizer)
    for group in optimizer.param_groups:  # Without Apex, Megatron uses torch's AdamW without fused kernels.
        group["fused"] = all(param.is_cuda for param in group["params"])
    return optimizer


def clear_gradients(model: DistributedDataParallel, optimizer: ChainedOptimizer) -> None:
    """Set all gradients to zero."""
    model.zero_grad_buffer()
    optimizer.zero_grad()


def resident_tensors(
    model: DistributedDataParallel, optimizer: ChainedOptimizer
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all tensors that stay on the device between steps: those with content, and the gradient buffers. Tensors
    with content are parameters and their buffers, float32 copies, and optimizer state. The gradient buffers are zero
    between steps."""
    # `model.buffers` is Megatron's list, which hides torch's method.
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    kept = [*model.module.parameters(), *model.module.buffers()]
    kept += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    for part in optimizer.chained_optimizers:
        kept += [param for group in part.optimizer.param_groups for param in group["params"]]
        kept += [value for state in part.optimizer.state.values() for value in state.values()]
    return kept, [buffer.grad_data for buffer in buffers]


@torch.no_grad()
def sum_gradients(
    model: DistributedDataParallel, optimizer: ChainedOptimizer, tensor_ranks: dist.ProcessGroup
) -> float:
    """Sum the gradients over all ranks that share a parameter, and return the norm of the whole gradient. Collective.
    tensor_ranks: group of the tensor-parallel ranks.

    The function is called once per step. Megatron's schedules and DDP do not divide gradients
    (`calculate_per_token_loss`), so the results are sums over all microbatches and ranks, with each token counted once.
    In the norm, a parameter counts once even if several ranks hold copies of it.
    """
    # Megatron has no mark for the matrices of an adapter, whose gradients the tensor-parallel ranks have in parts.
    parts = [param.main_grad for param in model.parameters() if getattr(param, "in_parts", False)]
    if parts and tensor_ranks.size() > 1:
        every = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(every, group=tensor_ranks)
        for part, whole in zip(parts, every.split([part.numel() for part in parts]), strict=True):
            part.copy_(whole.view_as(part))
    finalize_model_grads([model])
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def apply(optimizer: ChainedOptimizer, factor: float, rate: float) -> None:
    """Multiply the summed gradients by `factor` and step the optimizer at learning rate `rate`. Collective."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params if param.grad is not None]
    if grads:
        scale_(grads, factor)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = rate * group["max_lr"], group["wd_mult"]
    optimizer.step_with_ready_grads()


def reference_copy(model: PolicyModel) -> list[torch.Tensor]:
    """Return copies of the current weights in host memory, in the order of `model.weights()`."""
    return [value.detach().to("cpu", copy=True) for value in model.weights().values()]


class Swapped:
    """Context in which the weights of a model are replaced by other values. On exit the original values are restored
    exactly."""

    def __init__(self, model: PolicyModel, values: list[torch.Tensor]) -> None:
        self._params, self._values = list(model.weights().values()), values

    @torch.no_grad()
    def __enter__(self) -> None:
        self._own = [param.detach().to("cpu", copy=True) for param in self._params]
        self._put(self._values)

    @torch.no_grad()
    def __exit__(self, *_: Any) -> None:
        self._put(self._own)
        del self._own

    def _put(self, values: list[torch.Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.copy_(value)
