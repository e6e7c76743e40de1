"""Runs storage units as Ray actors on chosen nodes of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...errors import StoreLost
from ...listen_address import Listening, listening
from ...rpc.child_process import end_with_parent
from ..ray_processes import end_actors, has_died
from .unit import StorageUnit
from .wire import UnitAddress

NAMESPACE = "headrace"
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0


class UnitActor:
    """Ray actor that hosts a storage unit, which listens at the address of the actor's node."""

    def __init__(self, arguments: tuple[str, str, bytes, int, Listening]) -> None:
        """arguments: run's id, unit's name, key, capacity in bytes, and address and ports at which the unit listens."""
        end_with_parent()
        self._arguments = arguments
        self._unit: StorageUnit | None = None

    def start(self) -> UnitAddress | ValueError:
        """Start the unit and return its address, or the error of a node that has no room for it. The error is not
        raised, because Ray would wrap it."""
        run_id, name, key, capacity_bytes, own = self._arguments
        own.adopt()
        try:
            self._unit = StorageUnit(run_id, name, key, own.address(), capacity_bytes)
        except ValueError as error:
            return error
        return replace(self._unit.address, node=ray.get_runtime_context().get_node_id())

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


def living_nodes() -> list[str]:
    """Return Ray's ids of the nodes that are alive now, this process's first."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: node != here)


def start_units(run_id: str, places: Sequence[tuple[str, str]], key: bytes, capacity_bytes: int) -> list[RayUnit]:
    """Start storage units, side by side. places: name of each unit, and Ray's id of its node. Raises ValueError when a
    node has no room, and StoreLost when a unit does not start within START_TIMEOUT_S."""
    started, actors, units = time.monotonic(), [], []
    actor_class = ray.remote(UnitActor)
    for name, node in places:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        full_name = f"headrace-{run_id}-{name}"
        options = actor_class.options(
            name=full_name, namespace=NAMESPACE, num_cpus=0, max_concurrency=2, scheduling_strategy=place
        )
        # Ray would send a key that is an argument itself as plain bytes, whatever its pickle is.
        actors.append(options.remote((run_id, name, key, capacity_bytes, listening())))
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
            f"storage unit did not start: {error}", op="start", peer=places[len(units)][0], elapsed_s=elapsed_s
        ) from None
    except BaseException:
        end_actors(actors, [])
        raise
    return units
