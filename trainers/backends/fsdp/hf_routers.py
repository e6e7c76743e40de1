"""Connects the routers of a HF mixture-of-experts model to replay and to the balance of experts, by hooks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ....codecs.tokens.routes import RouteSpec
from ..config import BackendConfig
from ..expert_balance import ExpertBalance, ScoreKind
from ..router_replay import RouterReplay

ROUTERS: dict[str, ScoreKind] = {
    "Qwen3MoeTopKRouter": "softmax",
    "Qwen2MoeTopKRouter": "softmax",
    "OlmoeTopKRouter": "softmax",
    "DeepseekV3TopkRouter": "sigmoid",
    "Glm4MoeTopkRouter": "sigmoid",
    "Dots1TopkRouter": "sigmoid",
}
"""Classes of routers that can be replayed and balanced (transformers 5.23): name -> how they score experts. Each
returns its logits, the gates of the k chosen experts and their ids. Routers of the kind `softmax` choose the experts
with the largest probabilities. Those of the kind `sigmoid` add a bias to the scores before they choose, and multiply
the gates by a constant. All divide the gates of a token by their sum if their `norm_topk_prob` is true."""
BIAS = "e_score_correction_bias"
"""Name of the buffer of routers that holds the biases of experts."""

Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tuple that a router returns for T tokens: logits `[T, E]`, gates `[T, k]` and expert ids, int64 `[T, k]`."""


def find_routers(model: Any, layers: Iterable[int], why: str) -> list[tuple[str, Any]]:
    """Return the names and modules of the routers of a HF model, one for each of the decoder layers `layers`.

    why: the configuration key that needs them, with its value, for the error. Raises ValueError when the model's
    routers are of another class, or when their number is not that of the layers with experts.
    """
    routers = [(name, module) for name, module in model.named_modules() if type(module).__name__ in ROUTERS]
    known, layers = [name for name, _ in routers], list(layers)
    if len(known) != len(layers) or any(f".{layer}." not in name for name, layer in zip(known, layers, strict=True)):
        raise ValueError(
            f"{why} for {type(model).__name__}, because the backend fsdp knows the routers of {len(known)} of its "
            f"{len(layers)} layers with experts ({', '.join(ROUTERS)})"
        )
    return routers


def replay_routers(model: Any, replay: RouterReplay) -> None:
    """Make the routers of a HF model use the routes of `replay`, for as long as the model lives.

    The hooks that it registers do nothing while no route is installed. Routes must stay installed until the end of the
    backward pass, which may compute layers again. Raises what `find_routers` raises.
    """
    routers = find_routers(model, replay.spec.layers, "router_replay.enabled: got true, expected false")
    for index, (name, router) in enumerate(routers):
        router.register_forward_hook(partial(_use_routes, replay, index))
        experts = model.get_submodule(f"{name.rpartition('.')[0]}.experts")
        experts.register_forward_pre_hook(partial(_verify, replay, index))


def balance_experts(
    model: Any, config: BackendConfig, device: torch.device, group: dist.ProcessGroup | None
) -> ExpertBalance:
    """Balance the experts of a HF model as `config.trainer.moe` says, for as long as it lives.

    The hooks of `replay_routers` must be registered first, because they can replace the routers' choices. The model
    must already have its weights. group: the data-parallel ranks; None for one rank. Raises what `find_routers` raises.
    """
    spec = RouteSpec.of(model.config)
    assert spec is not None, "check_split refuses models without experts"
    routers = find_routers(model, spec.layers, "trainer.moe: got a balance of experts, expected none")
    balance = ExpertBalance(
        config, spec, range(len(spec.layers)), device,
        [getattr(router, BIAS) for _, router in routers] if config.trainer.moe.bias_update_rate else [],
        kind=ROUTERS[type(routers[0][1]).__name__], groups=() if group is None else (group,),
    )  # fmt: skip
    for index, (_, router) in enumerate(routers):
        router.register_forward_hook(partial(_balance, balance, index))
    return balance


def router_biases(model: Any) -> dict[str, torch.Tensor]:
    """Return the biases of experts of all routers of a HF model, float32 `[E]` each, by HF name; {} if it has none."""
    return {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == BIAS}


def _use_routes(replay: RouterReplay, layer: int, router: Any, _: tuple[Any, ...], output: Output) -> Output:
    """Return what the router would have returned if it had chosen the experts of the routes."""
    logits, gates, own = output
    index = replay.choose(layer, own)
    if index is own:
        return output
    return logits, _gates(router, logits, index).to(gates.dtype), index


def _gates(router: Any, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the gates of the experts `index` (int64 `[T, k]`), as the router computes the gates of its own choice."""
    if ROUTERS[type(router).__name__] == "softmax":
        chosen = torch.softmax(logits, -1, dtype=torch.float).gather(1, index)
        return chosen / chosen.sum(-1, keepdim=True) if router.norm_topk_prob else chosen
    chosen = logits.sigmoid().gather(1, index)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * router.routed_scaling_factor


def _verify(replay: RouterReplay, layer: int, _: nn.Module, args: tuple[Any, ...]) -> None:
    if replay.verifying:
        replay.verify_used(layer, _used(args[1], replay.spec.num_experts))


def _balance(balance: ExpertBalance, layer: int, _: nn.Module, __: tuple[Any, ...], output: Output) -> Output:
    logits, gates, index = output
    return logits, balance.balance(layer, logits, _used(index, logits.shape[-1]), gates), index


def _used(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the experts that tokens are sent to, bool `[T, E]`. index: their ids, int64 `[T, k]`."""
    return torch.zeros(len(index), num_experts, dtype=torch.bool, device=index.device).scatter_(1, index, True)
