"""Serves LoRA adapters in the `hf` engine: checks one that arrives, and adds its matrices to a model's linear layers.

A linear layer with the matrices A and B computes `W x + scaling B A x`. The experts of a layer, whose matrices are
stacked in one parameter, compute with `W + scaling B A` instead, in PEFT's format for `target_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ....codecs.memory import flat_bytes
from ....codecs.weights.parameter_digests import ParameterDigest, ParameterDigests, compare_digests
from ...adapters.base_digest import base_digest
from ...adapters.spec import PREFIX, AdapterSlots, AdapterSpec, module_pairs, must_show, tensor_names
from .model import find_experts

Pair = tuple[torch.Tensor, torch.Tensor]
NUM_PROBED = 16
"""Number of tokens in the probe that shows whether an adapter has an effect."""


@dataclass(slots=True, eq=False)
class Adapter:
    """One version of an adapter, ready to be served."""

    scaling: float
    pairs: dict[str, Pair]
    """Matrices A and B of each module by its name, in the dtype and on the device of the module's weight."""
    sent: dict[str, torch.Tensor]
    """Copies, on the CPU, of the tensors that were sent in a dtype that the served tensors cannot be converted back to,
    by name."""
    must_show: bool
    """True if the matrices are so large that the adapter must have an effect (`must_show`)."""

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The served tensors by the names under which they were sent."""
        pairs = self.pairs.items()
        return {name: one for module, pair in pairs for name, one in zip(tensor_names(module), pair, strict=True)}

    def move(self, device: torch.device) -> None:
        """Move the tensors that are served to a device."""
        for pair in self.pairs.values():
            for tensor in pair:
                tensor.data = tensor.data.to(device)

    def served(self, weight: ParameterDigest) -> list[torch.Tensor]:
        """Return the served tensor of this name in the dtype in which it was sent; [] if there is none.

        A tensor that lost digits when it was loaded is compared with the copy of what was sent: the copy is returned if
        it converts to the served bytes.
        """
        served = self.named.get(weight.name)
        if served is None:
            return []
        sent = self.sent.get(weight.name)
        if sent is None:
            return [served.to(getattr(torch, weight.dtype))]
        loaded = sent.to(served.dtype)
        return [sent if torch.equal(flat_bytes(loaded), flat_bytes(served.cpu())) else served.to(sent.dtype)]


@dataclass(frozen=True, slots=True)
class _Target:
    """A weight to which matrices can be added."""

    weight: torch.Tensor
    sizes: tuple[int, int]
    """Number of inputs and outputs."""
    num_experts: int = 1
    """Number of experts whose matrices are stacked in the weight; 1 for a linear layer."""
    transposed: bool = False
    """True if stacked experts have their inputs before their outputs."""


class AdapterLayers:
    """Hooks on the layers of a model that add the matrices of the active adapter to them."""

    def __init__(self, model: Any, path: str, slots: AdapterSlots) -> None:
        """Attach the hooks to every linear layer, and with `slots.experts` to all stacked experts.

        model: a Hugging Face causal LM that was loaded from `path`, a local folder or a hub id.
        """
        self.slots = slots
        self._model = model
        self._path = path
        self._targets: dict[str, _Target] = {}
        self._experts: list[set[str]] = []
        """Names of the targets of each layer's experts, which have adapters all or none: one name alone does not tell
        its parameter."""
        self._active: Adapter | None = None
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, Conv1D)):
                rows, columns = module.weight.shape
                sizes = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
                self._targets[name] = _Target(module.weight, sizes)
                module.register_forward_hook(partial(self._add, name))
        for name, module in find_experts(model) if slots.experts else ():
            self._hook_experts(name, module)

    def _hook_experts(self, name: str, module: nn.Module) -> None:
        """Attach hooks to stacked experts. PEFT wraps the module once for each parameter, so that the names of all
        parameters but the last have `base_layer` in them."""
        stacked = {key: param for key, param in module.named_parameters(recurse=False) if param.ndim == 3}
        names = {key: name + ".base_layer" * depth for depth, key in enumerate(reversed(stacked))}
        transposed = bool(getattr(module, "is_transposed", False))
        for key, param in stacked.items():
            num_experts, outputs, inputs = param.shape
            sizes = (outputs, inputs) if transposed else (inputs, outputs)
            self._targets[names[key]] = _Target(param, sizes, num_experts, transposed)
        self._experts.append(set(names.values()))
        module.register_forward_pre_hook(partial(self._replace, names))
        module.register_forward_hook(partial(self._restore, names), always_call=True)

    # ---------------- These methods check an adapter, before and after it is in service.

    @cached_property
    def base(self) -> str:
        """Digest of the model's files at the time of the first use, which reads all of them."""
        return base_digest(self._path)

    def check(self, spec: AdapterSpec, named: Mapping[str, torch.Tensor]) -> Adapter:
        """Return an adapter with copies of the tensors `named`, in PEFT's format. Changes nothing.

        The first call reads all weight files of the model. Raises ValueError if the adapter belongs to another base,
        its rank is above that of the slots, a tensor's name or shape does not fit the model, or a number is not finite.
        """
        if spec.base != self.base:
            raise ValueError(
                f"adapter: got one for a base model with the digest {spec.base}, expected {self.base}, the digest of "
                f"{self._path!r} when the engine read it"
            )
        if spec.rank > self.slots.rank:
            raise ValueError(f"adapter: got rank {spec.rank}, expected at most {self.slots.rank}, the room in a slot")
        adapter = Adapter(spec.scaling, {}, {}, False)
        for module, pair in self._pairs(spec.rank, named).items():
            target = self._targets[module]
            adapter.pairs[module] = self._loaded(adapter, target, module, pair)
            adapter.must_show = adapter.must_show or must_show(spec, [pair], target.weight.dtype)
        return adapter

    def _pairs(self, rank: int, named: Mapping[str, torch.Tensor]) -> dict[str, Pair]:
        """Return the matrices of each module. Those of experts have the rank times the number of experts."""
        by_rank: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in named.items():
            target = self._targets.get(name.removeprefix(PREFIX).rpartition(".lora_")[0])
            by_rank.setdefault(rank * (target.num_experts if target else 1), {})[name] = tensor
        pairs: dict[str, Pair] = {}
        for stacked_rank, part in by_rank.items():
            pairs.update(module_pairs(part, stacked_rank, self._targets))
        for names in self._experts:
            missing, present = sorted(names - set(pairs)), sorted(names & set(pairs))
            if missing and present:
                raise ValueError(
                    f"adapter: {PREFIX}{missing[0]} has no matrices, expected them, because {present[0]!r} has some"
                )
        return pairs

    def _loaded(self, adapter: Adapter, target: _Target, module: str, pair: Pair) -> Pair:
        """Return copies of the two matrices as they are served."""
        inputs, outputs = target.sizes
        dtype = target.weight.dtype
        loaded = []
        for name, tensor, (dim, size) in zip(tensor_names(module), pair, ((1, inputs), (0, outputs)), strict=True):
            if tensor.shape[dim] != size:
                raise ValueError(
                    f"adapter: {name} has shape {tuple(tensor.shape)}, expected {size} in dimension {dim}, as the "
                    "model's module has"
                )
            if not tensor.isfinite().all():
                raise ValueError(f"adapter: {name} has numbers that are not finite")
            if torch.promote_types(tensor.dtype, dtype) != dtype:
                adapter.sent[name] = tensor.to("cpu", copy=True)
            loaded.append(tensor.to(target.weight.device, dtype, copy=True))
        return loaded[0], loaded[1]

    def verify(self, adapter: Adapter, digests: ParameterDigests, engine: str) -> tuple[int, str]:
        """Compare an adapter as it is served with the trainer's digests, and probe its effect. Returns the number of
        tensors compared, and an error text; "" if nothing is wrong.

        The probe is a forward pass over fixed tokens. If the matrices are large enough to show (`must_show`), its
        logits must differ from those of the base model. engine: the engine's name, for the text.
        """
        count, differs = compare_digests(digests, adapter.served, engine)
        about = f"{engine}: adapter of version {digests.version}"
        unlike = sorted({weight.name for weight in digests.weights} ^ set(adapter.named))
        if not differs and unlike:
            differs = f"{about} differs from the trainer's: {unlike[0]!r} is in one of them only"
        if not differs and adapter.must_show and torch.equal(self._probe(adapter), self._probe(None)):
            differs = f"{about} has no effect: {NUM_PROBED} tokens have the same logits as without it"
        return count, differs

    @torch.inference_mode()
    def _probe(self, adapter: Adapter | None) -> torch.Tensor:
        """Return the logits of fixed tokens, `[1, NUM_PROBED, V]`."""
        ids = torch.arange(1, NUM_PROBED + 1) * 7919 % self._model.get_input_embeddings().num_embeddings
        with self.active(adapter):
            return self._model(input_ids=ids[None].to(self._model.device), use_cache=False).logits

    # ---------------- These methods compute with an adapter.

    @contextmanager
    def active(self, adapter: Adapter | None) -> Iterator[None]:
        """Let forward passes in the block use an adapter; None uses the base model alone. Only one thread at a time may
        be in such a block."""
        self._active = adapter
        try:
            yield
        finally:
            self._active = None

    def _add(self, name: str, _: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        pair = None if self._active is None else self._active.pairs.get(name)
        if pair is None:
            return output
        assert self._active is not None
        return output + self._active.scaling * functional.linear(functional.linear(args[0], pair[0]), pair[1])

    def _replace(self, names: Mapping[str, str], module: nn.Module, _: Any) -> None:
        """Put the sum of a parameter and its adapter in front of each parameter of stacked experts."""
        for key, name in names.items():
            pair = None if self._active is None else self._active.pairs.get(name)
            if pair is not None:
                assert self._active is not None
                target = self._targets[name]
                # PEFT numbers the rows of A by expert first, and the columns of B by rank first.
                first = pair[0].view(target.num_experts, -1, target.sizes[0])
                second = pair[1].view(target.sizes[1], -1, target.num_experts).permute(2, 0, 1)
                if target.transposed:
                    first, second = second.transpose(1, 2), first.transpose(1, 2)
                # An entry of the instance's dictionary hides the parameter, which stays where it is.
                module.__dict__[key] = torch.baddbmm(target.weight, second, first, alpha=self._active.scaling)

    def _restore(self, names: Mapping[str, str], module: nn.Module, *_: Any) -> None:
        for key in names:
            module.__dict__.pop(key, None)
