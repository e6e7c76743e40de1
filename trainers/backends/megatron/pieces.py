"""Names this rank's pieces of weights and optimizer state after HF weights, for weight sync and for checkpoints.

A rank's part of a parameter consists of boxes, which are rectangular parts of HF tensors (`weights.boxes`). Another
mesh can therefore read its own parts from the checkpoint, and so can the fsdp backend for models without experts. The
distributed optimizer keeps flat pieces of each parameter on the data-parallel ranks. They are assembled first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ....actors.train.topology import Place, Topology
from ..checkpoint_files import STEPS
from ..families.megatron import Split
from ..hf_model import HfSource, kept_in_float32
from ..model_split import expert_tensor_size
from ..optimizers.lean_adamw import MOMENTS
from ..weight_stream import Cut, Piece, SpreadWeight
from .library import ChainedOptimizer, DistributedOptimizer
from .mesh import Mesh
from .model import PolicyModel
from .weights import EMBEDDING, HEAD, Entry, boxes, entries_of, hf_layer, split_dim, split_of, unbox


def spread_weights(source: HfSource, topology: Topology, dtype: torch.dtype) -> list[SpreadWeight]:
    """List the HF model's parameters in the model's own order, then the biases of its experts.

    Each comes with the ranks that provide its pieces. The list is the same on all ranks.
    Tied weights are listed once. `dtype` is the dtype in which parameters are streamed; biases of experts are float32.
    When several ranks hold the same piece, the one with data- and context-parallel index 0 provides it.
    """
    config = source.config
    etp = expert_tensor_size(topology)
    found = []
    model = source.empty_model()
    state = model.state_dict(keep_vars=True)
    dtypes = {name: dtype for name, _ in model.named_parameters()}
    biases = {name: torch.float32 for name, _ in model.named_buffers() if name in state}
    exact = kept_in_float32(model)
    for name, one in (dtypes | biases).items():
        layer = hf_layer(name)
        # When tied, the last stage has only a copy of the embedding.
        stage = topology.pp - 1 if name != EMBEDDING else 0
        if layer is not None:
            stage = layer // (config.num_hidden_layers // topology.pp)
        first = topology.rank(Place(0, pp=stage))
        split, shape = split_of(name, config.model_type), tuple(state[name].shape)
        weight = spread_weight(name, split, shape, one, first, topology.tp, etp, topology.ep)
        copies = tuple(range(0, topology.world // topology.pp, len(weight.pieces)))
        found.append(replace(weight, copies=copies, exact=name in biases or exact(name)))
    return found


def spread_weight(
    name: str, split: Split, shape: tuple[int, ...], dtype: torch.dtype, first: int, num_tp: int, num_etp: int,
    num_ep: int,
) -> SpreadWeight:  # fmt: skip
    """Describe how one weight is split over the ranks of its pipeline stage.

    `first` is the first rank of the stage. The pieces are on this rank and the ranks after it, in order of the
    tensor-parallel index. For experts the expert-tensor-parallel index varies fastest, then the expert-parallel index.
    """
    pieces = tuple(Piece(first + index, cuts) for index, cuts in enumerate(_cuts(split, num_tp, num_etp, num_ep)))
    boxed = (shape[0], 2, shape[1] // 2, *shape[2:]) if split == "expert_gated" else ()
    return SpreadWeight(name, dtype, shape, pieces, boxed)


def _cuts(split: Split, num_tp: int, num_etp: int, num_ep: int) -> Iterator[tuple[Cut, ...]]:
    """Yield the cuts that produce each piece of a weight (or of its boxed view). The pieces are in the order of the
    ranks that hold them."""
    if split.startswith("expert"):
        for index in range(num_etp * num_ep):
            ep, etp = divmod(index, num_etp)
            yield tuple(cut for cut in (Cut(0, num_ep, ep), Cut(2, num_etp, etp)) if cut.num > 1)
    elif split == "whole" or num_tp == 1:
        yield ()
    else:
        for tp in range(num_tp):
            yield (Cut(1 if split == "columns" else 0, num_tp, tp),)


class OwnPieces:
    """Extracts this rank's pieces of HF weights from the parameters of its Megatron model."""

    def __init__(self, model: PolicyModel, config: Any, mesh: Mesh) -> None:
        """Index the parameters of `model` by the names of their HF weights. `config` is the HF config."""
        self._config, self._part = config, mesh.part
        self._params = {name: value.detach() for name, value in model.weights().items()}
        entries = entries_of(list(self._params), model.first_layer, config)
        self._entries = {name: entry for entry in entries for name in entry.hf_names}
        self._rest: Iterator[tuple[str, torch.Tensor]] = iter(())

    def __call__(self, weight: SpreadWeight) -> torch.Tensor:
        """Return this rank's piece of `weight`, in the shape in which the weight is cut.

        Calls are fastest in the order of `spread_weights`, because q, k and v follow each other there and come from one
        parameter. Raises KeyError if this rank has no piece of the weight.
        """
        for name, box in self._rest:
            if name == weight.name:
                return box
            break
        entry = self._entries[weight.name]
        pieces = boxes(entry, self._params[entry.name], self._config, self._part)
        self._rest = zip(entry.hf_names, pieces, strict=True)
        return next(box for name, box in self._rest if name == weight.name)


def trained_tensors(model: PolicyModel, config: Any) -> tuple[dict[str, torch.Tensor], list[Entry]]:
    """Return the tensors of a rank's `model` that training changes if it has no adapter, by name, and their entries.
    Frozen ones are among them, because they can have been trained earlier in the run. config: HF config."""
    params = model.weights()
    return params, entries_of(list(params), model.first_layer, config)


REFERENCE = "reference"
"""First part of the names of a checkpoint's entries of a reference model that moves."""


@dataclass(frozen=True, slots=True)
class Share:
    """The elements `start` to `stop` of one flattened parameter. This rank's optimizer has the state of only these
    elements."""

    start: int
    stop: int
    values: dict[str, torch.Tensor]
    """Values of `weight` and of each name in MOMENTS, float32 `[stop - start]`. Writing to them writes to the
    optimizer."""


class TrainingState:
    """Collects and restores one rank's tensors that training changes: weights, optimizer state and step count."""

    def __init__(
        self, params: Mapping[str, torch.Tensor], entries: Sequence[Entry], optimizer: ChainedOptimizer,
        steps: torch.Tensor, config: Any, mesh: Mesh, reference: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """Allocate the optimizer's state, so that even a checkpoint before the first step contains the full state.

        `params` are the tensors of the rank that training changes, by the names in `entries`. `config` is the HF
        config. `reference` has those of the reference model, by the same names; it is empty without one.
        """
        self._reference = reference
        self._params, self._entries = params, entries
        self._steps, self._config, self._mesh = steps, config, mesh
        self._optimizer = optimizer
        self._shares = _shares(optimizer, [value for value in params.values() if _is_trained(value)])
        device = next(iter(self._params.values())).device
        self._meshes = {
            is_expert: DeviceMesh.from_group(group, device.type)
            for is_expert, group in ((False, mesh.tp), (True, mesh.experts))
            if group.size() > 1
        }

    @property
    def optional(self) -> set[str]:
        """Names of tensors that a checkpoint can lack: those of frozen weights and of a reference model."""
        frozen = [entry for entry in self._entries if _is_frozen(self._params[entry.name])]
        moved = [entry for entry in self._entries if entry.name in self._reference]
        return {_key(name, "weight") for entry in frozen for name in entry.hf_names} | {
            _key(name, REFERENCE) for entry in moved for name in entry.hf_names
        }

    @torch.no_grad()
    def collect(self, *, reference: bool) -> dict[str, torch.Tensor]:
        """Return copies of all tensors of a checkpoint, by name: weights, optimizer state and number of steps.

        reference: whether the reference model is among them. Collective.
        """
        state: dict[str, torch.Tensor] = {STEPS: self._steps.clone()}
        for entry in self._entries:
            whole = self._whole(self._params[entry.name])
            for kind, value in whole.items():
                state |= self._boxed(entry, value, kind)
            if reference and entry.name in self._reference:
                state |= self._boxed(entry, self._reference[entry.name].to(whole["weight"]), REFERENCE)
            if len(whole) > 1:
                state |= {f"optimizer.{name}.step": self._steps.float() for name in entry.hf_names}
        if self._config.tie_word_embeddings:  # The state of the fsdp backend has both names.
            embedding = state.get(_key(EMBEDDING, "weight"))
            state |= {} if embedding is None else {_key(HEAD, "weight"): embedding}
        return state

    @torch.no_grad()
    def blank(self) -> dict[str, torch.Tensor]:
        """Return zero tensors by name. A checkpoint is read into these tensors, which are then passed to `restore`."""
        state: dict[str, torch.Tensor] = {STEPS: torch.zeros_like(self._steps)}
        for entry in self._entries:
            room = torch.zeros_like(self._params[entry.name], dtype=torch.float32)
            for kind in (*_kinds(self._params[entry.name]), *((REFERENCE,) if entry.name in self._reference else ())):
                state |= self._boxed(entry, room.clone(), kind)
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Set model and optimizer to the values in `state`. It holds the tensors that `blank` returned, filled from a
        checkpoint."""
        self._steps.copy_(state[STEPS])
        for entry in self._entries:
            for kind in _kinds(self._params[entry.name]):
                if all(_key(name, kind) in state for name in entry.hf_names):
                    self._set(self._params[entry.name], kind, self._unboxed(entry, state, kind))
            if entry.name in self._reference and all(_key(name, REFERENCE) in state for name in entry.hf_names):
                self._reference[entry.name].copy_(self._unboxed(entry, state, REFERENCE))
        for part in self._optimizer.chained_optimizers:
            for state_of_param in part.optimizer.state.values():
                state_of_param["step"].fill_(float(self._steps))

    def _unboxed(self, entry: Entry, state: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
        found = [state[_key(name, kind)] for name in entry.hf_names]
        local = [value.to_local() if isinstance(value, DTensor) else value for value in found]
        return unbox(entry, local, self._config, self._mesh.part)

    def _set(self, param: torch.Tensor, kind: str, value: torch.Tensor) -> None:
        if kind == "weight":
            param.copy_(value)
        share = self._shares.get(param)
        if share is not None:
            share.values[kind].copy_(value.flatten()[share.start : share.stop])

    def _whole(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weight and the AdamW moments of a parameter, or only the value of a buffer. Each is whole,
        float32, and has the shape of `param`.

        This sums over ranks (collective) when each rank's optimizer has only a share of the parameter.
        """
        kinds = _kinds(param)
        if len(kinds) == 1:
            return {"weight": param.float().clone()}
        every = torch.zeros(len(kinds), param.numel(), dtype=torch.float32, device=param.device)
        share = self._shares.get(param)
        if share is not None:
            for row, kind in zip(every, kinds, strict=True):
                row[share.start : share.stop] = share.values[kind]
        if isinstance(self._optimizer.chained_optimizers[0], DistributedOptimizer):
            group = self._mesh.replicas if getattr(param, "allreduce", True) else self._mesh.expert_replicas
            dist.all_reduce(every, group=group)  # Each element has its value on one rank and is 0 on the others.
        return {kind: row.view(param.shape) for kind, row in zip(kinds, every, strict=True)}

    def _boxed(self, entry: Entry, tensor: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
        dim = split_dim(entry, self._mesh.part)
        found: dict[str, torch.Tensor] = {}
        for name, box in zip(entry.hf_names, boxes(entry, tensor, self._config, self._mesh.part), strict=True):
            found[_key(name, kind)] = box.contiguous() if dim is None else self._spread(entry, box.contiguous(), dim)
        return found

    def _spread(self, entry: Entry, box: torch.Tensor, dim: int) -> DTensor:
        mesh = self._meshes[entry.is_expert]
        shape = list(box.shape)
        shape[dim] = self._config.vocab_size if entry.split == "vocabulary" else shape[dim] * mesh.size()
        stride = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        return DTensor.from_local(
            box, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )


def _kinds(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return what a checkpoint has of a parameter, or of a frozen one or a buffer, which no optimizer changes."""
    return ("weight", *MOMENTS) if _is_trained(tensor) else ("weight",)


def _is_trained(tensor: torch.Tensor) -> TypeGuard[torch.nn.Parameter]:
    return is_parameter(tensor) and tensor.requires_grad


def _is_frozen(tensor: torch.Tensor) -> bool:
    return is_parameter(tensor) and not tensor.requires_grad


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a model is a parameter, and no buffer."""
    return isinstance(tensor, torch.nn.Parameter)


def _key(name: str, kind: str) -> str:
    return {"weight": f"model.{name}", REFERENCE: f"{REFERENCE}.{name}"}.get(kind, f"optimizer.{name}.{kind}")


def _shares(optimizer: ChainedOptimizer, params: list[torch.nn.Parameter]) -> dict[torch.Tensor, Share]:
    found: dict[torch.Tensor, Share] = {}
    for part in optimizer.chained_optimizers:
        adam = part.optimizer
        for group in adam.param_groups:
            for main in group["params"]:
                adam.state[main] = {
                    # A fused kernel reads the number of steps on the device.
                    "step": torch.zeros((), dtype=torch.float32, device=main.device if group["fused"] else None),
                    **{moment: torch.zeros_like(main) for moment in MOMENTS},
                }
        if isinstance(part, DistributedOptimizer):
            for param, (group, order) in part.model_param_group_index_map.items():
                span = part._get_model_param_range_map(param)["param"]
                found[param] = _share(adam, adam.param_groups[group]["params"][order], span.start, span.end)
            continue
        mine = {getattr(param, "main_param", param): param for param in params}
        for group in adam.param_groups:
            for main in group["params"]:
                found[mine[main]] = _share(adam, main, 0, main.numel())
    return found


def _share(adam: torch.optim.Optimizer, main: torch.Tensor, start: int, stop: int) -> Share:
    moments = {moment: adam.state[main][moment].view(-1) for moment in MOMENTS}
    return Share(start, stop, {"weight": main.data.view(-1), **moments})
