"""From named weights to the parameters of a vLLM worker: in place where that is legal, else layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from . import library
from .copy_plan import CopyPlan, ParameterPlaces, PlanRecorder
from .names import WeightNames

_NOWHERE: Mapping[str, torch.Tensor] = {}


class ModelLoader:
    """Replaces all weights of one model; `start -> load* -> finish -> [look]`.

    In place, weights are written into the live parameters: legal only while those are still as the model's loaders made
    them. The first time by the loaders, which are watched; from then on by the copies that they made (`copy_plan`), as
    long as the parameters stay where they are. Layer by layer, vLLM lays the checkpoint's parameters out anew, loads,
    has its kernels repack them, and copies the result to where the kernels read. Which of the two is decided by looking
    at the model that is really there.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model: Any = model
        self._config = vllm_config
        self._names: WeightNames | None = None
        self._plan: CopyPlan | None = None
        self._targets = _NOWHERE
        """The plan's."""
        self._refused: tuple[ParameterPlaces, str] | None = None
        """For which parameters there can be no plan, and why."""
        self._recorder: PlanRecorder | None = None
        self._sent: Collection[str] = ()
        """Names of the session's weights."""
        self._looked: Collection[str] | None = None
        """Weights that the plan was found to be good for."""
        self._confirmed = False
        """Whether it was found so within the session."""
        self.in_place = False
        """Whether the session that is open writes into live parameters."""
        self.way = ""
        """How the last session loaded: `in place`, by copies; `in place by the loaders: `, `layerwise: ` and why."""

    def start(self, names: WeightNames | None, sent: Collection[str]) -> None:
        """Open a session, in which the weights `sent` (HF names) will come; names: of the model."""
        self._names, self._recorder, self._sent = names, None, sent
        if self._looked != sent:
            self.look()
        if self._looked is not None:
            self.in_place, self.way, self._confirmed = True, "in place", False
            return
        self._plan = None
        hindrance = library.in_place_hindrance(self._model)
        self.in_place = not hindrance
        if not self.in_place:
            self.way = f"layerwise: {hindrance}"
            with library.set_current_vllm_config(self._config):
                library.forget_moe_kernels(self._model)
                library.initialize_layerwise_reload(self._model)
        elif self._refused is not None and self._refused[0].stand():
            self.way = f"in place by the loaders: {self._refused[1]}"
        else:
            self._recorder = PlanRecorder(self._model)
            self.way = "in place by the loaders: the first time"

    def load(
        self, weights: Iterable[tuple[str, torch.Tensor]], check: Callable[[str, torch.Tensor], None] | None = None
    ) -> None:
        """Load some weights under their HF names; any split, but each once a session. On a GPU the copies are queued
        on the current stream. check: raises for a weight that is not the model's; asked unless such were loaded
        before. Raises RuntimeError when somebody has replaced parameters since `look`."""
        weights = list(weights)
        with torch.no_grad():
            if self._plan is not None and self._plan.load(weights):
                if weights:
                    self._confirm()  # while the GPU copies, and the next ones are on their way
                return
        if check is not None:
            for name, tensor in weights:
                check(name, tensor)
        if self._recorder is not None:
            with self._recorder.watching(weights):
                self._load(weights)
        else:
            self._load(weights)

    def finish(self) -> None:
        """Close the session: repacked, in place for the kernels, done on the device."""
        self._looked = None
        if not self.in_place:
            with library.set_current_vllm_config(self._config):
                library.finalize_layerwise_reload(self._model, self._config.model_config)
        if self._recorder is not None:
            found = self._recorder.plan()
            if isinstance(found, CopyPlan):
                self._plan, self._targets = found, found.targets()
            else:
                self._refused = ParameterPlaces(self._model), found
            self._recorder = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def look(self) -> None:
        """What `start` would spend half a millisecond on, beforehand: whether the plan is good for the same weights
        again."""
        self._looked = self._sent if self._plan is not None and self._plan.loads(self._sent) else None

    @property
    def places(self) -> Mapping[str, torch.Tensor]:
        """Within a session: where weights may be written, by name, for `load` to find them there. The same mapping as
        long as the parameters stand."""
        return _NOWHERE if self._looked is None else self._targets

    def abandon(self) -> None:
        """End a session that broke off. The weights are in pieces, but the next session starts as if there had been
        none: layerwise reload would go on counting from where this one stopped."""
        self._recorder, self._looked = None, None
        if not self.in_place:
            with library.set_current_vllm_config(self._config):
                library.finalize_layerwise_reload(self._model, self._config.model_config)

    def _confirm(self) -> None:
        """Once a session: that the parameters which are written are those that the model computes with."""
        if self._looked is None or self._confirmed:
            return
        assert self._plan is not None
        if not self._plan.places.stand():
            raise RuntimeError("parameters of the model were replaced since the last weights were loaded")
        self._confirmed = True

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        named = weights if self._names is None else self._names.checkpoint(weights)
        with library.set_current_vllm_config(self._config), torch.no_grad():
            self._model.load_weights(iter(named))
