"""Connects the routers of a Megatron model to a `RouterReplay`, with pipelines, recomputation and sequence parallelism.

    forward step of a microbatch        its routes are installed; a layer that will be recomputed queues its choice
    backward pass, recomputed layer     nothing is installed; the layer takes the oldest choice of its queue

Pipelines run forward passes of later microbatches before the backward pass of an earlier one, so a layer may have
several choices in its queue, also between two calls of a step. Microbatches go backward in the order in which they went
forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ....actors.engines.config import RouterReplayConfig
from ....actors.train.stage_fields import stage_layers
from ....actors.train.topology import Topology
from ....codecs.tokens.routes import RouteSpec
from ..layers import uncompiled
from ..router_replay.replay import RouterReplay
from .library import MEGATRON_VERSION, TopKRouter
from .mesh import Mesh
from .model import PolicyModel


class PipelineReplay(RouterReplay):
    """The routes of the passes over one pipeline stage."""

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
        """Connect the routers of this rank's stage, and leave them to their own choices.

        kept_graph: true if layers are computed again by torch's own checkpoints, whose first pass keeps a graph.
        Megatron's run the first pass of a layer without one, which tells them apart from layers that are not computed
        again.

        A stage without layers with experts gets no routes, and its passes need none.

        Raises ValueError when this release of megatron-core cannot replay the choices of a router, or when the model's
        settings choose experts in a way that replay does not reach.
        """
        routers = [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
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
        """Context of the forward step of one microbatch that will have a backward pass, which replays `routes` too."""
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
            raise RuntimeError(f"router replay: layers computed again too rarely (layer: microbatches) {left}")

    def drop(self) -> None:
        """Forget the choices of microbatches whose backward pass is still to come. Idempotent."""
        for queue in self._queues:
            queue.clear()

    @contextmanager
    def _installed(self, routes: torch.Tensor | None) -> Iterator[None]:
        if (
            routes is not None and self._tensor_ranks > 1
        ):  # with sequence parallelism a router sees a part of the tokens
            routes = routes.chunk(self._tensor_ranks)[self._tensor_rank]
        with super()._installed(routes):
            yield

    @uncompiled
    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return the experts to use, as `RouterReplay.choose`; in a recomputed layer those of its forward pass."""
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
    """Raise ValueError when a router of Megatron chooses experts without asking its attribute `router_replay`."""
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
