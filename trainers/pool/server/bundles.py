"""Reserves all GPUs of a Ray cluster for a pool, and places the actors of the pool's tenants on them.

    pool     read_hosts -> one named placement group with a bundle for each GPU -> which GPU is each bundle?
    tenant   numbers of resources.trainer_gpus and rollout_gpus -> the pool's list -> bundles, devices

A bundle has its GPU and no logical CPU, because the actors of any number of tenants share it: each takes a small
fraction of the GPU, and sees only the GPUs assigned to it. A tenant's actors without a GPU are placed outside the
bundles.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ray._private.state import state as ray_state
from ray._raylet import PlacementGroupID
from ray.exceptions import RaySystemError
from ray.util.placement_group import PlacementGroup

from ...cluster.gpu_bundles import LOOK_S, Bundle, Reservation, create_group, read_hosts, tell_gpus
from ...cluster.places.placement import Host, used_gpus, with_reserved_gpus
from ...cluster.places.placement_plan import PlacementRequest, place_as_mapped
from ...errors import UserError
from ..state.status import PooledGpu
from .client import NAMESPACE, PoolClient, actor_name


def reserve_pool(name: str, timeout_s: float, stack: ExitStack) -> tuple[PooledGpu, ...]:
    """Reserve all GPUs of the Ray cluster for the pool named `name`, and return where they are. They are ordered by
    host, this process's host first, then by number. stack: returns the GPUs when it is closed. Ray also returns them,
    and ends the processes on them, when this process leaves Ray. The Ray namespace of this process must be
    `client.NAMESPACE`. Raises UserError if the cluster has a pool of this name already, or if some GPUs are not free
    within `timeout_s` seconds.
    """
    if _is_there(name):
        raise UserError(
            f"--name: got {name!r}, expected a new name, as the Ray cluster has a pool of that name already"
        )
    deadline = time.monotonic() + timeout_s
    hosts = read_hosts()
    places = [host for host, one in enumerate(hosts) for _ in range(one.num_gpus)]
    bundles = [Bundle(host, {"GPU": 1}) for host in places]
    group = _created(name, hosts, bundles, deadline, stack)
    told = tell_gpus([(group, index) for index in range(len(bundles))], deadline)
    found = sorted((host, *of, bundle) for bundle, (host, of) in enumerate(zip(places, told, strict=True)))
    return tuple(
        PooledGpu(hosts[host].name, hosts[host].node, number, device, bundle) for host, number, device, bundle in found
    )


def _is_there(name: str) -> bool:
    try:
        PoolClient(name)
    except UserError:
        return False
    return True


def _created(
    name: str, hosts: Sequence[Host], bundles: Sequence[Bundle], deadline: float, stack: ExitStack
) -> PlacementGroup:
    """Create the pool's placement group, after the group of a pool that has just ended is removed."""
    while True:
        try:
            return create_group(
                hosts, bundles, deadline, stack, name=actor_name(name), key="--gpus", bound="the start of a pool"
            )
        except RaySystemError as error:
            if "already exists" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)


def places_in_pool(pool: str, request: PlacementRequest, reserved: Sequence[PooledGpu]) -> Reservation:
    """Return the places of a tenant's actors on the GPUs `reserved` of its pool. The GPUs are given by
    `resources.trainer_gpus` and `resources.rollout_gpus`. Raises UserError if the run cannot be placed on them, or if
    the pool's GPUs are no longer reserved.
    """
    placement = place_as_mapped(request, _hosts(reserved))
    on_host = _by_host(placement.hosts, reserved)
    used = {host: {gpu: on_host[host][gpu].device for gpu in gpus} for host, gpus in used_gpus(placement).items()}
    placement = with_reserved_gpus(placement, used)
    seats = (*placement.engines, *placement.ranks)
    bundles = {seat.name: on_host[seat.host][seat.gpus[0]].bundle for seat in seats if seat.host is not None}
    return Reservation(placement, _group(pool), bundles)


def _hosts(reserved: Sequence[PooledGpu]) -> tuple[Host, ...]:
    """Return the living hosts of the Ray cluster: first the hosts of the pool's GPUs, in the order of the pool.

    Raises UserError if a host of the pool is gone.
    """
    living = {host.node: replace(host, num_gpus=0, free_gpus=()) for host in read_hosts()}
    for gpu in reserved:
        if gpu.node not in living:
            raise UserError(
                f"pool.address: the pool's host {gpu.host} is gone from the Ray cluster; start the pool again"
            )
    numbers: dict[str, list[int]] = {}
    for gpu in reserved:
        numbers.setdefault(gpu.node, []).append(gpu.number)
    ordered = [replace(living[node], num_gpus=len(here), free_gpus=tuple(here)) for node, here in numbers.items()]
    return (*ordered, *(host for node, host in living.items() if node not in numbers))


def _by_host(hosts: Sequence[Host], reserved: Sequence[PooledGpu]) -> Mapping[int, Mapping[int, PooledGpu]]:
    return {
        index: {gpu.number: gpu for gpu in reserved if gpu.node == host.node}
        for index, host in enumerate(hosts)
        if host.num_gpus
    }


def _group(pool: str) -> PlacementGroup:
    """Return the placement group of a pool. `ray.util.get_placement_group` finds only groups of this process's
    namespace, and each run has a separate namespace. Raises UserError if the group does not exist."""
    found = ray_state.get_placement_group_by_name(actor_name(pool), NAMESPACE)
    if found is None:
        raise UserError(f"pool.name: the GPUs of pool {pool!r} are not reserved in Ray any more; start the pool again")
    return PlacementGroup(PlacementGroupID.from_hex(found["placement_group_id"]))
