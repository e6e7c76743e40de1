"""Gives a model's routers the engine's choice of experts, and measures what their own choice would have been.

A router computes its scores and its own choice as always. `choose` then returns the engine's choice instead, except for
tokens without a route, and the router takes the scores of these experts. So the values of the gates are the trainer's
own, and gradients flow through them ("Rollout Routing Replay", arXiv:2510.11370).

The measure says how often the trainer's own routers agree with the engine's, and what the difference costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...actors.engines.config import RouterReplayConfig
from ...codecs.batch import Batch
from ...codecs.tokens.routes import ROUTES, RouteSpec, check_routes
from ..losses.correction import MISMATCH_SUMS, mismatch_of
from .layers import uncompiled


class NativeTally:
    """Counts choices of the trainer's own routers that equal the engine's, on some rows, and their mismatch. The
    mismatch is that of the log-probs that result from these choices."""

    def __init__(self, spec: RouteSpec, stage: range, device: torch.device) -> None:
        """Start with all counts at zero.

        spec: shape of the routes of the whole model. stage: positions in `spec.layers` of the layers that this rank
        computes.
        """
        self._layers, self._first = spec.layers, stage.start
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        self._choices = torch.zeros(2, len(self._layers), dtype=torch.float64, device=self._device)
        self._mismatch = torch.zeros(len(MISMATCH_SUMS) + 1, dtype=torch.float64, device=self._device)
        self._largest = torch.zeros((), dtype=torch.float64, device=self._device)

    def compare(self, layer: int, own: torch.Tensor, routes: torch.Tensor, missing: torch.Tensor) -> None:
        """Count the tokens for which layer `layer` of this rank chose the same set of experts as the engine.

        own: the router's choice, int64 `[T, k]`. routes: the engine's, integers `[T, k]`. missing: bool `[T, 1]`, true
        for tokens without a route, which are not counted.
        """
        same = (own.sort(1).values == routes.long().sort(1).values).all(1, keepdim=True) & ~missing
        self._choices[:, self._first + layer] += torch.stack([same.sum(), (~missing).sum()])

    def add_logprobs(self, logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> None:
        """Add the log-probs that tokens have with the routers' own choices, and those of the engine: float32 `[T]`."""
        sums, largest = mismatch_of(logprobs, rollout_logprobs)
        self._mismatch += torch.cat([sums, sums.new_tensor([len(logprobs)])])
        self._largest = torch.maximum(self._largest, largest)

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks, and start again at zero. Collective over all ranks of the mesh.

        `routes/native_agreement` is the share of choices (token x layer) that equal the engine's as sets,
        `routes/native_agreement_layer_{i}` the share at decoder layer i, and `routes/native_mismatch_*` are
        `logprob/mismatch_*` of a forward pass without replay. Ranks that compute the same tokens all count them, which
        changes none of these ratios.
        """
        totals = torch.cat([self._choices.flatten(), self._mismatch])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals)
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        count = len(self._layers)
        same, known, sums = totals[:count].tolist(), totals[count : 2 * count].tolist(), totals[2 * count :].tolist()
        largest = float(self._largest)
        self.reset()
        figures: dict[str, float] = {}
        if sum(known):
            figures["routes/native_agreement"] = sum(same) / sum(known)
            figures |= {
                f"routes/native_agreement_layer_{layer}": number / total
                for layer, number, total in zip(self._layers, same, known, strict=True)
            }
        *parts, tokens = sums
        if tokens:
            names = (f"routes/native_{name}" for name in MISMATCH_SUMS)
            figures |= {name: value / tokens for name, value in zip(names, parts, strict=True)}
            figures["routes/native_mismatch_max"] = largest
        return figures


R = TypeVar("R", bound="RouterReplay")


def route_spec(model: Any) -> RouteSpec:
    """Return the shape of the routes of the model with HF config `model`. Raises ValueError for a model without
    experts."""
    spec = RouteSpec.of(model)
    if spec is None:
        raise ValueError(
            f"router_replay.enabled: got true, expected false for a model of type {model.model_type!r}, which has no "
            "experts"
        )
    return spec


def require_replay(replay: R | None) -> R:
    """Return `replay`. Raises ValueError if it is None, because the backend was built without router replay."""
    if replay is None:
        raise ValueError("router_replay.enabled: got false, expected true to measure the routers' own choices")
    return replay


class RoutesDiffer(RuntimeError):
    """A layer sent a token to other experts than those of the token's route."""


class RouterReplay:
    """The routes of the pass that a model runs now, for those of its layers with experts that this rank computes.

    Outside of `replaying` and `observing` no route is installed, and every router uses its own choice.
    """

    def __init__(self, config: RouterReplayConfig, spec: RouteSpec, stage: range, device: torch.device) -> None:
        """Prepare the replay in a model without routes.

        spec: shape of the routes of the whole model. stage: positions in `spec.layers` of the layers that this rank
        computes; the microbatches that it gets have the routes of these layers only.
        """
        self._config = config
        self.spec = replace(spec, layers=tuple(spec.layers[index] for index in stage))
        """Shape of the routes of the layers that this rank computes."""
        self.native = NativeTally(spec, stage, device)
        self._routes: torch.Tensor | None = None
        """Routes of the tokens of the current pass, `[T, layers, k]` of the spec's dtype; None outside of a pass."""
        self._observed = False
        """True if the routers of the current pass use their own choices, which are compared with the routes."""
        self._measures = self._measured = False
        self._begun = 0

    # ---------------- These methods belong to one train step.

    def begin_step(self, number: int) -> None:
        """Begin a train step. number: number of steps that the run has finished."""
        every = self._config.native_agreement_every
        self._measures = every > 0 and number % every == 0
        self._measured = False
        self.native.reset()  # An aborted step can have left counts.
        self._begun += 1

    def take_measurement(self) -> bool:
        """Return True once in each step that measures what the routers' own choices would have been. All ranks must
        call this before the same microbatch."""
        measures, self._measures = self._measures, False
        self._measured |= measures
        return measures

    def metrics(self) -> dict[str, float]:
        """Return what the step has measured, see `NativeTally.metrics`; {} if nothing. Collective."""
        return self.native.metrics() if self._measured else {}

    @property
    def verifying(self) -> bool:
        """True if the layers must compare the experts that they use with the routes, by `verify_used`."""
        return self._config.verify == "forward" and 0 < self._begun <= self._config.verify_steps

    def read(self, batch: Batch) -> torch.Tensor | None:
        """Return the routes of a microbatch's tokens, `[tokens, layers, k]` of the spec's dtype. Returns None on a rank
        that computes no layer with experts, which gets no routes.

        Raises ValueError when the batch lacks the column or has another number of layers, and RoutesDamaged, with
        `router_replay.verify` other than `off`, when a route is impossible.
        """
        if not self.spec.layers:
            return None
        if ROUTES not in batch:
            raise ValueError(
                f"microbatch: it has no {ROUTES!r}, which router_replay.enabled needs; it has "
                f"{', '.join(batch) or 'none'}"
            )
        values = batch.jagged(ROUTES).values
        if tuple(values.shape[1:]) != self.spec.trailing or values.dtype != self.spec.dtype:
            raise ValueError(
                f"microbatch: {ROUTES!r} has routes {list(values.shape[1:])} of {values.dtype}, expected "
                f"{list(self.spec.trailing)} of {self.spec.dtype} (layers {list(self.spec.layers)})"
            )
        if self._config.verify != "off" and len(values):
            check_routes(values.cpu().numpy(), self.spec, "microbatch")
        return values

    # ---------------- These methods belong to one pass of the model.

    @property
    def running(self) -> bool:
        """True if the current pass has routes."""
        return self._routes is not None

    @contextmanager
    def replaying(self, routes: torch.Tensor | None) -> Iterator[None]:
        """Context in which the routers use `routes`, `[T, layers, k]`, where T counts the tokens of the pass. `routes`
        is None on a rank without layers with experts."""
        with self._installed(routes):
            yield

    @contextmanager
    def observing(self, routes: torch.Tensor | None) -> Iterator[None]:
        """Context in which the routers use their own choices. `native` counts how often they equal `routes`, which are
        as in `replaying`."""
        with self._installed(routes):
            self._observed = True
            yield

    @contextmanager
    def _installed(self, routes: torch.Tensor | None) -> Iterator[None]:
        assert self._routes is None, "a pass within a pass"
        self._routes = routes
        try:
            yield
        finally:
            self._routes, self._observed = None, False

    @uncompiled  # torch.compile must leave this method alone, because its result depends on the pass.
    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return the experts that layer number `layer` of `spec.layers` must use for each token, int64 `[T, k]`.

        own: the router's own choice, int64 `[T, k]`, which is used for tokens without a route, and outside of
        `replaying`.
        """
        if self._routes is None:
            return own
        return self._choose(layer, own, self._routes[:, layer])

    def _choose(self, layer: int, own: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        if routes.shape != own.shape:
            raise ValueError(
                f"router of layer {self.spec.layers[layer]}: chooses experts {list(own.shape)}, but the routes of the "
                f"pass are {list(routes.shape)}"
            )
        missing = routes[:, :1] == self.spec.mark
        if self._observed:
            self.native.compare(layer, own, routes, missing)
            return own
        return torch.where(missing, own, routes.long())

    @uncompiled
    def verify_used(self, layer: int, used: torch.Tensor) -> None:
        """Raise RoutesDiffer if layer number `layer` of `spec.layers` has sent a token to experts outside its route.
        used: bool `[T, num_experts]`, true for the experts that each token is sent to."""
        if self._routes is None or self._observed:
            return
        routes = self._routes[:, layer]
        known = routes[:, 0] != self.spec.mark
        wanted = torch.zeros_like(used).scatter_(1, routes.long().masked_fill(~known[:, None], 0), True)
        wrong = ((wanted != used).any(1) & known).nonzero().flatten()
        if len(wrong):
            token = int(wrong[0])
            raise RoutesDiffer(
                f"router_replay.verify: layer {self.spec.layers[layer]} sent token {token} of a microbatch to experts "
                f"{used[token].nonzero().flatten().tolist()}, expected {sorted(routes[token].tolist())}"
            )
