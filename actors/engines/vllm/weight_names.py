"""Maps a model's weights from Hugging Face names to the checkpoint names that vLLM's loader expects, and checks them.

Transformers 5 stacks experts (`mlp.experts.gate_up_proj [E, 2I, H]`), while checkpoints, and therefore vLLM, have
separate names for each expert's projections. At startup, Transformers computes the checkpoint names of a model on the
meta device, and the mapping must yield the same names. A model that would be mapped wrongly is therefore refused before
it serves anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

_STACKED = re.compile(r"^(?P<layer>.*\.)mlp\.experts\.(?P<kind>gate_up_proj|down_proj)$")
_ROUTER = re.compile(r"^(?P<layer>.*\.)mlp\.gate\.(?P<rest>.*)$")
_EXPERT_STYLES = {
    # The four names are those of the module in the checkpoint and of its gate, up and down projections.
    "qwen": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


class WeightNames:
    """Names and shapes of one model's weights. Checks updates against them, and converts names."""

    def __init__(self, model: str) -> None:
        """Read the model's configuration; no weights are loaded.

        model: a folder or hub id. Raises ValueError if no known naming scheme yields the model's checkpoint names.
        """
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            meta: Any = AutoModelForCausalLM.from_config(config)
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
        self._style = ""
        self._style = self._matching_style(meta, config.model_type)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of the weight `name`, before tensor parallelism splits it."""
        return self._shapes[name]

    def check(self, named: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError if a weight is unknown, missing, or of the wrong shape or dtype, or if tied weights differ.
        The error names the first such weight, or both names of tied weights."""
        for name, tensor in named.items():
            self.check_one(name, tensor)
        self.check_complete(named)
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
        if not tensor.is_floating_point():
            raise ValueError(f"weights: {name!r} has dtype {tensor.dtype}, expected a float")

    def check_complete(self, names: Iterable[str]) -> None:
        """Raise ValueError unless `names` has at least one name of every weight. The error names a missing weight."""
        got = set(names)
        if self._first_names <= got:
            return
        missing = [name for name in self.required if not got.intersection(self._group[name])]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ValueError(f"weights: parameter {missing[0]!r}{more} was not sent")

    def checkpoint(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under their names in a checkpoint, as views.

        A tied weight is yielded under all its names. vLLM's layerwise reload unties the names, so a name without a new
        value would keep its old one.
        """
        seen: set[str] = set()
        for name, tensor in named:
            for alias in self._group[name]:
                if alias not in seen:
                    seen.add(alias)
                    yield from _checkpoint_views(alias, tensor, self._style)

    def _matching_style(self, meta: Any, model_type: str) -> str:
        """Return the naming style for experts that yields the model's checkpoint names. It is a key of
        `_EXPERT_STYLES`, or "" if names need no conversion. Raises ValueError if no style does."""
        whole = {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}
        saved = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(meta, dict(whole)).items()}
        difference: set[str] = set()
        for style in ("", *_EXPERT_STYLES):
            made = {
                new: tuple(view.shape)
                for name, tensor in whole.items()
                for new, view in _checkpoint_views(name, tensor, style)
            }
            if made == saved:
                return style
            difference = saved.keys() ^ made.keys()
        raise ValueError(
            f"model type {model_type!r}: its checkpoint names are not known to the vllm engine "
            f"({sorted(difference)[:3]}); use rollout.engine=hf"
        )


def _checkpoint_views(name: str, tensor: torch.Tensor, style: str) -> Iterator[tuple[str, torch.Tensor]]:
    if not style:
        yield name, tensor
        return
    block, gate, up, down = _EXPERT_STYLES[style]
    if stacked := _STACKED.match(name):
        prefix = f"{stacked['layer']}{block}.experts"
        for expert, weights in enumerate(tensor.unbind(0)):
            if stacked["kind"] == "down_proj":
                yield f"{prefix}.{expert}.{down}.weight", weights
            else:
                halves = weights.chunk(2, dim=0)
                yield f"{prefix}.{expert}.{gate}.weight", halves[0]
                yield f"{prefix}.{expert}.{up}.weight", halves[1]
    elif router := _ROUTER.match(name):
        yield f"{router['layer']}{block}.gate.{router['rest']}", tensor
    else:
        yield name, tensor
