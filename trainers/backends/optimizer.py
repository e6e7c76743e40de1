"""Builds AdamW for plain or sharded parameters, and computes learning rates, gradient norms and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .config import TrainerConfig

ADAM_EPS = 1e-8
CLIP_EPS = 1e-6
"""Small number added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_."""


def build_adamw(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Build a fused AdamW optimizer and allocate its state at once. Even a checkpoint before the first step then
    contains the full state.

    Weight decay applies to matrices only, not to norms and biases. The optimizer of a model that is not trained is
    empty.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    sorts: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for param in params:  # a fused kernel takes DTensors of a single mesh only
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        sorts.setdefault((param.ndim < 2, mesh), []).append(param)
    groups = [
        {"params": members, "weight_decay": 0.0 if vector else config.weight_decay}
        for (vector, _), members in sorts.items()
    ]
    optimizer = torch.optim.AdamW(
        groups or [{"params": []}], lr=config.lr, betas=config.betas, eps=ADAM_EPS, fused=True
    )
    for param in params:
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(config: TrainerConfig, update: int, total_steps: int, updates_per_step: int = 1) -> float:
    """Return the learning rate of the optimizer update `update`, counted from 0 over the whole run.

    It rises linearly to `lr` in the warm-up. Then it is constant, or falls to `min_lr` along a half cosine or a line,
    which it reaches after `total_steps` steps of `updates_per_step` updates each.
    """
    warmup, total = config.warmup_steps * updates_per_step, total_steps * updates_per_step
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (update - warmup) / (total - warmup))
    if config.schedule == "cosine":
        return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return config.min_lr + (config.lr - config.min_lr) * (1 - progress)
    raise ValueError(f"trainer.schedule: got {config.schedule!r}, which is no schedule here")


def local_gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients of all parameters that have one. The shards share memory with the
    gradients."""
    grads = [param.grad for param in params if param.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def square_norm(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of this rank's gradient shards, a float64 scalar.

    Each element is on one rank only, so the ranks' values add up to the square of the whole norm.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(grads)  # pyright: ignore[reportPrivateImportUsage]  # what torch's own clipping calls
    return torch.stack(norms).to(device).double().square().sum()


def scale_(grads: list[torch.Tensor], factor: float) -> None:
    """Multiply all `grads` by `factor` in place, with one kernel."""
    torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor that reduces a gradient of norm `norm` to norm `max_norm`, at most 1. It is 1 if `max_norm` is
    None."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + CLIP_EPS))
