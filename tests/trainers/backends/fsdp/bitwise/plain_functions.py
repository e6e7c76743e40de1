"""Provides the functions of an engine's layers in plain torch, for machines on which the engine's own do not run."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.actors.engines.hf import fixed_shapes
from headrace.trainers.backends.fsdp.bitwise import exact_layers


class PlainFunctions:
    """Functions of a layer with the formulas of transformers."""

    def __init__(self, head: int, context: int, theta: float, dtype: torch.dtype) -> None:
        inverse = 1.0 / theta ** (torch.arange(0, head, 2, dtype=torch.float) / head)
        angles = torch.arange(context, dtype=torch.float)[:, None] * inverse
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
        self.calls: list[str] = []

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.calls.append("linear")
        return F.linear(x, weight)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        self.calls.append("norm")
        return _norm(x, weight, epsilon)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("rotate")
        query, key = exact_layers._rotate(positions, self.cos_sin, query, key)
        return query, key

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("gate")
        return exact_layers._gate(x)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: torch.Tensor,
        longest: int,
        scale: float,
    ) -> torch.Tensor:
        self.calls.append("attend")
        return exact_layers._attend(ends, longest, scale, query, key, value)

    def divide(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        self.calls.append("divide")
        return logits.div_(temperature)

    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("token_logprobs")
        return fixed_shapes.token_logprobs(logits.float(), tokens)


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    whole = x.float()
    return weight * (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
