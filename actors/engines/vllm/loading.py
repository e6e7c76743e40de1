"""From named weights to the parameters of a vLLM worker: in place where that is legal, else layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import library


class ModelLoader:
    """Replaces all weights of one model; `start -> load* -> finish`.

    In place, `load_weights` writes into the live parameters: three to four times as fast, and legal only while those
    are still as the loader made them. Layer by layer, vLLM lays the checkpoint's parameters out anew, loads, has its
    kernels repack them, and copies the result to where the kernels read. Which of the two is decided by looking at
    the model that is really there, at every start.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model: Any = model
        self._config = vllm_config
        self.in_place = False
        """Whether the session that is open writes into live parameters."""
        self.way = ""
        """How the last session loaded, and why not in place."""

    def start(self) -> None:
        """Open a session."""
        hindrance = library.in_place_hindrance(self._model)
        self.in_place = not hindrance
        self.way = "in place" if self.in_place else f"layerwise: {hindrance}"
        if not self.in_place:
            with library.set_current_vllm_config(self._config):
                library.forget_moe_kernels(self._model)
                library.initialize_layerwise_reload(self._model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some weights under their checkpoint names; any split, but each once a session."""
        with library.set_current_vllm_config(self._config), torch.no_grad():
            self._model.load_weights(iter(weights))

    def finish(self) -> None:
        """Close the session: repacked, in place for the kernels, done on the device."""
        if not self.in_place:
            with library.set_current_vllm_config(self._config):
                library.finalize_layerwise_reload(self._model, self._config.model_config)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def abandon(self) -> None:
        """End a session that broke off. The weights are in pieces, but the next session starts as if there had been
        none: layerwise reload would go on counting from where this one stopped."""
        if not self.in_place:
            with library.set_current_vllm_config(self._config):
                library.finalize_layerwise_reload(self._model, self._config.model_config)
