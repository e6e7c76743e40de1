"""Full HF weights out of a Megatron model that is spread over ranks: gathered tensor by tensor on global rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ....dataplane.topology import Place, Topology
from .mesh import Mesh
from .model import PolicyModel
from .weights import EMBEDDING, HEAD, entries_of, join, split_dim


def gather_weights(model: PolicyModel, config: Any, topology: Topology, mesh: Mesh) -> dict[str, torch.Tensor]:
    """HF name -> full tensor on the CPU, the output layer also where it is tied; {} but on global rank 0. Collective.

    config: of HF. Each stage's first rank gathers its tensors one after the other and sends them on, so no rank holds
    more than one full tensor (of a layer's experts: all of them) besides what rank 0 collects.
    """
    weights: dict[str, torch.Tensor] = {}
    if mesh.place.dp == mesh.place.cp == mesh.place.tp == 0:
        for stage in range(topology.pp):
            if mesh.place.pp == stage:
                parts = _stage_weights(model, config, topology, mesh)
                if stage == 0:
                    weights.update((name, value.to("cpu", copy=True)) for name, value in parts)
                else:
                    _send(parts, mesh)
            elif mesh.place.pp == 0:
                weights.update(_receive(stage, mesh))
    else:
        for _ in _stage_weights(model, config, topology, mesh):
            pass
    if weights and config.tie_word_embeddings:
        weights[HEAD] = weights[EMBEDDING]
    return weights


def _stage_weights(
    model: PolicyModel, config: Any, topology: Topology, mesh: Mesh
) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors of this rank's stage, on the stage's first rank; others give their parts and get nothing."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    first = topology.rank(Place(0, pp=mesh.place.pp))
    tied_copy = config.tie_word_embeddings and mesh.place.pp > 0
    for entry in entries_of(list(params), model.first_layer, tied=config.tie_word_embeddings):
        if tied_copy and entry.hf_names == (EMBEDDING,):
            continue  # the first stage's is the same
        group = mesh.sharers(entry)
        ranks = dist.get_process_group_ranks(group)
        if first not in ranks:
            continue
        own = torch.stack([params[name] for name in entry.names])
        alike = split_dim(entry, mesh.part) is None
        members = [mesh.part] if alike else mesh.parts(entry)
        parts = _gather(own, first, group, whole=alike)
        if parts:
            yield from join(entry, [list(part) for part in parts], config, members).items()


def _gather(own: torch.Tensor, first: int, group: dist.ProcessGroup, *, whole: bool) -> list[torch.Tensor]:
    if whole or group.size() == 1:
        return [own] if dist.get_rank() == first else []
    parts = [torch.empty_like(own) for _ in range(group.size())] if dist.get_rank() == first else None
    dist.gather(own, parts, dst=first, group=group)
    return parts or []


def _send(parts: Iterator[tuple[str, torch.Tensor]], mesh: Mesh) -> None:
    """To the pipeline's first rank, each after a note of what it is."""
    target = dist.get_process_group_ranks(mesh.pp)[0]
    for name, value in parts:
        dist.send_object_list([(name, tuple(value.shape), value.dtype)], target, mesh.pp)
        dist.send(value.contiguous(), target, mesh.pp)
    dist.send_object_list([None], target, mesh.pp)


def _receive(stage: int, mesh: Mesh) -> dict[str, torch.Tensor]:
    source = dist.get_process_group_ranks(mesh.pp)[stage]
    weights: dict[str, torch.Tensor] = {}
    while True:
        note: list[Any] = [None]
        dist.recv_object_list(note, source, mesh.pp)
        if note[0] is None:
            return weights
        name, shape, dtype = note[0]
        value = torch.empty(shape, dtype=dtype, device=_device())
        dist.recv(value, source, mesh.pp)
        weights[name] = value.cpu()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
