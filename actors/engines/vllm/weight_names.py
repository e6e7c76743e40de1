"""Maps a model's weights from Hugging Face names to the checkpoint names that vLLM's loader expects, and checks them.

Transformers 5 stacks experts (`mlp.experts.gate_up_proj [E, 2I, H]`), while checkpoints, and therefore vLLM, have
separate names for each expert's projections. At startup, Transformers computes the checkpoint names of a model on the
meta device, and its conversions of these names back must yield every weight. A model that would be mapped wrongly is
therefore refused before it serves anything.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from ....codecs.weights.quantization import SUFFIX, Quantization, Scheme, scale_shape
from ..hf.model import auto_class, linear_layers
from ..hf.quantized_layers import quantization_of_layers
from ..hf.stored_names import StoredTensor, stored_tensors


class WeightNames:
    """Names and shapes of one model's weights. Checks updates against them, and converts names."""

    def __init__(self, model: str, scheme: Scheme | None = None) -> None:
        """Read the model's configuration; no weights are loaded.

        model: a folder or hub id. scheme: kind of the 8-bit weights in updates; None for weights as they are. Raises
        ValueError if the model's checkpoint names are not known, or its layers cannot be quantized so.
        """
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            meta: Any = auto_class(config).from_config(config)
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Shape of each weight; a tied weight is listed under each of its names. Buffers that a checkpoint has, such as
        the biases of experts, are weights too."""
        self._group: dict[str, tuple[str, ...]] = {}
        """All names of each weight (a tied weight has several): any of its names -> tuple of all of them."""
        by_tensor: dict[int, list[str]] = {}
        parameters = {id(parameter) for parameter in meta.parameters()}
        for name, tensor in meta.state_dict(keep_vars=True).items():
            if id(tensor) in parameters or tensor.is_floating_point():
                by_tensor.setdefault(id(tensor), []).append(name)
                self._shapes[name] = tuple(tensor.shape)
        for names in by_tensor.values():
            self._group.update(dict.fromkeys(names, tuple(names)))
        self.required = tuple(names[0] for identity, names in by_tensor.items() if identity in parameters)
        """One name of each weight that an update must contain, in the model's order: the first name of a tied weight,
        the only name of any other. An update may leave out buffers."""
        self._first_names = frozenset(self.required)
        self.linear = tuple(linear_layers(meta, with_routers=True))
        """Names of the linear layers of the text part, without the output layer: the modules that can have an
        adapter."""
        self._stored = self._saved(meta, config.model_type)
        self.quantization = None if scheme is None else quantization_of_layers(meta, model, scheme)
        """The weights that are sent in 8 bits; None if none are."""
        if self.quantization is not None:
            self._add_scales(self.quantization)

    def _add_scales(self, quantization: Quantization) -> None:
        """Make the scales of the quantized weights weights of their own."""
        for name in sorted(quantization.names):
            scales = name + SUFFIX
            self._shapes[scales] = scale_shape(self._shapes[name], quantization.scheme)
            self._group[scales] = (scales,)
            parts = tuple(tuple(part + SUFFIX for part in parts) for parts in self._stored[name].parts)
            self._stored[scales] = replace(self._stored[name], parts=parts)
        self.required += tuple(name + SUFFIX for name in sorted(quantization.names))
        self._first_names = frozenset(self.required)

    @property
    def in_files(self) -> dict[str, StoredTensor]:
        """The tensors of the model's files that make up each quantized weight, by its name in the model."""
        names = () if self.quantization is None else self.quantization.names
        return {name: self._stored[name] for name in names}

    @property
    def exact(self) -> tuple[str, ...]:
        """Names in the model's files of the modules with a matrix that is not quantized, such as routers."""
        quantized = frozenset() if self.quantization is None else self.quantization.tensors
        plain = [name for name, shape in self._shapes.items() if len(shape) > 1 and name not in quantized]
        names = [part for name in plain for part in self._stored[name].parts[0]]
        return tuple(sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight")))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of the weight `name`, before tensor parallelism splits it."""
        return self._shapes[name]

    def stored(self, name: str) -> str:
        """Return the name in a checkpoint of the weight `name`; that of its first part, if there are several."""
        return self._stored[name].parts[0][0] if name in self._stored else name

    def check(self, named: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError if a weight is unknown, missing, or of the wrong shape or dtype, or if tied weights differ.
        So it does for scales that are no positive numbers. The error names the first such weight, or both names of tied
        weights."""
        for name, tensor in named.items():
            self.check_one(name, tensor)
        self.check_complete(named)
        if self.quantization is not None:
            self.quantization.check_scales(named)
        for names in set(self._group.values()):
            sent = [name for name in names if name in named]
            for other in sent[1:]:
                if named[other] is not named[sent[0]] and not torch.equal(named[other], named[sent[0]]):
                    raise ValueError(f"weights: {sent[0]!r} and {other!r} are tied in the model but differ as sent")

    def check_one(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError when the weight is unknown, has the wrong shape or is not of a float dtype."""
        shape = self._shapes.get(name)
        if shape is None:
            near = difflib.get_close_matches(name, self._shapes, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"weights: the model has no parameter {name!r}{hint}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"weights: {name!r} has shape {tuple(tensor.shape)}, expected {shape}")
        expected = None if self.quantization is None else self.quantization.dtype_of(name)
        if tensor.dtype != expected if expected is not None else not _is_plain(tensor.dtype):
            raise ValueError(f"weights: {name!r} has dtype {tensor.dtype}, expected {expected or 'a float'}")

    def check_complete(self, names: Iterable[str]) -> None:
        """Raise ValueError unless `names` has at least one name of every weight. The error names a missing weight."""
        got = set(names)
        if self._first_names <= got:
            return
        missing = [name for name in self.required if not got.intersection(self._group[name])]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ValueError(f"weights: parameter {missing[0]!r}{more} was not sent")

    def checkpoint(
        self, named: Iterable[tuple[str, torch.Tensor]], modules: Container[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under their names in a checkpoint, as views.

        A tied weight is yielded under all its names. vLLM's layerwise reload unties the names, so a name without a new
        value would keep its old one. modules: last parts of the names of the served model's modules, such as `lm_head`.
        Only the first name of a tied weight is yielded if the model has no module for another one (Gemma 2).
        """
        seen: set[str] = set()
        for name, tensor in named:
            for number, alias in enumerate(self._group[name]):
                served = number == 0 or alias.split(".")[-2] in modules
                if alias not in seen and served:
                    seen.add(alias)
                    yield from self._stored[alias].views(tensor)

    def _saved(self, meta: Any, model_type: str) -> dict[str, StoredTensor]:
        """Return the checkpoint names of each weight, as transformers saves it. Raises ValueError if it converts a
        weight in another way than by names and by stacking the matrices of experts."""
        whole = {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}
        saved = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(meta, dict(whole)).items()}
        stored, _ = stored_tensors(meta, saved)
        made = {
            name: tuple(view.shape)
            for own, one in stored.items()
            if own in whole
            for name, view in one.views(whole[own])
        }
        if made != saved or not whole.keys() <= stored.keys():
            difference = sorted((saved.keys() ^ made.keys()) | (whole.keys() - stored.keys()))
            raise ValueError(
                f"model type {model_type!r}: its checkpoint names are not known to the vllm engine ({difference[:3]}); "
                "use rollout.engine=hf"
            )
        return stored


def _is_plain(dtype: torch.dtype) -> bool:
    """Return whether a weight of this dtype has the numbers of the weight itself."""
    return dtype.is_floating_point and dtype.itemsize > 1
