"""Connects the routers of a HF mixture-of-experts model to replay and to the balance of experts.

For replay a router's own code runs with another result of its `topk`, so that the gates of the given experts are
computed as the model computes them, whatever its formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ....actors.engines.hf.model import find_routers
from ....codecs.tokens.routes import RouteSpec
from ..config import BackendConfig
from ..expert_balance import ExpertBalance, ScoreKind
from ..layers import uncompiled
from ..router_replay import RouterReplay

ROUTERS: dict[str, ScoreKind] = {
    "Qwen3MoeTopKRouter": "softmax",
    "Qwen2MoeTopKRouter": "softmax",
    "OlmoeTopKRouter": "softmax",
    "DeepseekV3TopkRouter": "sigmoid",
    "Glm4MoeTopkRouter": "sigmoid",
    "Dots1TopkRouter": "sigmoid",
}
"""Classes of routers that can be balanced (transformers 5.23): name -> how they score experts. Each returns its logits,
the gates of the k chosen experts and their ids. Routers of the kind `softmax` choose the experts with the largest
probabilities. Those of the kind `sigmoid` add a bias to the scores before they choose."""
BIAS = "e_score_correction_bias"
"""Name of the buffer of routers that holds the biases of experts."""

Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tuple that a router returns for T tokens: logits `[T, E]`, gates `[T, k]` and expert ids, int64 `[T, k]`."""


def replay_routers(model: Any, replay: RouterReplay) -> None:
    """Make the routers of a HF model use the routes of `replay`, for as long as the model lives.

    Routers are as they were while no route is installed. Routes must stay installed until the end of the backward pass,
    which may compute layers again. Raises what `find_routers` raises.
    """
    why = "router_replay.enabled: got true, expected false"
    for index, (router, experts) in enumerate(find_routers(model, replay.spec.layers, why)):
        router.forward = uncompiled(partial(_routed, router.forward, replay, index))
        experts.register_forward_pre_hook(partial(_verify, replay, index))


def balance_experts(
    model: Any, config: BackendConfig, device: torch.device, group: dist.ProcessGroup | None
) -> ExpertBalance:
    """Balance the experts of a HF model as `config.trainer.moe` says, for as long as it lives.

    The hooks of `replay_routers` must be registered first, because they can replace the routers' choices. The model
    must already have its weights. group: the data-parallel ranks; None for one rank. Raises what `_balanced_routers`
    raises.
    """
    spec = RouteSpec.of(model.config)
    assert spec is not None, "check_split refuses models without experts"
    routers = _balanced_routers(model, spec.layers)
    balance = ExpertBalance(
        config, spec, range(len(spec.layers)), device,
        [getattr(router, BIAS) for router in routers] if config.trainer.moe.bias_update_rate else [],
        kind=ROUTERS[type(routers[0]).__name__], groups=() if group is None else (group,),
    )  # fmt: skip
    for index, router in enumerate(routers):
        router.register_forward_hook(partial(_balance, balance, index))
    return balance


def _balanced_routers(model: Any, layers: Sequence[int]) -> list[Any]:
    """Return the routers of the decoder layers `layers` of a HF model. Raises ValueError when they are not all of the
    classes in ROUTERS."""
    why = "trainer.moe: got a balance of experts, expected none"
    routers = [router for router, _ in find_routers(model, layers, why)]
    if unknown := {type(router).__name__ for router in routers} - set(ROUTERS):
        raise ValueError(
            f"{why} for {type(model).__name__}, because the backend fsdp can balance {', '.join(ROUTERS)}, but not "
            f"{', '.join(sorted(unknown))}"
        )
    return routers


def router_biases(model: Any) -> dict[str, torch.Tensor]:
    """Return the biases of experts of all routers of a HF model, float32 `[E]` each, by HF name; {} if it has none."""
    return {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == BIAS}


def _routed(forward: Any, replay: RouterReplay, layer: int, *inputs: Any, **arguments: Any) -> Any:
    """Run a router's own code, which chooses the experts of the routes.

    Raises RuntimeError if the code does not choose by one call of `topk`, because it would then use its own experts.
    """
    if not replay.running:
        return forward(*inputs, **arguments)
    with _Choice(replay, layer) as choice:
        output = forward(*inputs, **arguments)
    if choice.calls != 1:
        raise RuntimeError(
            f"router of layer {replay.spec.layers[layer]}: chose its experts by {choice.calls} calls of `topk`, "
            "expected one"
        )
    return output


class _Choice(TorchFunctionMode):
    """Replaces the experts that a router chooses with `topk`, the one call whose result is `[T, k]` of E scores."""

    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay, self._layer = replay, layer
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, spec = args[0], self._replay.spec
        if scores.ndim != 2 or (scores.shape[1], result.indices.shape[1]) != (spec.num_experts, spec.top_k):
            return result
        self.calls += 1
        index = self._replay.choose(self._layer, result.indices)
        return result if index is result.indices else torch.return_types.topk((scores.gather(1, index), index))


def _verify(replay: RouterReplay, layer: int, _: nn.Module, args: tuple[Any, ...]) -> None:
    if replay.verifying:
        replay.verify_used(layer, _used(args[1], replay.spec.num_experts))


def _balance(balance: ExpertBalance, layer: int, _: nn.Module, __: tuple[Any, ...], output: Output) -> Output:
    logits, gates, index = output
    return logits, balance.balance(layer, logits, _used(index, logits.shape[-1]), gates), index


def _used(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the experts that tokens are sent to, bool `[T, E]`. index: their ids, int64 `[T, k]`."""
    return torch.zeros(len(index), num_experts, dtype=torch.bool, device=index.device).scatter_(1, index, True)
