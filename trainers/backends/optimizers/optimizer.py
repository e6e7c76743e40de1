"""Builds the optimizer that `trainer.optimizer` names, and gives it one form whatever it consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..checkpoint_files import STEPS
from ..config import TrainerConfig
from .groups import parameter_groups
from .lean_adamw import MOMENTS, LeanAdamW

BITS = {"adamw": 32, "adamw_bf16": 16, "adamw_8bit": 8}
"""Number of bits of each value of AdamW's moments, by the value of `trainer.optimizer`."""


class Optimizer:
    """The optimizers of torch that together train this rank's pieces of a model, each some groups of parameters."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    def step(self, rate: float) -> None:
        """Update the parameters from their gradients, at `rate` times the factor of their group."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * group["lr_factor"]
            part.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of the state."""
        for part in self.parts:
            for state in part.state.values():
                yield from state.values()

    def training_state(self, model: nn.Module, steps: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that training changes, by name: weights, optimizer state and the number of steps. Frozen
        weights are left out if others are trained.

        The result holds the live tensors, sharded if the model is sharded, or copies of the optimizer's, where
        checkpoints have another form of them (see `restore`). Hyperparameters are left out on purpose, because a
        resumed run takes them from its config.
        """
        params = dict(model.named_parameters(remove_duplicate=False))
        trains = any(param.requires_grad for param in params.values())
        frozen = {name for name, param in params.items() if trains and not param.requires_grad}
        state = {STEPS: steps}
        state |= {f"model.{name}": value for name, value in model.state_dict().items() if name not in frozen}
        for name, part, param in self._named(model):
            own = part.stored(param) if isinstance(part, LeanAdamW) else part.state[param]
            state |= {f"optimizer.{name}.{key}": value for key, value in own.items()}
        return state

    def restore(self, model: nn.Module, stored: dict[str, torch.Tensor]) -> None:
        """Set the optimizer's state to `stored`, which `training_state` returned, filled from a checkpoint."""
        for name, part, param in self._named(model):
            if isinstance(part, LeanAdamW):
                start = f"optimizer.{name}."
                own = {key.removeprefix(start): value for key, value in stored.items() if key.startswith(start)}
                part.restore(param, own)

    def _named(self, model: nn.Module) -> Iterator[tuple[str, torch.optim.Optimizer, nn.Parameter]]:
        for name, param in model.named_parameters():
            for part in self.parts:
                if param in part.state:
                    yield name, part, param


def build_optimizer(model: nn.Module, config: TrainerConfig, place: str = "") -> Optimizer:
    """Build the optimizer of the trained parameters of `model` and allocate its state at once. Even a checkpoint from
    before the first step then contains the full state.

    `muon` (arXiv:2502.16982) is torch's, for the matrices between embedding and output layer. Its updates are scaled to
    the size of AdamW's, which trains the other parameters, so that both have the same learning rate. place: name of
    this rank's place in the mesh. The optimizer of a model that is not trained is empty. Raises what `parameter_groups`
    and `LeanAdamW` raise.
    """
    if not any(param.requires_grad for param in model.parameters()):
        return Optimizer(())
    groups = parameter_groups(model, config)
    parts: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        hidden = [group for group in groups if group["hidden"]]
        groups = [group for group in groups if not group["hidden"]]
        if hidden:
            parts.append(_allocated(torch.optim.Muon(hidden, lr=config.lr, adjust_lr_fn="match_rms_adamw")))
    settings: Any = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    bits = BITS.get(config.optimizer, 32)
    if groups and (bits < 32 or config.offload_optimizer):
        parts.append(LeanAdamW(groups, bits=bits, host=config.offload_optimizer, place=place, **settings))
    elif groups:
        parts.append(_allocated(torch.optim.AdamW(groups, fused=True, **settings)))
    return Optimizer(parts)


def _allocated(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Allocate the state of AdamW or Muon, and return the optimizer."""
    muon = isinstance(optimizer, torch.optim.Muon)
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if not muon:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in ("momentum_buffer",) if muon else MOMENTS:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return optimizer
