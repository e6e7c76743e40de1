"""Records the copies that a model's loaders make in one load, and repeats them without the loaders.

    PlanRecorder    watches one in-place load and notes which part of a weight went to which part of a parameter
    CopyPlan        repeats the copies, many in one kernel; 300 weights cost 1 ms of Python instead of 17

A plan is made only of a load that wrote every element of every parameter exactly once, by plain copies of parts of the
weights as they were sent. After any other load (with a cast, a transposed or computed value, or a gap) the model keeps
using its loaders, and the reason is reported. Modules that vLLM loads again layer by layer can be left out: the plan
names the weights that go there.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ....codecs.weights.conversion import as_integers
from ....codecs.weights.parameter_digests import ParameterDigest

_ATEN = torch.ops.aten
_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_FILLS = (_ATEN.fill_.Scalar, _ATEN.zero_.default)


@dataclass(frozen=True, slots=True)
class _Part:
    """A strided part of a weight, as it was sent."""

    offset: int
    """Position of the part's first element in the weight, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.as_strided(self.shape, self.strides, weight.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy that the loaders make, from a sent weight into a parameter."""

    target: torch.Tensor
    """View of the live parameter that the copy writes to, as integers."""
    part: _Part | None
    """The part of the weight that is copied; None when the whole weight is copied in its own shape."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies that fill a model's parameters from weights of known names, dtypes and shapes."""

    copies: Mapping[str, tuple[_Copy, ...]]
    """Copies of each weight, by weight name. Weights that this worker does not need are not listed."""
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """Dtype and shape of each weight, by name."""
    places: ParameterPlaces
    """The model's modules, its parameters and their memory at the time of the recording."""
    others: frozenset[str] = frozenset()
    """Names of the weights that also went to something else than the parameters; loaders must load them again."""

    @property
    def num_copies(self) -> int:
        return sum(map(len, self.copies.values()))

    def loads(self, names: Collection[str]) -> bool:
        """Return whether the plan can load the weights `names`. They can be loaded if they are the recorded weights and
        every parameter is still at the same place in memory."""
        return len(names) == len(self.specs) and all(map(self.specs.__contains__, names)) and self.places.stand()

    def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Copy weights into the parameters; on a GPU the copies are queued on the current stream.

        Returns False, and copies nothing, when a weight differs in dtype, shape or layout from the one recorded.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, tensor in weights:
            dtype, shape = self.specs.get(name, (None, ()))
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
                return False
            bits = as_integers(tensor)
            for copy in self.copies.get(name, ()):
                # Equal addresses mean that the weight was written to `targets` already.
                if tensor.data_ptr() != copy.target.data_ptr():
                    targets.append(copy.target)
                    sources.append(bits if copy.part is None else copy.part.of(bits))
        if targets:
            _copy_all(targets, sources, non_blocking=True)
        return True

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Return, by weight name, the parameter memory of each weight that fills one contiguous piece of a parameter.
        Writing the weight there loads it."""
        whole = {name: copies[0] for name, copies in self.copies.items() if len(copies) == 1}
        return {
            name: copy.target.view(self.specs[name][0])
            for name, copy in whole.items()
            if copy.part is None and copy.target.is_contiguous()
        }

    def read(self, weight: ParameterDigest) -> list[torch.Tensor]:
        """Return the weight as the parameters hold it: each whole copy, or its parts joined. Joining takes memory of
        the weight's size. Returns nothing if this worker does not have all of its elements."""
        copies = self.copies.get(weight.name)
        if not copies:
            return []
        dtype, shape = self.specs[weight.name]
        if shape != weight.shape or str(dtype) != f"torch.{weight.dtype}":
            return []
        if all(copy.part is None for copy in copies):
            return [copy.target.view(dtype) for copy in copies]
        if sum(copy.target.numel() for copy in copies) != math.prod(shape):
            return []
        whole = torch.empty(shape, dtype=copies[0].target.dtype, device=copies[0].target.device)
        for copy in copies:
            (whole if copy.part is None else copy.part.of(whole)).copy_(copy.target)
        return [whole.view(dtype)]


class PlanRecorder:
    """Watches a model's loaders and makes a copy plan from their copies. Put `watching` around each load, then call
    `plan`."""

    def __init__(
        self,
        model: torch.nn.Module,
        memory: Mapping[int, torch.Tensor] | None = None,
        without: Collection[torch.nn.Module] = (),
    ) -> None:
        """memory: views into which loaders write instead of the parameters, by the parameters' ids. without: modules
        that are left out. If there are any, the plan copies only to those views, and loaders must load the rest."""
        self._places = ParameterPlaces(model, without)
        views, left = memory or {}, {id(parameter) for module in without for parameter in module.parameters()}
        named = {name: one for name, one in model.named_parameters() if id(one) not in left}
        self._parameters = _Areas((name, views.get(id(one), one).detach()) for name, one in named.items())
        self._views = frozenset(name for name, one in named.items() if id(one) in views)
        self._planned = self._views if without else named.keys()
        self._leaves_out, self._others = bool(without), set[str]()
        self._copies: defaultdict[str, list[_Copy]] = defaultdict(list)
        self._specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._written: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """Start and end of every write, in elements: parameter name -> list of (start, end)."""
        self._hindrance = ""

    @contextmanager
    def watching(self, weights: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Context manager for a block in which the model's loaders load `weights`; it records their copies."""
        for name, tensor in weights:
            if name in self._specs:
                self._hinder(f"{name} was loaded twice")
            if not tensor.is_contiguous():
                self._hinder(f"{name} came in strips")
            self._specs[name] = (tensor.dtype, tuple(tensor.shape))
        with _Watch(self, _Areas(weights)):
            yield

    def plan(self) -> CopyPlan | str:
        """Return the copy plan, or a string with the reason why the recorded copies must not be repeated. Raises
        RuntimeError if the loaders have not written all of a view."""
        if not self._places.stand():
            self._hinder("the loaders replaced parameters")
        for name, parameter in self._parameters:
            gap = _gap(name, self._written[name], parameter.numel())
            if gap and name in self._views:
                raise RuntimeError(f"{gap} by the model's loaders")
            self._hinder(gap)
        if self._hindrance:
            return self._hindrance
        copies = {name: tuple(made) for name, made in self._copies.items()}
        # It is not seen what goes to a module that is left out, so that everything else may.
        unseen = self._specs.keys() - copies.keys() if self._leaves_out else ()
        return CopyPlan(copies, dict(self._specs), self._places, frozenset(self._others.union(unseen)))

    # ---------------- These methods note what the loaders do with the weights.

    def _hinder(self, reason: str) -> None:
        self._hindrance = self._hindrance or reason

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor, weights: _Areas) -> None:
        if not target.numel():
            return
        origin = weights.find(source)
        if (place := self._parameters.find(target)) is None:
            # A later copy from there into a parameter is noticed then.
            self._others.update(() if origin is None else origin[:1])
            return
        parameter, offset = place
        if origin is None:
            self._hinder(f"{parameter} is computed from what was sent")
        elif source.dtype != target.dtype or weights[origin[0]].dtype != source.dtype:
            self._hinder(f"{parameter} is {target.dtype}, {origin[0]} was sent as {source.dtype}")
        elif source.shape != target.shape:
            self._hinder(f"{parameter} is spread out from {origin[0]}")
        else:
            self._note_write(parameter, offset, target)
            if parameter not in self._planned:
                self._others.add(origin[0])
                return
            weight = weights[origin[0]]
            whole = origin[1] == 0 and source.shape == weight.shape and source.is_contiguous()
            part = None if whole else _Part(origin[1], tuple(source.shape), source.stride())
            self._copies[origin[0]].append(_Copy(as_integers(target.detach()), part))

    def _note_fill(self, target: torch.Tensor) -> None:
        """Record that a parameter was filled with a constant, which the plan need not repeat."""
        if target.numel() and (place := self._parameters.find(target)) is not None:
            self._note_write(*place, target)

    def _note_write(self, parameter: str, offset: int, target: torch.Tensor) -> None:
        span = _span(self._parameters[parameter], offset, target)
        if span is None:
            self._hinder(f"{parameter} is written in strips")
        else:
            self._written[parameter].append(span)

    def _note_other(self, func: Any, written: torch.Tensor) -> None:
        if written.numel() and (place := self._parameters.find(written)) is not None:
            self._hinder(f"{place[0]} is changed by {func}")


class _Watch(TorchDispatchMode):
    """Intercepts every torch operation of a load, and reports the writes to the recorder."""

    def __init__(self, recorder: PlanRecorder, weights: _Areas) -> None:
        super().__init__()
        self._recorder = recorder
        self._weights = weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.copy_.default:
            self._recorder._note_copy(args[0], args[1], self._weights)
        elif func in _FILLS:
            self._recorder._note_fill(args[0])
        elif func is _ATEN._local_scalar_dense.default:
            if (origin := self._weights.find(args[0])) is not None:
                self._recorder._hinder(f"the loaders look at the values of {origin[0]}")
        else:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in value if isinstance(value, list | tuple) else [value]:
                        if isinstance(tensor, torch.Tensor):
                            self._recorder._note_other(func, tensor)
        return func(*args, **(kwargs or {}))


class ParameterPlaces:
    """Remembers a model's modules, its parameters and their memory, and tells whether they are still the same.

    The check runs in every update while the engine is stopped, so it must be fast: it compares the modules' own tables
    without a Python loop, in 0.1 ms for 30 layers.
    """

    def __init__(self, model: torch.nn.Module, without: Collection[torch.nn.Module] = ()) -> None:
        """without: modules that are left out, with the modules in them."""
        left = {id(one) for module in without for one in module.modules()}
        modules = [one for one in model.modules() if id(one) not in left]
        self._tables = [table for one in modules for table in (one._modules, one._parameters)]
        self._members = self._present()
        self._sizes = [*map(len, self._tables)]
        self._tensors = [tensor for one in modules for tensor in one.parameters(recurse=False)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def stand(self) -> bool:
        """Return whether all modules and parameters are still the same objects, in the same memory."""
        present = self._present()
        return (
            len(present) == len(self._members)
            and all(map(operator.is_, present, self._members))
            and [*map(len, self._tables)] == self._sizes
            and [*map(torch.Tensor.data_ptr, self._tensors)] == self._addresses
        )

    def _present(self) -> list[Any]:
        return [*itertools.chain.from_iterable(map(dict.values, self._tables))]


class _Areas:
    """Finds the named tensor that a view belongs to, by its memory address."""

    def __init__(self, named: Iterator[tuple[str, torch.Tensor]] | Sequence[tuple[str, torch.Tensor]]) -> None:
        self._tensors = dict(named)
        self._sorted = sorted((tensor.data_ptr(), name) for name, tensor in self._tensors.items() if tensor.numel())
        self._starts = [start for start, _ in self._sorted]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def find(self, view: torch.Tensor) -> tuple[str, int] | None:
        """Return the name of the tensor that contains all of `view`, and the position of the view in it. The position
        is that of its first element. None when there is no such tensor, or when the view has another dtype or device or
        is not aligned with its elements."""
        at = bisect.bisect_right(self._starts, view.data_ptr()) - 1
        if at < 0 or not view.numel():
            return None
        start, name = self._sorted[at]
        whole = self._tensors[name]
        offset, rest = divmod(view.data_ptr() - start, whole.element_size())
        if view.device != whole.device or view.dtype != whole.dtype or rest or offset + _last(view) > _last(whole):
            return None
        return name, offset


def _last(tensor: torch.Tensor) -> int:
    """Return the position of a tensor's last element in memory, counted from its first."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _span(whole: torch.Tensor, offset: int, target: torch.Tensor) -> tuple[int, int] | None:
    """Return start and end of the elements of `whole` that `target` is, `offset` elements of memory behind its first.
    None if they do not follow each other. A padded `whole` has memory between its rows."""
    if whole.is_contiguous():
        return (offset, offset + target.numel()) if target.is_contiguous() else None
    row, rest = divmod(offset, whole.stride(0))
    if rest or target.shape[1:] != whole.shape[1:] or target.stride() != whole.stride():
        return None
    width = math.prod(whole.shape[1:])
    return row * width, (row + len(target)) * width


def _gap(name: str, written: Sequence[tuple[int, int]], numel: int) -> str:
    """Describe what is wrong with the writes to a parameter; "" when they cover all of it exactly once."""
    end = 0
    for begin, upto in sorted(written):
        if begin < end:
            return f"elements {begin}..{min(end, upto) - 1} of {name} are written twice"
        if begin > end:
            break
        end = upto
    return f"element {end} of {name} and others are not written" if end < numel else ""
