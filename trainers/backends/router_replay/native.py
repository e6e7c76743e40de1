"""Measures what the trainer's own routers would have done: how often they agree with the engine's, and at what cost."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ....codecs.tokens.routes import RouteSpec
from ...losses.mismatch import MISMATCH_SUMS, mismatch_of


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
