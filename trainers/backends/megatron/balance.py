"""Connects the routers of a Megatron model to an `ExpertBalance`, with pipelines, recomputation and split rows.

As in `routers`, a layer that will be computed again queues what its second pass needs: the auxiliary loss of its first.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch

from ....actors.protocols import MicroBatch
from ....actors.train.stage_fields import stage_layers
from ....codecs.tokens.routes import RouteSpec
from ..config import BackendConfig
from ..expert_balance.balance import ExpertBalance, LayerLoss, RowShares
from ..layers import uncompiled
from .mesh import Mesh
from .model import PolicyModel


class PipelineBalance(ExpertBalance):
    """Balances the experts of one pipeline stage."""

    def __init__(
        self, config: BackendConfig, spec: RouteSpec, model: PolicyModel, mesh: Mesh, device: torch.device
    ) -> None:
        """Connect the routers of this rank's stage, for as long as the model lives.

        spec: shape of the routes of the whole model. What a router chooses is what replay makes of its choice.
        """
        routers = [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        stage = stage_layers(config.topology, mesh.place, spec)
        assert len(routers) == len(stage), (len(routers), stage)
        super().__init__(
            config, spec, stage, device,
            [router.expert_bias for router in routers] if config.trainer.moe.bias_update_rate else [],
            kind=model.config.moe_router_score_function,
            groups=(mesh.tokens, mesh.tp), row_groups=tuple(g for g in (mesh.tp, mesh.cp) if g.size() > 1),
        )  # fmt: skip
        self._tensor_rank, self._tensor_ranks = mesh.place.tp, mesh.tp.size() if model.config.sequence_parallel else 1
        self._kept_graph = config.trainer.recompute == "selective"
        self._queues = [deque[LayerLoss]() for _ in routers]
        for index, router in enumerate(routers):
            router.routing = partial(self._route, index, router.routing)

    def shares(self, micro: MicroBatch, owners: torch.Tensor) -> RowShares:
        if self._tensor_ranks > 1:  # with sequence parallelism a router sees a part of the tokens
            owners = owners.chunk(self._tensor_ranks)[self._tensor_rank]
        return super().shares(micro, owners)

    @uncompiled
    def balance(self, layer: int, logits: torch.Tensor, used: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            # Passes without gradients, such as those of the reference, run while losses are queued.
            if not torch.is_grad_enabled() or not self._queues[layer]:
                return gates
            return self.attach(self._queues[layer].popleft(), layer, logits, gates, again=True)
        loss = self.count(self._rows, layer, used)
        if self._kept_graph or not torch.is_grad_enabled():
            self._queues[layer].append(loss)
        return self.attach(loss, layer, logits, gates, again=False)

    def check_drained(self) -> None:
        """Raise RuntimeError if a layer has computed a microbatch again less often than forward. Called when all
        backward passes of a step are over."""
        left = {self._spec.layers[self._stage[i]]: len(queue) for i, queue in enumerate(self._queues) if queue}
        self.drop()
        if left:
            raise RuntimeError(f"trainer.moe: layers computed again too rarely (layer: microbatches) {left}")

    def drop(self) -> None:
        """Forget the microbatches whose backward pass is still to come. Idempotent."""
        for queue in self._queues:
            queue.clear()

    def _route(self, layer: int, routing: Any, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Do what a router's `routing` does, and balance what it returns: gates and used experts, both `[T, E]`."""
        gates, used = routing(logits, *args, **options)
        return self.balance(layer, logits.flatten(0, -2), used, gates), used
