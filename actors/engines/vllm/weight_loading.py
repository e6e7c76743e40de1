"""`ModelLoader` loads named weights into a vLLM worker's model: in place where that is safe, else layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ....codecs.weights.parameter_digests import ParameterDigest, ParameterDigests
from . import library
from .copy_plan import CopyPlan, ParameterPlaces, PlanRecorder
from .quantized.served_layers import ServedLayers
from .weight_names import WeightNames

_NOWHERE: Mapping[str, torch.Tensor] = {}


class ModelLoader:
    """Replaces all weights of one model, in sessions of `start -> load* -> finish -> [look]`.

    In place means that weights are written into the live parameters, which is safe only while the parameters are still
    as the model's loaders made them. The first such session runs the loaders and records their copies (`copy_plan`);
    later ones repeat the copies, as long as the parameters stay where they are. Layer by layer means that vLLM
    allocates the checkpoint's parameters again, loads them, lets its kernels repack them, and copies the result to the
    memory that the kernels read. The model in memory decides which of the two is used. If it has layers in 8 bits that
    keep the bytes as they were sent in another form (`ServedLayers.memory`), loaders get a view of that memory, so that
    these are written in place, too, and only the modules for which that is not safe are loaded layer by layer.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model: Any = model
        self._served = frozenset(name.rpartition(".")[2] for name, _ in model.named_modules())
        self._config = vllm_config
        self._names: WeightNames | None = None
        self._plan: CopyPlan | None = None
        self._targets = _NOWHERE
        """Parameter memory to which the copy plan lets weights be written directly, by weight name."""
        self._refused: tuple[ParameterPlaces, str] | None = None
        """Parameters for which no copy plan can be made, and the reason; None when there are none."""
        self._recorder: PlanRecorder | None = None
        self._sent: Collection[str] = ()
        """Names of the weights that the open session loads."""
        self._looked: Collection[str] | None = None
        """Names of the weights for which `look` found the copy plan valid; None if it is not valid."""
        self._confirmed = False
        """True once the parameters have been checked again in the open session."""
        self._reloaded: Sequence[torch.nn.Module] = ()
        """Modules that the open session loads layer by layer; the model itself if that is all of it."""
        self._layers: ServedLayers | None = getattr(model, "headrace_layers", None)
        self._notes = False
        """True if the open session takes digests of weights of which this worker has parts."""
        self.way = ""
        """How the last session loaded: `in place` when it repeated recorded copies; or `in place by the loaders: ` or
        `layerwise: `, followed by the reason. It ends with how many 8-bit layers are loaded how."""

    def start(self, names: WeightNames | None, sent: Collection[str], *, notes: bool = False) -> None:
        """Open a session that loads the weights `sent` (Hugging Face names). names: converts these names to those of a
        checkpoint; None leaves them as they are. notes: whether the weights come as a whole and are compared later."""
        self._notes = notes and self._layers is not None
        if self._layers is not None:
            self._layers.begin()
        self._names, self._recorder, self._sent = names, None, sent
        if self._looked != sent:
            self.look()
        if self._looked is not None:
            self.way, self._confirmed = "in place", False
        else:
            self._plan = None
            self.way = self._begin_without_plan()
        if self._layers is not None:
            self.way += f"; {self._layers}"
        for module in self._reloaded:
            with library.set_current_vllm_config(self._config):
                library.forget_moe_kernels(module)
                library.initialize_layerwise_reload(module)

    def _begin_without_plan(self) -> str:
        """Find out how to load, and return it in words."""
        memory = [] if self._layers is None else self._layers.memory()
        found = list(library.hindrances(self._model, [module for module, _, _ in memory]))
        alone = [module for module, _ in found if module is not None]
        self._reloaded = alone if memory and len(alone) == len(found) else [self._model] if found else []
        if self._whole:
            return f"layerwise: {found[0][1]}"
        if self._refused is not None and self._refused[0].stand():
            return f"in place by the loaders: {self._refused[1]}"
        views = {id(module._parameters[name]): view for module, name, view in memory}
        self._recorder = PlanRecorder(self._model, views, self._reloaded)
        return "in place by the loaders: the first time"

    @property
    def _whole(self) -> bool:
        """True if the whole model is loaded layer by layer."""
        return any(module is self._model for module in self._reloaded)

    def lasting(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Return `weights`, in which those are copies that the session reads again after `load` has returned. A layer
        that is loaded layer by layer keeps tensors until it is complete."""
        kept = None if self._looked is None or self._plan is None else self._plan.others
        return [
            (name, tensor.clone() if self._reloaded and (kept is None or name in kept) else tensor)
            for name, tensor in weights
        ]

    def load(
        self, weights: Iterable[tuple[str, torch.Tensor]], check: Callable[[str, torch.Tensor], None] | None = None
    ) -> None:
        """Load some of the session's weights, under their Hugging Face names. They may be split over calls in any way,
        but each weight must come exactly once in a session.

        On a GPU the copies are queued on the current CUDA stream. check: function that raises an error for a weight
        that does not fit the model; it is not called for weights that the copy plan covers. Raises RuntimeError when
        parameters were replaced since `look`.
        """
        weights = list(weights)
        if self._layers is not None and self._notes:
            self._layers.arrive(weights)
        with torch.no_grad():
            if self._plan is not None and self._plan.load(weights):
                if weights:
                    self._confirm()  # The check overlaps with the GPU copies and the arrival of the next weights.
                if others := [one for one in weights if one[0] in self._plan.others]:
                    self._load(others)
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
        """Close the session: repack weights where needed, keep the recorded copies as a plan, and await the device."""
        self._looked = None
        self._end_reload()
        if self._recorder is not None:
            found = self._recorder.plan()
            if isinstance(found, CopyPlan):
                self._plan, self._targets = found, found.targets()
            else:
                self._refused = ParameterPlaces(self._model, self._reloaded), found
            self._recorder = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def look(self) -> None:
        """Check whether the copy plan can load the same weights again. If this is done right after a session, the next
        `start` is half a millisecond faster."""
        self._looked = self._sent if self._plan is not None and self._plan.loads(self._sent) else None

    @property
    def places(self) -> Mapping[str, torch.Tensor]:
        """Memory within the live parameters, by weight name, into which weights can be written before `load`. Empty
        when the recorded copies do not fit the session.

        The mapping stays the same as long as the parameters stay at the same places in memory.
        """
        return _NOWHERE if self._looked is None else self._targets

    def served(self) -> Callable[[ParameterDigest], Sequence[torch.Tensor]]:
        """Return a function that reads a weight, as it was sent, back from the live parameters. The function returns no
        tensor for a weight that cannot be read back exactly.

        Weights in 8 bits are read by `ServedLayers`. If the copies were recorded, it can read the weights that are
        complete in this worker; with tensor parallelism, these are the weights that are not split. If modules were
        loaded layer by layer, it can read other weights only from parameters that no kernel repacks, such as norms. If
        the loaders convert weights, it can read no other weights.
        """
        plan = self._plan if self._plan is not None and self._plan.places.stand() else None
        own = library.plain_parameters(self._model) if self._reloaded else {}
        in_8_bits = self._layers.reader() if self._layers is not None and self.way else lambda _: []

        def read(weight: ParameterDigest) -> list[torch.Tensor]:
            found = [own[name] for name in self._own_names(weight.name) if name in own]
            # vLLM pads the rows of embeddings.
            found = [one[: weight.shape[0]] if weight.shape and one.ndim else one for one in found]
            found = [one for one in found if weight.fits(one)] or in_8_bits(weight)
            return found or ([] if plan is None else plan.read(weight))

        return read

    def expected(self, digests: ParameterDigests) -> ParameterDigests:
        """Return the trainer's digests, those of this worker's parts in place of those of weights that are split."""
        return digests if self._layers is None else self._layers.in_parts(digests)

    def _own_names(self, name: str) -> list[str]:
        """Return the model's own names of a weight with this Hugging Face name. There is none if it is left out."""
        stored = name if self._names is None else self._names.stored(name)
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return [stored] if mapper is None else mapper.apply_list([stored])

    def abandon(self) -> None:
        """End a session that failed half way. The model holds a mix of two versions, but the next session starts from
        the beginning. Without this call, vLLM's layerwise reload would continue to count from where this session
        stopped."""
        self._recorder, self._looked = None, None
        self._end_reload()

    def _end_reload(self) -> None:
        for module in self._reloaded:
            with library.set_current_vllm_config(self._config):
                library.finalize_layerwise_reload(module, self._config.model_config)

    def _confirm(self) -> None:
        """Check, once per session, that the model still computes with the parameters that are being written. Raises
        RuntimeError if it does not."""
        if self._looked is None or self._confirmed:
            return
        assert self._plan is not None
        if not self._plan.places.stand():
            raise RuntimeError("parameters of the model were replaced since the last weights were loaded")
        self._confirmed = True

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        named = weights if self._names is None else self._names.checkpoint(weights, self._served)
        layers = None if self._whole else self._layers
        lent = nullcontext() if layers is None else layers.lent(library.loader_parameter)
        with library.set_current_vllm_config(self._config), torch.no_grad(), lent:
            self._model.load_weights(iter(named))
