"""Connects the routers of a HF mixture-of-experts model to a `RouterReplay`, by hooks on its modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..router_replay.replay import RouterReplay

ROUTERS = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "OlmoeTopKRouter")
"""Classes of the routers that can be replayed. Each computes probabilities by a softmax over all experts in float32,
chooses the k most probable, and divides these by their sum if its `norm_topk_prob` is true (transformers 5.23)."""


def replay_routers(model: Any, replay: RouterReplay) -> None:
    """Make the routers of a HF model use the routes of `replay`, for as long as the model lives.

    The hooks do nothing while no route is installed. Routes must be installed until the end of the backward pass, which
    may compute layers again. Raises ValueError when the model's routers are of another class, or when their number is
    not that of the layers with experts.
    """
    routers = [(name, module) for name, module in model.named_modules() if type(module).__name__ in ROUTERS]
    layers = replay.spec.layers
    known = [name for name, _ in routers]
    if len(known) != len(layers) or any(f".{layer}." not in name for name, layer in zip(known, layers, strict=True)):
        raise ValueError(
            f"router_replay.enabled: got true, expected false for {type(model).__name__}, because the backend fsdp "
            f"knows the routers of {len(known)} of its {len(layers)} layers with experts ({', '.join(ROUTERS)})"
        )
    for index, (name, router) in enumerate(routers):
        router.register_forward_hook(partial(_use_routes, replay, index))
        experts = model.get_submodule(f"{name.rpartition('.')[0]}.experts")
        experts.register_forward_pre_hook(partial(_verify, replay, index))


def _use_routes(
    replay: RouterReplay,
    layer: int,
    router: Any,
    _: tuple[Any, ...],
    output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the router would have returned if it had chosen the experts of the routes."""
    logits, scores, own = output
    index = replay.choose(layer, own)
    if index is own:
        return output
    chosen = torch.softmax(logits, -1, dtype=torch.float).gather(1, index)
    if router.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, chosen.to(scores.dtype), index


def _verify(replay: RouterReplay, layer: int, experts: nn.Module, args: tuple[Any, ...]) -> None:
    """Check the experts that the layer was told to use, if the step verifies them."""
    if replay.verifying:
        _, index, _ = args
        used = torch.zeros(len(index), replay.spec.num_experts, dtype=torch.bool, device=index.device)
        replay.verify_used(layer, used.scatter_(1, index, True))
