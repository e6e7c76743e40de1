"""Builds the fsdp backend's mesh, shards a model over it, and fills each rank's pieces with the weights of a HF model.

The model is built on the meta device, split and sharded there, and gets memory for this rank's pieces only. Therefore a
rank needs host memory for its shard and the largest piece of a weight, however large the model is.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ....actors.engines.config import Attention
from ....actors.train.topology import Place, Topology
from ..hf_model import HfSource, kept_in_float32, load_causal_lm
from ..lora.adapter import Adapter
from ..lora.matrices import is_matrix
from ..lora.rounded_layers import restored, rounded_layers
from ..weight_stream import Cut, OwnPiece, Piece, SpreadWeight, WeightSource, cut_box
from .causal_lm import CausalLM
from .expert_parallel import distribute_experts, holds_experts
from .hf_routers import router_biases
from .tensor_parallel import split_dim, split_over


def build_mesh(topology: Topology, device: torch.device) -> DeviceMesh | None:
    """Build the device mesh with dimensions "dp" and "tp", in the rank order of `Topology`. The ranks of "dp" shard the
    weights between them: all data- and context-parallel ranks.

    Returns None for a single rank, which has no process group.
    """
    if topology.world == 1:
        return None
    return init_device_mesh(device.type, (topology.dp * topology.cp, topology.tp), mesh_dim_names=("dp", "tp"))


def context_group(topology: Topology, device: torch.device) -> dist.ProcessGroup | None:
    """Return the group of the context-parallel ranks, which have parts of the same rows; None if there is only one.
    Collective."""
    if topology.cp == 1:
        return None
    sizes = (topology.dp, topology.cp, topology.tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replica", "cp", "tp"))["cp"].get_group()


def build_expert_mesh(topology: Topology, device: torch.device) -> DeviceMesh | None:
    """Build the device mesh of the experts, with dimensions "edp" and "ep". The ranks of "ep" have different experts,
    those of "edp" shard the same ones. Returns None without expert parallelism."""
    if topology.ep == 1:
        return None
    sizes = (topology.world // topology.ep, topology.ep)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("edp", "ep"))


def spread(
    module: CausalLM,
    mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    device: torch.device,
    *,
    half: bool,
    offload: bool,
    reshard: bool,
) -> CausalLM:
    """Split `module` over the tensor- and expert-parallel ranks, then shard it over the data-parallel ranks, in place.

    Each decoder layer is sharded by its own call of FSDP's `fully_shard`, and one more call shards the rest of the
    module. With `half` the module computes in bfloat16. With `offload` shards are kept in host memory between uses.
    Without `reshard` a layer that was gathered for a forward pass stays so until its backward pass, or `give_back`.
    Gradients are summed over the data-parallel ranks. A single rank's module is returned unchanged: there is nothing to
    shard, and FSDP's hooks and copies would only cost time. The module is on the meta device; `fill` later gives it
    memory and weights. Raises ValueError when the model cannot be split or sharded.
    """
    if mesh is None:
        return module
    tp = mesh["tp"].size() > 1
    if tp:
        split_over(module, mesh["tp"], with_experts=expert_mesh is None)
    experts = []
    if expert_mesh is not None:
        experts = distribute_experts(module, expert_mesh["ep"], mesh["tp"].get_group() if tp else None)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    host = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for part in (*experts, *module.layers(), module):
        sharded = fully_shard(
            part,
            mesh=expert_mesh["edp"] if expert_mesh is not None and part in experts else mesh["dp"],
            mp_policy=precision if half else MixedPrecisionPolicy(),
            offload_policy=host if offload else OffloadPolicy(),
            reshard_after_forward=None if reshard else False,  # None makes FSDP reshard all modules except the root.
        )
        _sum_gradients(sharded)
    return module


def give_back(module: torch.nn.Module) -> None:
    """Free what this rank has gathered from other ranks for passes over `module` that have ended. Does nothing if
    nothing is gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def give_back_unfinished(module: torch.nn.Module, *, reshard: bool) -> None:
    """Do what `give_back` does, even after a pass that failed halfway, when FSDP would otherwise keep gathered weights.
    reshard: the value that was passed to `spread`."""
    if isinstance(module, FSDPModule):
        module.set_reshard_after_forward(True)
        give_back(module)
        module.set_reshard_after_forward(reshard)
        module.set_reshard_after_forward(False, recurse=False)


def _sum_gradients(module: FSDPModule) -> None:
    """Make FSDP sum the gradients of a shard over the ranks instead of averaging them. The train step itself divides
    them once, by the denominator of its mean loss."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # FSDP would use a pre-multiplied sum, which gloo lacks.


def spread_weights(model: torch.nn.Module, topology: Topology, dtype: torch.dtype) -> list[SpreadWeight]:
    """List the parameters of a HF model that `spread` has sharded, the biases of its experts, and its rounded weights.
    Each comes with the ranks that have its pieces; every rank has all biases and rounded weights.

    Tied parameters are listed once. `dtype` is the dtype in which floating-point parameters are streamed; biases keep
    their own.
    """
    every, one = tuple(range(topology.world)), (Piece(0),)
    found = [
        SpreadWeight(name, bias.dtype, tuple(bias.shape), one, copies=every, exact=True)
        for name, bias in router_biases(model).items()
    ]
    for name, layer in rounded_layers(model).items():
        found.append(SpreadWeight(name, dtype, (layer.out_features, layer.in_features), one, copies=every))
    exact = kept_in_float32(model)
    for name, param in model.named_parameters():
        alike = split_dim(param) is None and not holds_experts(param)
        replicas = [(dp, cp) for dp in range(topology.dp) for cp in range(topology.cp)]
        places = [Place(dp, tp, cp) for tp in range(1 if alike else topology.tp) for dp, cp in replicas]
        pieces = tuple(Piece(topology.rank(place), own_cuts(param, topology, place)) for place in places)
        kind = dtype if param.is_floating_point() else param.dtype
        copies = tuple(range(topology.tp if alike else 1))
        found.append(SpreadWeight(name, kind, tuple(param.shape), pieces, copies=copies, exact=exact(name)))
    return found


def own_cuts(param: torch.Tensor, topology: Topology, place: Place) -> tuple[Cut, ...]:
    """Return the cuts that turn a whole parameter into the piece that the rank at `place` holds after `spread`."""
    if holds_experts(param):
        edp, ep = divmod(topology.rank(place), topology.ep)
        cuts = (Cut(0, topology.ep, ep), Cut(0, topology.world // topology.ep, edp))
        return tuple(cut for cut in cuts if cut.num > 1)
    tp_dim = split_dim(param)
    # FSDP2 splits each tensor-parallel part along dimension 0.
    tp = Cut(tp_dim or 0, topology.tp if tp_dim is not None else 1, place.tp)
    dp = Cut(0, topology.dp * topology.cp, place.dp * topology.cp + place.cp)
    return tuple(cut for cut in (tp, dp) if cut.num > 1)


def own_piece(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a parameter, without gradient. It shares memory with the parameter."""
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


def own_pieces(model: torch.nn.Module) -> OwnPiece:
    """Return the function that returns this rank's piece of each weight that `spread_weights` lists."""
    params, layers = {**dict(model.named_parameters()), **router_biases(model)}, rounded_layers(model)

    def own(weight: SpreadWeight) -> torch.Tensor:
        layer = layers.get(weight.name)
        return own_piece(params[weight.name]) if layer is None else restored(layer, weight.dtype)

    return own


_log = logging.getLogger(__name__)


class WholeModel:
    """A `WeightSource` that holds the whole model in host memory. It serves models that cannot be read tensor by
    tensor, for example because they are quantized or have no safetensors files."""

    def __init__(self, model: str, attention: Attention) -> None:
        """Load `model`, a local folder or hub id. Raises ValueError when there is no such model."""
        self._model = load_causal_lm(model, attention)
        self._tensors = self._model.state_dict()

    def empty_model(self, dtype: torch.dtype | None = None) -> Any:
        with torch.device("meta"):
            empty = type(self._model)(copy.deepcopy(self._model.config))
        empty.generation_config = self._model.generation_config
        return empty.eval()

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pieces(self, name: str, ranges: tuple[slice, ...]) -> Iterable[tuple[tuple[slice, ...], torch.Tensor]]:
        return [(tuple(slice(0, part.stop - part.start) for part in ranges), self._tensors[name][ranges])]


def open_source(model: str, attention: Attention) -> WeightSource:
    """Return a source of the weights of `model`, a local folder or hub id. attention: as in `ModelConfig`.

    The weights are read piece by piece if the safetensors files contain them as the model uses them. Otherwise the
    source holds the whole model in host memory, and a warning is logged. Raises ValueError when there is no such model.
    """
    try:
        source = HfSource(model, attention)
        why = _why_whole(source)
    except ValueError as error:  # The next line raises an error if there is no such model.
        whole, why = WholeModel(model, attention), str(error)
    else:
        if not why:
            return source
        whole = WholeModel(model, attention)
    _log.warning("every train worker holds the whole model in host memory while it starts: %s", why)
    return whole


def _why_whole(source: HfSource) -> str:
    """Return why the model's tensors cannot be read one by one from its files; "" when they can."""
    if getattr(source.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    model = source.empty_model()
    tied = set(model.all_tied_weights_keys)
    missing = next((name for name in _stored(model) if name not in tied and not source.has(name)), None)
    return "" if missing is None else f"its safetensors files have no tensor {missing!r}"


def _stored(model: nn.Module) -> list[str]:
    """Return the names of the tensors in a model folder: parameters, tied ones once, and persistent buffers."""
    kept = model.state_dict()
    return [
        *(name for name, _ in model.named_parameters()),
        *(name for name, _ in model.named_buffers() if name in kept),
    ]


@torch.no_grad()
def fill(
    module: CausalLM,
    source: WeightSource,
    topology: Topology,
    rank: int,
    device: torch.device,
    *,
    host: bool,
    adapter: Adapter | None = None,
) -> None:
    """Give `module` memory for this rank's pieces of its parameters, and read the pieces from `source`.

    Before the call the module is on the meta device. Its buffers are filled too and are always on `device`. host: true
    to keep the pieces of parameters in host memory instead of on `device`. adapter: the adapter of the module; None if
    it has none.
    """
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, param in parent.named_parameters(recurse=False):
            shared.setdefault(id(param), []).append((parent, name))
    module.to_empty(device="cpu" if host else device)
    # `to_empty` has given each owner of a shared parameter a separate one.
    for (first, name), *others in shared.values():
        for parent, other in others:
            parent.register_parameter(other, first.get_parameter(name))
    model, place = module.model, topology.place(rank)
    with source.reading():
        _compute_buffers(model, source, device)
        for name, param in model.named_parameters():
            ranges = cut_box(param.shape, own_cuts(param, topology, place))
            if not all(part.start < part.stop for part in ranges):
                continue
            if adapter is not None and is_matrix(name):
                own_piece(param).copy_(adapter.start(name, tuple(param.shape))[ranges])
            else:
                _read_into(own_piece(param), source, name, ranges)


def _read_into(target: torch.Tensor, source: WeightSource, name: str, ranges: tuple[slice, ...]) -> None:
    """Read a part of a tensor into `target`. The pieces are converted to the dtype of `target` on its device, which
    takes no host memory."""
    for place, values in source.pieces(name, ranges):
        target[place].copy_(values.to(target.device))


def _compute_buffers(model: Any, source: WeightSource, device: torch.device) -> None:
    """Fill the model's buffers and move them to `device`.

    Persistent buffers, which model folders contain, are read from `source`; the others are computed by the model's own
    code. Some models compute those of a module in one of its parents (Falcon-H1). Raises ValueError, naming the buffer,
    when that code leaves a buffer without values.
    """
    kept = model.state_dict()
    for module in model.modules():
        # transformers initialises only modules and parameters without this mark: here the modules that compute buffers,
        # but no parameters.
        module._is_hf_initialized = not any(part._non_persistent_buffers_set for part in module.modules())
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = empty = torch.empty_like(buffer, device="cpu")
            _bytes_of_bools(empty).fill_(_unwritten(empty.dtype))
    for param in model.parameters():
        param._is_hf_initialized = True
    model.initialize_weights()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if full in kept:
                _read_into(buffer, source, full, tuple(slice(0, size) for size in buffer.shape))
            elif _has_unwritten(buffer):
                raise ValueError(
                    f"model.path: got a {type(model).__name__}, which leaves its buffer {full!r} without values, "
                    "expected a model that computes all buffers that its folder lacks in `_init_weights`"
                )
            module._buffers[name] = buffer.to(device)


def _unwritten(dtype: torch.dtype) -> float:
    """Return the value of elements that no code has written yet. It is NaN for dtypes that have NaN, so that values
    computed from it are detected too."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    limits = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
    return limits.min or limits.max


def _has_unwritten(buffer: torch.Tensor) -> bool:
    mark, values = _unwritten(buffer.dtype), _bytes_of_bools(buffer)
    return bool((values.isnan() if mark != mark else values == mark).any())


def _bytes_of_bools(buffer: torch.Tensor) -> torch.Tensor:
    """Return `buffer`, or the bytes of a bool buffer, which can hold a third value."""
    return buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer
