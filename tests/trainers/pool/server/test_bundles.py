"""The GPUs of a pool are reserved in Ray, and the actors of its tenants stand on them: on a Ray with logical GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import ray

from headrace.tests.trainers.cluster.test_gpu_bundles import QUIET, START_S, Seen, free_gpus, nodes, start, wait_until
from headrace.trainers.cluster.gpu_bundles import Reservation
from headrace.trainers.cluster.places.placement import Host
from headrace.trainers.cluster.places.placement_plan import PlacementRequest
from headrace.trainers.config.config import Config
from headrace.trainers.errors import UserError
from headrace.trainers.pool.server.bundles import places_in_pool, reserve_pool
from headrace.trainers.pool.server.client import NAMESPACE
from headrace.trainers.pool.state.status import PooledGpu

pytestmark = pytest.mark.processes
__all__ = ["start"]


@contextmanager
def pool_nodes(*gpus: int) -> Iterator[None]:
    """Such nodes, which this process has joined as that of a pool does."""
    with nodes(*gpus) as address:
        ray.shutdown()
        ray.init(address=address, namespace=NAMESPACE, **QUIET)
        yield


def tenant(name: str, train: list[int], rollout: list[int], tp: int = 1) -> Config:
    rollouts = {"num_engines": len(rollout) // tp, "tp": tp, "num_actors": 1, "engine": "vllm"}
    resources = {"start_timeout_s": START_S, "trainer_gpus": train, "rollout_gpus": rollout}
    return Config.model_validate(
        {
            "run": {"name": name}, "rollout": rollouts, "trainer": {"dp": len(train)}, "resources": resources,
            "pool": {"address": "a-cluster"}, "algorithm": {"mode": "async"},
        }
    )  # fmt: skip


def places(config: Config, reserved: Sequence[PooledGpu]) -> Reservation:
    return places_in_pool(config.pool.name, PlacementRequest.of(config), reserved)


def test_actors_of_several_tenants_stand_on_the_same_gpus_and_see_those_of_their_seats(
    start: Callable[..., Seen],
) -> None:
    """On two hosts: an engine of two GPUs sees both, a train worker one, a rollout actor none."""
    with pool_nodes(2, 2), ExitStack() as pool:
        reserved = reserve_pool("pool", START_S, pool)
        assert [(gpu.number, gpu.device) for gpu in reserved] == [(0, "0"), (1, "1"), (0, "0"), (1, "1")]
        assert reserved[0].node == reserved[1].node == ray.get_runtime_context().get_node_id() != reserved[2].node
        assert free_gpus() == 0
        with ExitStack() as stack:
            wide = tenant("wide", [3], [0, 1, 2, 3], tp=2)
            seen = start(wide, stack, places(wide, reserved)).table()
            assert seen.pop("rollout 0")[1] == ""
            assert seen == {"engine 0": (0, "0,1"), "engine 1": (1, "0,1"), "train worker 0": (1, "1")}
            beside = tenant("beside", [2], [1, 2])
            seen = start(beside, stack, places(beside, reserved)).table()
            assert seen["train worker 0"] == (1, "0") == seen["engine 1"] and seen["engine 0"] == (0, "1")
        pool.close()
        wait_until(lambda: free_gpus() == 4)
        with pytest.raises(UserError, match="the GPUs of pool 'pool' are not reserved in Ray any more"):
            places(beside, reserved)


def test_a_pool_waits_in_bounds_for_gpus_that_another_job_holds() -> None:
    with pool_nodes(2), ExitStack() as stack:
        ended = ExitStack()

        @ray.remote(num_gpus=1)
        class Other:
            def here(self) -> bool:
                return True

        other: Any = Other.remote()
        assert ray.get(other.here.remote(), timeout=START_S)
        with pytest.raises(UserError, match="--gpus: Ray did not give 2 whole GPU"):
            reserve_pool("pool", 1.0, ended)
        ray.kill(other)
        ended.close()  # at the next call Ray may still know the group's name
        assert len(reserve_pool("pool", START_S, stack)) == 2


def test_numbers_are_those_of_the_pool_wherever_the_tenant_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenant's own host comes first in its list of hosts, but not among the pool's."""
    from headrace.trainers.pool.server import bundles

    hosts = (Host("mine", 2, (), 4.0, "b"), Host("first", 1, (), 4.0, "a"), Host("none", 0, (), 64.0, "c"))
    monkeypatch.setattr(bundles, "read_hosts", lambda: hosts)
    monkeypatch.setattr(bundles, "_group", lambda pool: "group")
    reserved = (
        PooledGpu("first", "a", 0, "0", 2), PooledGpu("mine", "b", 0, "GPU-x", 0),
        PooledGpu("mine", "b", 1, "GPU-y", 1),
    )  # fmt: skip
    found = places(tenant("t", [0], [0, 1, 2]), reserved)
    assert found.bundles == {"train worker 0": 2, "engine 0": 2, "engine 1": 0, "engine 2": 1}
    seats = {seat.name: (seat.host, seat.devices, seat.cpus) for seat in found.placement.seats}
    assert seats["engine 2"] == (1, ("GPU-y",), 0) and seats["train worker 0"] == (0, ("0",), 0)
    assert found.placement.hosts[seats["rollout 0"][0] or 0].name in ("first", "mine") and seats["rollout 0"][2] == 1
    with pytest.raises(UserError, match=r"resources.rollout_gpus: got GPU 3, expected a number below 3"):
        places(tenant("t", [0], [0, 3]), reserved)
    monkeypatch.setattr(bundles, "read_hosts", lambda: hosts[:1])
    with pytest.raises(UserError, match="the pool's host first is gone from the Ray cluster"):
        places(tenant("t", [0], [0, 1]), reserved)
