"""Runs storage units as Ray actors, one on each node of a Ray cluster."""

from __future__ import annotations

import platform
import time
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...errors import StoreLost
from ..ray_processes import end_actors, has_died
from .unit import StorageUnit
from .wire import UnitAddress

NAMESPACE = "headrace"
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0


class UnitActor:
    """Ray actor that hosts a storage unit, which listens at the address of the actor's node."""

    def __init__(self, run_id: str, name: str, key: bytes, capacity_bytes: int) -> None:
        self._arguments = (run_id, name, key, capacity_bytes)
        self._unit: StorageUnit | None = None

    def start(self) -> UnitAddress | ValueError:
        """Start the unit and return its address, or the error of a node that has no room for it. The error is not
        raised, because Ray would wrap it."""
        run_id, name, key, capacity_bytes = self._arguments
        try:
            self._unit = StorageUnit(run_id, name, key, ray.util.get_node_ip_address(), capacity_bytes)
        except ValueError as error:
            return ValueError(f"{error} (on host {platform.node()})")
        return self._unit.address

    def close(self) -> None:
        """Close the unit and remove its pool. Idempotent."""
        if self._unit is not None:
            self._unit.close()


class RayUnit:
    """A storage unit in a Ray actor."""

    def __init__(self, actor: Any, address: UnitAddress) -> None:
        self._actor = actor
        self.address = address

    def has_died(self) -> bool:
        """Return whether Ray knows that the actor has died."""
        return has_died(self._actor)

    def close(self) -> None:
        """Close the unit within bounded time, and end its actor. Idempotent."""
        if self._actor is None:
            return
        actor, self._actor = self._actor, None
        try:
            actor.close.remote().future().result(END_TIMEOUT_S)
        except (RayError, FutureTimeout):
            pass  # The actor is dead or stuck. Its pool is removed with the next data plane of that host.
        end_actors([actor], [])


def start_units(run_id: str, num_units: int | None, key: bytes, capacity_bytes: int) -> list[RayUnit]:
    """Start storage units on the nodes that are alive now: one on each, or `num_units` on the nodes in turn. Raises
    ValueError when a node has no room, and StoreLost when a unit does not start within START_TIMEOUT_S."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda node: node != here)
    names = [f"unit-{number}" for number in range(num_units or len(nodes))]
    started, actors, units = time.monotonic(), [], []
    actor_class = ray.remote(UnitActor)
    for number, name in enumerate(names):
        place = NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)
        full_name = f"headrace-{run_id}-{name}"
        options = actor_class.options(
            name=full_name, namespace=NAMESPACE, num_cpus=0, max_concurrency=2, scheduling_strategy=place
        )
        actors.append(options.remote(run_id, name, key, capacity_bytes))
    try:
        for actor in actors:
            address = actor.start.remote().future().result(START_TIMEOUT_S)
            if isinstance(address, ValueError):
                raise address
            units.append(RayUnit(actor, address))
    except (RayError, FutureTimeout) as error:
        end_actors(actors, [])
        elapsed_s = time.monotonic() - started
        raise StoreLost(
            f"storage unit did not start: {error}", op="start", peer=names[len(units)], elapsed_s=elapsed_s
        ) from None
    except BaseException:
        end_actors(actors, [])
        raise
    return units
