"""Makes vLLM quantize a model's files as it loads them, by the same rule as the trainer quantizes later versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from .....codecs.weights.conversion import converted, wire_dtype
from .....codecs.weights.parameter_digests import DigestTaker
from .....codecs.weights.quantization import Quantization
from .. import library
from ..weight_names import WeightNames
from .served_layers import ServedLayers
from .served_parts import ServedParts
from .start_format import LOAD_FORMAT


class QuantizingLoader(library.DefaultModelLoader):
    """Loader of vLLM that turns a folder's weights into 8 bits, and then finds out how the layers keep them."""

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._scheme = extra.pop("quantization")
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def load_model(self, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the model, and find out how its layers keep their weights, see `ServedLayers`. Raises ValueError if one
        cannot be read."""
        self._names = WeightNames(vllm_config.model_config.model, self._scheme)
        self._device = torch.device(vllm_config.device_config.device)
        try:
            model = super().load_model(vllm_config, *args, **kwargs)
        except (NotImplementedError, ValueError) as error:
            why = str(error).partition(" Reasons:")[0]
            experts = any(tensor.stacked for tensor in self._names.in_files.values())
            if not experts and "kernel" not in why:
                raise
            raise ValueError(
                f"rollout.quantization: got {self._scheme!r}, expected another one or rollout.engine=hf, because vLLM "
                f"{library.vllm.__version__} does not compute {'experts' if experts else 'linear layers'} so on this "
                f"machine ({why})"
            ) from error
        with library.set_current_vllm_config(vllm_config), torch.no_grad():
            self._layers.find_readers(self._digests.result(), library.vllm.__version__)
        model.headrace_layers = self._layers
        print(self._layers, flush=True)  # It goes to the engine's log; vLLM's own lines below errors do not.
        return model

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the files, the quantized ones as their values and their scales."""
        stored, own = self._names.in_files, self._names.quantization
        assert own is not None
        shapes = {name: self._names.shape(name) for name in own.names}
        mapper = library.renames(model)
        self._layers = ServedLayers(ServedParts(model, stored, shapes, self._scheme, mapper), own)
        parts = frozenset(part for tensor in stored.values() for names in tensor.parts for part in names)
        quantization = Quantization(self._scheme, parts)
        self._digests = DigestTaker(0, quantization.tensors)
        files = super().get_all_weights(model_config, model)
        sent = ((name, converted(one, wire_dtype(one.dtype, model_config.dtype), self._device)) for name, one in files)
        for name, tensor in quantization.stream(sent):
            if (part := self._layers.part(name, tensor)) is not None:
                self._digests.take(name, part)
            yield name, tensor


library.register_model_loader(LOAD_FORMAT)(QuantizingLoader)
library.mend_int8_on_cpus()
