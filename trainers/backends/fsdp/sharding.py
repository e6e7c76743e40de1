"""Builds the fsdp backend's mesh, shards a model over it, and lists which rank has which piece of each weight."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ....actors.train.topology import Place, Topology
from ..weight_stream import Cut, Piece, SpreadWeight
from .causal_lm import CausalLM
from .router_replay import router_biases
from .tensor_parallel import split_dim, split_over


def build_mesh(topology: Topology, device: torch.device) -> DeviceMesh | None:
    """Build the device mesh with dimensions "dp" and "tp", in the rank order of `Topology`.

    Returns None for a single rank, which has no process group.
    """
    if topology.world == 1:
        return None
    return init_device_mesh(device.type, (topology.dp, topology.tp), mesh_dim_names=("dp", "tp"))


def spread(
    module: CausalLM,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    half: bool,
    offload: bool,
    reshard: bool,
) -> CausalLM:
    """Split `module` over the tensor-parallel ranks, then shard it over the data-parallel ranks, in place.

    Each decoder layer is sharded by its own call of FSDP's `fully_shard`, and one more call shards the rest of the
    module. With `half` the module computes in bfloat16. With `offload` shards are kept in host memory between uses.
    Without `reshard` a layer that was gathered for a forward pass stays so until its backward pass, or `give_back`.
    Gradients are summed over the data-parallel ranks. A single rank's module is returned unchanged: there is nothing to
    shard, and FSDP's hooks and copies would only cost time. The module is on the meta device; `fill` later gives it
    memory and weights. Raises ValueError when the model cannot be split or sharded.
    """
    if mesh is None:
        return module
    if mesh["tp"].size() > 1:
        split_over(module, mesh["tp"])
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    host = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for part in (*module.layers(), module):
        sharded = fully_shard(
            part,
            mesh=mesh["dp"],
            mp_policy=precision if half else MixedPrecisionPolicy(),
            offload_policy=host if offload else OffloadPolicy(),
            reshard_after_forward=None if reshard else False,  # None: not of the root, whose backward pass comes next
        )
        _sum_gradients(sharded)
    return module


def give_back(module: torch.nn.Module) -> None:
    """Free what this rank has gathered from other ranks for passes over `module` that have ended. A no-op if that is
    nothing."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def give_back_unfinished(module: torch.nn.Module, *, reshard: bool) -> None:
    """Do what `give_back` does, also after a pass that failed halfway. FSDP would then keep what it was asked to keep.
    reshard: that of `spread`."""
    if isinstance(module, FSDPModule):
        module.set_reshard_after_forward(True)
        give_back(module)
        module.set_reshard_after_forward(reshard)
        module.set_reshard_after_forward(False, recurse=False)


def _sum_gradients(module: FSDPModule) -> None:
    """Make FSDP sum the gradients of a shard over the ranks instead of averaging them. The train step itself divides
    them once, by the denominator of its mean loss."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, the default for a factor


def spread_weights(model: torch.nn.Module, topology: Topology, dtype: torch.dtype) -> list[SpreadWeight]:
    """List the parameters of a HF model that `spread` has sharded, and the biases of its experts. Each parameter comes
    with the ranks that have its pieces; every rank has all biases.

    Tied parameters are listed once. `dtype` is the dtype in which floating-point parameters are streamed; biases keep
    their own.
    """
    found = [
        SpreadWeight(name, bias.dtype, tuple(bias.shape), (Piece(0),)) for name, bias in router_biases(model).items()
    ]
    for name, param in model.named_parameters():
        places = [
            Place(dp, tp) for tp in range(1 if split_dim(param) is None else topology.tp) for dp in range(topology.dp)
        ]
        pieces = tuple(Piece(topology.rank(place), own_cuts(param, topology, place)) for place in places)
        kind = dtype if param.is_floating_point() else param.dtype
        found.append(SpreadWeight(name, kind, tuple(param.shape), pieces))
    return found


def own_cuts(param: torch.Tensor, topology: Topology, place: Place) -> tuple[Cut, ...]:
    """Return the cuts that turn a whole parameter into the piece that the rank at `place` holds after `spread`."""
    tp_dim = split_dim(param)
    # FSDP2 splits each tensor-parallel part along dimension 0.
    tp = Cut(tp_dim or 0, topology.tp if tp_dim is not None else 1, place.tp)
    return tuple(cut for cut in (tp, Cut(0, topology.dp, place.dp)) if cut.num > 1)


def own_piece(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a parameter, without gradient. It shares memory with the parameter."""
    return (param.to_local() if isinstance(param, DTensor) else param).detach()
