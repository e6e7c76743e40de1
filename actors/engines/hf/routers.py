"""Records the experts that the routers of a Hugging Face mixture-of-experts model choose, by hooks on its modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from ....codecs.tokens.routes import RouteSpec

_ROUTER_SUFFIXES = ("TopKRouter", "TopkRouter")
"""Ends of the names of transformers' router classes (5.23) that return (logits, scores, indices), such as
Qwen3MoeTopKRouter."""


class RouteRecorder:
    """Keeps the experts that each router chose in the model's last forward pass. Only one thread may use it at a
    time."""

    def __init__(self, model: Any, spec: RouteSpec) -> None:
        """Attach a hook to the router of every layer with experts.

        model: a Hugging Face causal LM. Raises ValueError if a layer of `spec` has no router of a known class, or
        several.
        """
        self._spec = spec
        self._chosen: list[torch.Tensor | None] = [None] * len(spec.layers)
        """Indices of the chosen experts for each layer of `spec`, `[tokens, k]`."""
        layers = model.get_decoder().layers
        for index, layer in enumerate(spec.layers):
            routers = [part for part in layers[layer].modules() if type(part).__name__.endswith(_ROUTER_SUFFIXES)]
            if len(routers) != 1:
                raise ValueError(
                    f"router_replay.enabled: got true with a {type(model).__name__}, expected false, because the hf "
                    f"engine found {len(routers)} routers of a known class in its layer {layer}, and not one"
                )
            routers[0].register_forward_hook(partial(self._record, index))

    def _record(self, index: int, router: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        self._chosen[index] = output[-1]

    def take(self, rows: int) -> np.ndarray:
        """Return the routes of the last forward pass over `rows` rows of equal width, and forget them. They have the
        shape `[rows, width, layers, k]` and the dtype of the spec.

        The routes of padding are those that the routers chose for it. Raises RuntimeError if a router was not called.
        """
        chosen = [one for one in self._chosen if one is not None]
        if len(chosen) != len(self._chosen):
            raise RuntimeError(f"routes: {len(self._chosen) - len(chosen)} routers were not called in the forward pass")
        self._chosen = [None] * len(chosen)
        routes = torch.stack(chosen, dim=1).to(self._spec.dtype).cpu().numpy()
        return routes.reshape(rows, -1, *self._spec.trailing)
