"""Opens and closes Megatron's process groups for a `Topology`. A process can have only one set of them at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ....actors.train.topology import Place, Topology
from ..model_split import expert_tensor_size
from .library import parallel_state, tensor_parallel_random
from .weights import Entry, Part


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's process groups in a Megatron mesh, and its place in the mesh."""

    place: Place
    part: Part
    """Part of the weights that this rank holds."""
    tokens: dist.ProcessGroup
    """Group of all ranks with this rank's tensor-parallel index. The sum of their losses is the loss of the whole mesh,
    with each token counted once."""
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    experts: dist.ProcessGroup
    """Group of the ranks that together hold all experts of a pipeline stage. The expert-tensor-parallel index varies
    fastest in their order."""
    replicas: dist.ProcessGroup
    """Group of the data- and context-parallel ranks, which hold the same part of all weights except experts."""
    expert_replicas: dist.ProcessGroup
    """Group of the ranks that hold the same part of the same experts."""
    owns_default: bool
    """True if this mesh created the default process group, as it does for a single rank that has none."""

    def sharers(self, entry: Entry) -> dist.ProcessGroup:
        """Return the group of ranks that together hold the parameter `entry`, each of them a part or a copy."""
        return self.experts if entry.is_expert else self.tp

    def parts(self, entry: Entry) -> list[Part]:
        """Return which part of `entry` each rank of `sharers` holds, in rank order."""
        num = self.sharers(entry).size()
        if entry.is_expert:
            etp = self.part.num_etp
            return [replace(self.part, etp=index % etp, ep=index // etp) for index in range(num)]
        return [replace(self.part, tp=index) for index in range(num)]

    def close(self) -> None:
        """Close the groups and clear Megatron's global state, so that another backend can be opened. Idempotent."""
        if not parallel_state.model_parallel_is_initialized():
            return
        # Megatron only drops its references to the groups; their threads and connections would stay.
        made = [group for group in parallel_state._global_process_group_list or () if group is not None]
        parallel_state.destroy_model_parallel()
        if not dist.is_initialized():
            return  # The groups of an offloaded backend are already destroyed.
        for group in (*made, self.tokens):
            dist.destroy_process_group(group)
        if self.owns_default:
            dist.destroy_process_group()


def open_mesh(topology: Topology, rank: int) -> Mesh:
    """Create Megatron's process groups for `topology`. Collective over the default process group.

    The default process group must have `topology.world` ranks; a single rank needs none. Raises RuntimeError when the
    group is missing or has another size, and while another Megatron backend of the process is open.
    """
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("megatron backend: another megatron backend is open in this process; close it first")
    owns_default = topology.world == 1 and not dist.is_initialized()
    if owns_default:  # Megatron needs process groups even for one rank.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not dist.is_initialized() or dist.get_world_size() != topology.world:
        raise RuntimeError(
            f"megatron backend: it needs a default process group of {topology.world} ranks before it is built"
        )
    etp = expert_tensor_size(topology)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=etp,
        order="tp-cp-ep-dp-pp",  # This is the rank order of `Topology`.
        create_gloo_process_groups=False,
    )
    # There is no dropout, so the tracker has nothing to track. An inference tracker requests no CUDA generator.
    tensor_parallel_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    place = topology.place(rank)
    members = [
        [other for other in range(topology.world) if topology.place(other).tp == tp] for tp in range(topology.tp)
    ]
    groups = [dist.new_group(ranks) for ranks in members]  # Every rank must create all groups.
    part = Part(
        *(place.tp, topology.tp),
        *(_group(parallel_state.get_expert_tensor_parallel_group()).rank(), etp),
        *(_group(parallel_state.get_expert_model_parallel_group()).rank(), topology.ep),
    )
    mesh = Mesh(
        place,
        part,
        tokens=_group(groups[place.tp]),
        tp=_group(parallel_state.get_tensor_model_parallel_group()),
        cp=_group(parallel_state.get_context_parallel_group()),
        pp=_group(parallel_state.get_pipeline_model_parallel_group()),
        experts=_group(parallel_state.get_expert_tensor_and_model_parallel_group()),
        replicas=_group(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert_replicas=_group(parallel_state.get_expert_data_parallel_group()),
        owns_default=owns_default,
    )
    ranks = (mesh.tp.rank(), mesh.cp.rank(), mesh.pp.rank(), parallel_state.get_data_parallel_rank())
    assert ranks == (place.tp, place.cp, place.pp, place.dp), (
        f"Megatron places rank {rank} elsewhere than {topology} at {place}"
    )
    return mesh


def global_groups() -> dict[str, Any]:
    """Return the namespace of Megatron's global variables, which contains the process groups. It is not a copy."""
    return vars(parallel_state)


def clear_scratch() -> None:
    """Free the memory that Megatron keeps for gathered activations. It is allocated again when it is needed."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def _group(found: Any) -> dist.ProcessGroup:
    assert isinstance(found, dist.ProcessGroup), f"this rank is not in its own group: {found}"
    return found
