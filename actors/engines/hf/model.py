"""Loads a Hugging Face causal LM for the `hf` engine, replaces its parameters, and records what its routers choose."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils.logging import disable_progress_bar

from ....codecs.integers import ALIGN
from ....codecs.tokens.routes import RouteSpec
from ....codecs.weights.parameter_digests import ParameterDigest
from ....codecs.weights.quantization import DTYPES, SUFFIX, Quantization, dequantize, quantize, read_back
from ..config import Attention
from .fixed_shapes import use_fixed_shapes

_FORWARD_ARGUMENTS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep")
# The first name is used since transformers 5.24, the second one before that.
_CACHE_ARGUMENTS = ("cache", "past_key_values")
_ROUTERS = ("TopKRouter", "TopkRouter")
"""Suffixes of the names of most of transformers' router classes (5.23), such as Qwen3MoeTopKRouter."""
_CHOOSERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of the modules that choose experts or weigh them: linear layers, or modules with linear layers inside, such as
the `router.proj` of Gemma 4."""
_CONVERTIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def cache_argument(model: type) -> str | None:
    """Return the name of the argument for the key-value cache in this class of models; None if there is none."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in accepted), None)


def auto_class(config: Any) -> Any:
    """Return the class of transformers that builds the model of an HF config.

    It is the causal LM, or the model with its vision tower where transformers has no causal LM of this config.
    """
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def attention_options(attention: Attention, config: Any) -> dict[str, str]:
    """Return the arguments with which transformers builds a model with this kind of attention; {} for its own choice.

    config: the model's HF config. Raises ValueError for `sdpa` with a model whose attention scores have a soft cap
    (Gemma 2) or linear biases (Falcon with alibi): transformers lets it through, but computes something else than its
    own eager code, which changes log-probs by nats.
    """
    text = config.get_text_config()
    other = next((name for name in ("attn_logit_softcapping", "alibi") if getattr(text, name, None)), None)
    if attention == "auto":
        return {"attn_implementation": "eager"} if other else {}
    if other and attention == "sdpa":
        raise ValueError(
            f"model.attention: got 'sdpa', expected 'auto' or 'eager' for a model of type {config.model_type!r} with "
            f"{other}, which torch's function does not compute as the model's own code does"
        )
    return {"attn_implementation": {"flex": "flex_attention", "flash": "flash_attention_2"}.get(attention, attention)}


def refused_attention(attention: Attention, model: str, error: Exception) -> ValueError:
    """Return the error of a model that transformers cannot build with this kind of attention. model: its folder or hub
    id."""
    reason = str(error).strip().splitlines()[0].partition(". ")[0]
    return ValueError(f"model.attention: got {attention!r}, expected 'auto' or another kind for {model!r} ({reason})")


def load_model(
    path: str, dtype: torch.dtype, attention: Attention = "auto", *, fixed_shapes: bool = False
) -> torch.nn.Module:
    """Load a decoder-only causal LM on the CPU, in eval mode, from a local folder or a hub id.

    attention: as in `ModelConfig`. fixed_shapes: whether the model computes each token in the same way in every batch.
    Raises ValueError with a one-sentence message when there is no such model, when it does not support this kind of
    attention, or when its `forward` lacks an argument that decoding with a cache needs.
    """
    folder = Path(path)
    if not folder.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise ValueError(f"model: got {path!r}, expected a folder that exists or a hub id (organisation/name)")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"model: {path!r} has no config.json, expected a Hugging Face model folder")
    disable_progress_bar()  # The progress bars of all actors would be drawn over the run's own display.
    try:
        source = str(folder) if folder.is_dir() else path
        config = AutoConfig.from_pretrained(source)
        model = auto_class(config).from_pretrained(source, dtype=dtype, **attention_options(attention, config))
    except (OSError, ValueError, ImportError) as error:
        if str(error).startswith("model.attention"):
            raise
        if attention != "auto" and "attention" in str(error).lower():
            raise refused_attention(attention, path, error) from error
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model: {path!r} could not be loaded as a causal LM: {reason}") from error
    require_decoder(type(model))
    if fixed_shapes:
        use_fixed_shapes(model)
    return model.eval()


def require_decoder(model: Any) -> None:
    """Raise ValueError when the class `model` is not a decoder-only model.

    Its `forward` then lacks an argument that decoding with a cache needs.
    """
    accepted = inspect.signature(model.forward).parameters
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
    missing = [name for name in _FORWARD_ARGUMENTS if name not in accepted and not (any_name and name == "use_cache")]
    if cache_argument(model) is None:
        missing.append("key-value cache")
    if missing:
        raise ValueError(
            f"model: the forward method of {model.__name__} has no argument {', '.join(missing)}, expected a "
            "decoder-only model"
        )


def linear_layers(model: Any, *, with_routers: bool = False) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of a HF causal LM's text part without the output layer, by their names in the model.

    with_routers: whether the layers that choose experts or weigh them are among them.
    """
    head, text = model.get_output_embeddings(), set(model.get_decoder().modules())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and module in text
        and (with_routers or not _CHOOSERS & set(name.split(".")))
    }


def find_experts(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the names and modules of the experts of each layer, stacked along dimension 0.

    They are called with tokens `[T, H]`, the experts that each token goes to, int64 `[T, k]`, and these experts'
    weights `[T, k]`.
    """
    return [(name, part) for name, part in model.named_modules() if _takes_routes(part) and _stacked(part)]


def _takes_routes(module: torch.nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 4


def _stacked(module: torch.nn.Module) -> bool:
    params = list(module.parameters(recurse=False))
    return len({len(param) for param in params}) == 1 and any(param.ndim == 3 for param in params)


def find_routers(model: Any, layers: Sequence[int], why: str) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return two modules for each of the decoder layers `layers` of a HF causal LM.

    The first chooses experts for the layer's tokens, and the second computes these experts. The first is the layer's
    router, or the whole block of experts where the choice is made in the block's own code.

    why: the configuration key that needs them, with its value, for the error. Raises ValueError when these are not the
    layers with experts, or when a layer's experts are not called with a choice (Llama 4).
    """
    found = find_experts(model)
    if len(found) != len(layers) or any(
        f".{layer}." not in name for layer, (name, _) in zip(layers, found, strict=True)
    ):
        raise ValueError(
            f"{why} for {type(model).__name__}, because of its {len(layers)} layers with experts {len(found)} call "
            "their experts with tokens and a choice of experts"
        )
    routers = []
    for name, experts in found:
        block = model.get_submodule(name.rpartition(".")[0])
        named = [part for part in block.children() if type(part).__name__.endswith(_ROUTERS)]
        routers.append((named[0] if len(named) == 1 else block, experts))
    return routers


class RouteRecorder:
    """Keeps the experts that each router chose in the model's last forward pass. Only one thread may use it at a
    time."""

    def __init__(self, model: Any, spec: RouteSpec) -> None:
        """Attach a hook to the experts of every layer that has some. model: a Hugging Face causal LM. Raises what
        `find_routers` raises."""
        self._spec = spec
        self._chosen: list[torch.Tensor | None] = [None] * len(spec.layers)
        """Indices of the chosen experts for each layer of `spec`, `[tokens, k]`."""
        why = "router_replay.enabled: got true, expected false"
        for index, (_, experts) in enumerate(find_routers(model, spec.layers, why)):
            experts.register_forward_pre_hook(partial(self._record, index))

    def _record(self, index: int, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._chosen[index] = args[1].to(torch.int64, copy=True)

    def take(self, rows: int) -> np.ndarray:
        """Return the routes of the last forward pass over `rows` rows of equal width, and forget them. They have the
        shape `[rows, width, layers, k]` and the dtype of the spec.

        Padding tokens have routes too, because the routers do not treat them specially. Raises RuntimeError if a router
        was not called.
        """
        chosen = [one for one in self._chosen if one is not None]
        if len(chosen) != len(self._chosen):
            raise RuntimeError(f"routes: {len(self._chosen) - len(chosen)} routers were not called in the forward pass")
        self._chosen = [None] * len(chosen)
        routes = torch.stack(chosen, dim=1).to(self._spec.dtype).cpu().numpy()
        return routes.reshape(rows, -1, *self._spec.trailing)


class ParameterSet:
    """Parameters and persistent buffers of a model, by their names in a checkpoint. Tied parameters have several
    names.

    With a quantization, updates have 8-bit weights, and the model computes with the numbers that these stand for.
    """

    def __init__(self, model: torch.nn.Module, quantization: Quantization | None = None) -> None:
        """With a `quantization`, also replace the model's weights by what their 8-bit forms stand for."""
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._specs = {name: (tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}
        parameters = {id(tensor) for tensor in model.parameters()}
        self._remainders = {name: tensor.data_ptr() % ALIGN for name, tensor in self._tensors.items()}
        """Address of each tensor modulo ALIGN. On a CPU, the last bit of a matrix product can depend on it."""
        self._names_of: dict[int, list[str]] = {}
        """Names of each parameter, by the `id` of its tensor. An update must contain every parameter; it may leave out
        buffers."""
        for name, tensor in self._tensors.items():
            if id(tensor) in parameters:
                self._names_of.setdefault(id(tensor), []).append(name)
        self.quantization = quantization
        self._scales: dict[str, torch.Tensor] = {}
        """Scales of the weights that came in 8 bits, by the names of the weights."""
        if quantization is not None:
            for name in quantization.names:
                values, self._scales[name] = quantize(self._tensors[name], quantization.scheme)
                self.copy([(name, dequantize(values, self._scales[name], self._specs[name][0]))])

    def refresh(self, model: torch.nn.Module) -> None:
        """Look up the model's tensors again. This is needed after `model` was moved to another device, because moving
        it replaces its buffers with new tensors."""
        self._tensors.update(model.state_dict(keep_vars=True))

    def match(self, named: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Check an update (HF name -> tensor) against the model. Returns a (name, source tensor) pair for each tensor
        to replace.

        Tied parameters give one pair, and each weight in 8 bits gives a second one for its scales. Changes nothing.
        Raises ValueError if parameters are unknown, missing, or of the
        wrong shape or dtype, or if tied parameters are sent with different values. The message names the first such
        parameter; for tied parameters it gives both names.
        """
        scales: list[tuple[str, torch.Tensor]] = []
        if self.quantization is not None:
            sent, named = named, self.quantization.restored(named)
            self.quantization.check_scales(sent)
            scales = [(name, source) for name, source in sent.items() if name not in named]
        unknown = [name for name in named if name not in self._tensors]
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._tensors, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"weights: the model has no parameter {_first(unknown)}{hint}")
        missing = [names[0] for names in self._names_of.values() if not any(name in named for name in names)]
        if missing:
            raise ValueError(f"weights: parameter {_first(missing)} was not sent")
        pairs: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for name, source in named.items():
            target = self._tensors[name]
            self._check(name, source)
            earlier = pairs.setdefault(id(target), (name, target, source))
            if earlier[2] is not source and not torch.equal(earlier[2], source):
                raise ValueError(f"weights: {earlier[0]!r} and {name!r} are tied in the model but differ as sent")
        return [(name, source) for name, _, source in pairs.values()] + scales

    def _check(self, name: str, source: torch.Tensor) -> None:
        dtype, shape = self._specs[name]
        if source.shape != shape:
            raise ValueError(f"weights: {name!r} has shape {tuple(source.shape)}, expected {tuple(shape)}")
        if source.dtype != dtype and not (source.dtype in _CONVERTIBLE and dtype in _CONVERTIBLE):
            raise ValueError(f"weights: {name!r} has dtype {source.dtype}, expected {dtype}")

    def copy(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        """Copy each source tensor in `pairs`, which `match` returned, into the model's tensor of that name."""
        with torch.no_grad():
            for name, source in pairs:
                if name in self._tensors:
                    self._tensors[name].copy_(source)
                else:
                    self._scales[name.removesuffix(SUFFIX)].copy_(source)

    def served(self, weight: ParameterDigest) -> list[torch.Tensor]:
        """Return the model's tensor of this name, if it has the dtype and shape of the weight as sent. A weight that
        was sent in 8 bits is brought back to them."""
        scales = self._scales.get(weight.name.removesuffix(SUFFIX))
        if scales is None or self.quantization is None:
            tensor = self._tensors[weight.name]
        elif weight.name in self._tensors:
            tensor = read_back(self._tensors[weight.name], scales, DTYPES[self.quantization.scheme])
        else:
            tensor = scales
        return [tensor] if weight.fits(tensor) else []

    def drop(self) -> None:
        """Free the memory of the parameters; buffers are kept. `allocate` and then `copy` make the model usable
        again."""
        for tensor in self._parameters():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def allocate(self) -> None:
        """Allocate memory, filled with zeros, for the parameters that `drop` freed. The new memory has the same
        alignment as the old, so that the same weights give the same bits."""
        for tensor in self._parameters():
            name = self._names_of[id(tensor)][0]
            _, shape = self._specs[name]
            if tensor.shape != shape:
                nbytes = shape.numel() * tensor.element_size()
                memory = torch.zeros(nbytes + ALIGN, dtype=torch.uint8, device=tensor.device)
                start = (self._remainders[name] - memory.data_ptr()) % ALIGN
                tensor.data = memory[start : start + nbytes].view(tensor.dtype).view(shape)

    def _parameters(self) -> list[torch.Tensor]:
        return [self._tensors[names[0]] for names in self._names_of.values()]


def _first(names: list[str]) -> str:
    more = len(names) - 1
    return f"{names[0]!r}" + (f" (and {more} more)" if more else "")
