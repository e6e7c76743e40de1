"""AdamW over plain or sharded parameters: groups, learning-rate schedule, gradient norm, scale and clip."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .config import TrainerConfig

ADAM_EPS = 1e-8
CLIP_EPS = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


def build_adamw(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Fused AdamW with its state in place from the start, so that a checkpoint before the first step is whole too.

    Weight decay is for matrices only: norms and biases have no decay.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    sorts: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for param in params:  # one fused kernel takes DTensors of one mesh only
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        sorts.setdefault((param.ndim < 2, mesh), []).append(param)
    groups = [
        {"params": members, "weight_decay": 0.0 if vector else config.weight_decay}
        for (vector, _), members in sorts.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=ADAM_EPS, fused=True)
    for param in params:
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (the first is 0): linear warm-up to `lr`, then constant, or a half cosine or a line
    that reaches 0 at `total_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / (total_steps - config.warmup_steps))
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    raise ValueError(f"trainer.schedule: got {config.schedule!r}, which is no schedule here")


def local_gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shards of the gradients that exist; writing to them writes to the gradients."""
    grads = [param.grad for param in params if param.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def square_norm(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """float64 scalar: sum of squares of this rank's shards. An element stands on one rank only, so parts add up."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(grads)  # pyright: ignore[reportPrivateImportUsage]  # what torch's own clipping calls
    return torch.stack(norms).to(device).double().square().sum()


def scale_(grads: list[torch.Tensor], factor: float) -> None:
    """Multiply in place, in one kernel for all."""
    torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What a gradient of norm `norm` is multiplied with so that it has at most `max_norm`."""
    return min(1.0, max_norm / (norm + CLIP_EPS))
