"""Connects the routers of a Megatron model to replay and to the balance of experts.

    forward step of a microbatch        its routes are installed; a layer that will be recomputed queues its choice
    backward pass, recomputed layer     nothing is installed; the layer takes the oldest choice of its queue

Pipelines run forward passes of later microbatches before the backward pass of an earlier one, so a layer may have
several choices in its queue, even between two calls of a step. Microbatches go backward in the order in which they went
forward.

The balance of experts does the same: a layer that will be computed again queues the auxiliary loss of its first pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ....actors.engines.config import RouterReplayConfig
from ....actors.train.step_rows import stage_layers
from ....actors.train.topology import Topology
from ....actors.train_backend import MicroBatch
from ....codecs.tokens.routes import RouteSpec
from ..config import BackendConfig
from ..expert_balance import ExpertBalance, LayerLoss, RowShares
from ..layers import uncompiled
from ..router_replay import RouterReplay
from .library import MEGATRON_VERSION, TopKRouter
from .mesh import Mesh
from .model import PolicyModel


class PipelineReplay(RouterReplay):
    """Holds the routes of the passes over one pipeline stage."""

    def __init__(
        self,
        config: RouterReplayConfig,
        spec: RouteSpec,
        model: PolicyModel,
        topology: Topology,
        mesh: Mesh,
        device: torch.device,
        *,
        kept_graph: bool = False,
    ) -> None:
        """Connect the routers of this rank's stage. Without routes, routers use their own choices.

        kept_graph: true if layers are computed again by torch's own checkpoints, whose first pass keeps a graph.
        Megatron's checkpoints run the first pass of a layer without a graph, which tells such layers from layers that
        are not computed again.

        A stage without layers with experts gets no routes, and its passes need none.

        Raises ValueError when this release of megatron-core cannot replay the choices of a router, or when the model's
        settings choose experts in a way that replay does not reach.
        """
        routers = model.routers
        stage = stage_layers(topology, mesh.place, spec)
        assert len(routers) == len(stage), (len(routers), stage)
        super().__init__(config, spec, stage, device)
        self._tensor_rank, self._tensor_ranks = mesh.place.tp, mesh.tp.size() if model.config.sequence_parallel else 1
        self._queues = [deque[torch.Tensor]() for _ in routers]
        self._kept_graph = kept_graph
        self._queueing = False
        """True during the forward pass of a microbatch that will have a backward pass."""
        for index, router in enumerate(routers):
            check_router(router)
            router.router_replay = RoutedRouter(self, index)
            router.register_forward_hook(partial(self._verify, index))

    @contextmanager
    def training(self, routes: torch.Tensor | None) -> Iterator[None]:
        """Context of the forward step of one microbatch with a later backward pass. Both passes replay `routes`."""
        with self.replaying(routes):
            self._queueing = True
            try:
                yield
            finally:
                self._queueing = False

    def check_drained(self) -> None:
        """Raise RuntimeError if a layer has recomputed a microbatch less often than it ran forward. The routes of a
        later step would then be wrong. Called when all backward passes of a step are over."""
        left = {self.spec.layers[index]: len(queue) for index, queue in enumerate(self._queues) if queue}
        self.drop()
        if left:
            raise RuntimeError(
                f"router replay: these layers were not recomputed in the backward pass (layer: microbatches): {left}"
            )

    def drop(self) -> None:
        """Forget the choices of microbatches whose backward pass is still to come. Idempotent."""
        for queue in self._queues:
            queue.clear()

    @contextmanager
    def _installed(self, routes: torch.Tensor | None) -> Iterator[None]:
        # With sequence parallelism, a router gets only a part of the tokens.
        if routes is not None and self._tensor_ranks > 1:
            routes = routes.chunk(self._tensor_ranks)[self._tensor_rank]
        with super()._installed(routes):
            yield

    @uncompiled
    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return the experts to use, as `RouterReplay.choose` does. A recomputed layer uses those of its forward
        pass."""
        # Passes without gradients, such as those of the reference, run while choices are queued; they are not
        # computed again.
        if self._routes is None and torch.is_grad_enabled() and self._queues[layer]:
            return self._queues[layer].popleft()
        index = super().choose(layer, own)
        if self._queueing and (self._kept_graph or not torch.is_grad_enabled()):
            self._queues[layer].append(index)
        return index

    def _verify(self, layer: int, _: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self.verifying:
            self.verify_used(layer, output[1])


class RoutedRouter:
    """Stands in for Megatron's own `RouterReplay` in one router. The router calls `get_replay_topk` in each of its
    forward passes.

    Megatron's class is not used: it keeps all instances of a process in a global list, and queues the routes of passes
    that have no backward pass.
    """

    def __init__(self, replay: PipelineReplay, layer: int) -> None:
        self._replay, self._layer = replay, layer

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and ids of the experts to use for each of T tokens, `[T, k]` each.

        scores: `[T, num_experts]`, to which the router's own choice is applied by `default_compute_topk`.
        """
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        index = self._replay.choose(self._layer, own)
        return (values, own) if index is own else (scores.gather(1, index), index)


def check_router(router: Any) -> None:
    """Raise ValueError when a router of Megatron chooses experts without using its attribute `router_replay`."""
    if not isinstance(router, TopKRouter) or not hasattr(router, "router_replay"):
        raise ValueError(
            f"router_replay.enabled: got true, expected false with megatron-core {MEGATRON_VERSION}, whose routers "
            f"({type(router).__name__}) cannot replay choices; 0.16 can"
        )
    config = router.config
    if config.moe_router_fusion or router.routing_type != "none":
        raise ValueError(
            "router_replay.enabled: got true, expected false, because replay does not reach routers with "
            f"moe_router_fusion={config.moe_router_fusion} and moe_router_load_balancing_type={router.routing_type!r}"
        )


class PipelineBalance(ExpertBalance):
    """Balances the experts of one pipeline stage."""

    def __init__(
        self, config: BackendConfig, spec: RouteSpec, model: PolicyModel, mesh: Mesh, device: torch.device
    ) -> None:
        """Connect the routers of this rank's stage, for as long as the model lives.

        spec: shape of the routes of the whole model. With router replay, the replayed choice is balanced.
        """
        routers = model.routers
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
        if self._tensor_ranks > 1:  # With sequence parallelism a router gets only a part of the tokens.
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
        """Raise RuntimeError if a layer has recomputed a microbatch less often than it ran forward. Called when all
        backward passes of a step are over."""
        left = {self._spec.layers[self._stage[i]]: len(queue) for i, queue in enumerate(self._queues) if queue}
        self.drop()
        if left:
            raise RuntimeError(
                f"trainer.moe: these layers were not recomputed in the backward pass (layer: microbatches): {left}"
            )

    def drop(self) -> None:
        """Forget the microbatches whose backward pass is still to come. Idempotent."""
        for queue in self._queues:
            queue.clear()

    def _route(self, layer: int, routing: Any, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Do what a router's `routing` does, and balance what it returns: gates and used experts, both `[T, E]`."""
        gates, used = routing(logits, *args, **options)
        return self.balance(layer, logits.flatten(0, -2), used, gates), used
