"""Every actor of a run reports the GPUs, the host and the rank that the plan gave it: on a Ray with logical GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayNodes
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from headrace.actors.process.own_process import ActorInfo
from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.factory import open_data_plane
from headrace.tests import process_pool
from headrace.trainers.cluster import actor_starter, gpu_bundles, starting_actors
from headrace.trainers.cluster.calls import ActorFailed, ActorHandle, DriverMeter, gather
from headrace.trainers.cluster.gpu_bundles import Reservation, reserve_places
from headrace.trainers.cluster.lost_hosts import moved
from headrace.trainers.cluster.places.placement import Placement, Seat
from headrace.trainers.cluster.places.placement_plan import PlacementRequest
from headrace.trainers.cluster.ray_cluster import lean_start
from headrace.trainers.cluster.start_times import StartTimes
from headrace.trainers.cluster.transport_choice import WeightRoute
from headrace.trainers.config.config import Config
from headrace.trainers.errors import UserError

pytestmark = pytest.mark.processes
START_S = 120.0


class Identified(Exception):
    """The actors have started and said where they are; nothing is built."""


class Seen:
    """The actors of one start, and what they said."""

    def __init__(self, handles: list[Any], placement: Placement) -> None:
        self.handles = {handle.info.name: handle for handle in handles}
        self.placement = placement

    def table(self) -> dict[str, tuple[int, str]]:
        """Name of each actor -> index of the node on which it runs, CUDA_VISIBLE_DEVICES in its process."""
        asked = {name: handle.ray_actor.__ray_call__.remote(_where) for name, handle in self.handles.items()}
        nodes = [host.node for host in self.placement.hosts]
        told = {name: ray.get(reference, timeout=START_S) for name, reference in asked.items()}
        return {name: (nodes.index(node), shown) for name, (node, shown) in told.items()}


def _where(_: object) -> tuple[str, str | None]:
    import os

    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")


QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


@contextmanager
def nodes(*gpus: int) -> Iterator[str]:
    """A Ray whose nodes have so many logical GPUs; the first is the driver's. Yields its address."""
    process_pool.end_ray()
    process_pool.fork_ray_workers()
    small: dict[str, Any] = {"num_cpus": 8, "object_store_memory": 80 << 20}
    with lean_start():
        cluster = RayNodes(
            initialize_head=True, head_node_args={**small, "num_gpus": gpus[0], "include_dashboard": False}
        )
        try:
            for count in gpus[1:]:
                cluster.add_node(num_gpus=count, **small)
            ray.init(address=cluster.address, **QUIET)
            yield str(cluster.address)
        finally:
            ray.shutdown()
            cluster.shutdown()


def leave(address: str) -> None:
    """End the driver's connection to Ray, as the end of a run does, and join it as another driver."""
    ray.shutdown()
    ray.init(address=address, **QUIET)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Config, ExitStack], Seen]:
    """Start the actors of a run as a run does, up to the point where they would be built."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_enable_worker_prestart", "0")
    handles: list[Any] = []
    placements: list[Placement] = []

    def stop(generators: list[Any], workers: list[Any], *_: Any) -> None:
        handles[:] = [*generators, *workers]
        raise Identified

    check = actor_starter.check_reports

    def note(placement: Placement, infos: list[ActorInfo]) -> None:
        placements.append(placement)
        check(placement, infos)

    monkeypatch.setattr(starting_actors, "build", stop)
    monkeypatch.setattr(actor_starter, "check_reports", note)

    def begin(config: Config, stack: ExitStack, reservation: Reservation | None = None) -> Seen:
        plane = stack.enter_context(open_data_plane(DataPlaneConfig.model_validate({"store": {"kind": "local"}})))
        reservation = reservation or reserve_places(PlacementRequest.of(config), START_S)
        route = WeightRoute.of(config.sync, reservation.placement, pooled=config.pool.address is not None)
        starter = actor_starter.ActorStarter(config, DriverMeter(), stack, reservation, route, one_host=True)
        starting = starting_actors.StartingActors(starter, config.resources, config.run.max_restarts)
        with pytest.raises(Identified):
            starting.build("", plane, StartTimes())
        return Seen(list(handles), placements[-1])

    return begin


def config(engines: int, dp: int, tp: int = 1, *, actors: int | None = None, **more: Any) -> Config:
    rollout = {"num_engines": engines, "tp": tp, "num_actors": actors, "engine": "vllm"}
    resources = {"start_timeout_s": START_S, **more.pop("resources", {})}
    return Config.model_validate({"rollout": rollout, "trainer": {"dp": dp}, "resources": resources, **more})


def free_gpus() -> float:
    return ray.available_resources().get("GPU", 0)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_engines_and_two_ranks_in_pairs_and_a_replaced_one_where_it_was(
    start: Callable[[Config, ExitStack], Seen],
) -> None:
    with nodes(2) as address:
        with ExitStack() as stack:
            seen = start(config(2, 2), stack)
            pairs = {f"{name} {index}": (0, str(index)) for name in ("rollout", "train worker") for index in (0, 1)}
            assert seen.table() == pairs
            assert seen.placement.shared and seen.placement.shared_gpus == (0, 1)
            handle: ActorHandle = seen.handles["rollout 1"]
            before = handle.info
            handle.kill()
            handle.restart()
            [after] = gather([seen.handles["rollout 1"].configure()], "start", START_S)
            assert (after.gpus, after.host) == (before.gpus, before.host) == (("1",), before.host)
            assert after.pid != before.pid
            misplaced = ActorInfo("rollout 1", 7, after.host, ("0",))
            with pytest.raises(ActorFailed, match=r"rollout 1 .pid 7 .* reports the GPUs \['0'\] .* expected \['1'\]"):
                gpu_bundles.check_reports(seen.placement, [misplaced])
        leave(address)
        wait_until(lambda: free_gpus() == 2)
        assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "asked", "table"),
    [
        ((2,), config(1, 2), {"rollout 0": (0, "0"), "train worker 0": (0, "0"), "train worker 1": (0, "1")}),
        (
            (2,),
            config(1, 2, tp=2, actors=1),
            {"engine 0": (0, "0,1"), "rollout 0": (0, ""), "train worker 0": (0, "0"), "train worker 1": (0, "1")},
        ),
        ((3,), config(1, 1, tp=2), {"rollout 0": (0, "1,2"), "train worker 0": (0, "0")}),
        (
            (3,),
            config(1, 2, tp=2),
            {"rollout 0": (0, "0,1"), "train worker 0": (0, "0"), "train worker 1": (0, "1")},
        ),
        # A driver's host without GPUs.
        ((0, 1, 2), config(1, 1), {"rollout 0": (2, "1"), "train worker 0": (2, "0")}),
        ((1, 1), config(1, 1), {"rollout 0": (1, "0"), "train worker 0": (0, "0")}),
        (
            (2, 2),
            config(1, 3, tp=2, resources={"layout": "colocated"}),
            {"rollout 0": (0, "0,1"), **{f"train worker {rank}": (rank // 2, str(rank % 2)) for rank in range(3)}},
        ),
    ],
)
def test_shapes(
    start: Callable[[Config, ExitStack], Seen], gpus: tuple[int, ...], asked: Config, table: dict[str, tuple[int, str]]
) -> None:
    with nodes(*gpus), ExitStack() as stack:
        seen = start(asked, stack)
        order = [seen.placement.hosts[index].num_gpus for index in range(len(gpus))]
        if len(gpus) == 3 and order == [0, 2, 1]:  # Ray's nodes of one address have no order but that of their ids
            table = {name: (1, shown) for name, (_, shown) in table.items()}
        assert seen.table() == table


@pytest.mark.slow
def test_two_hosts_of_eight(start: Callable[[Config, ExitStack], Seen]) -> None:
    """Eight engines and eight train workers: all ranks on one host, all engines on the other."""
    with nodes(8, 8), ExitStack() as stack:
        seen = start(config(8, 8), stack)
        expected = {f"train worker {gpu}": (0, str(gpu)) for gpu in range(8)}
        assert seen.table() == expected | {f"rollout {gpu}": (1, str(gpu)) for gpu in range(8)}
        assert seen.placement.layout == "separate" and not seen.placement.shared


@pytest.mark.slow
def test_an_engine_moves_to_a_free_gpu_of_another_host() -> None:
    with nodes(1, 1, 1):
        before = reserve_places(PlacementRequest.of(config(1, 1)), START_S)
        after = moved(before, ["rollout 0"], START_S)
        assert after is not None
        [seat] = after.placement.engines
        assert seat.host is not None and seat.devices == ("0",)
        node = after.placement.hosts[seat.host].node
        assert node not in [before.placement.hosts[one.host or 0].node for one in before.placement.seats]
        where: Any = ray.remote(_where).options(**after.options(seat))
        assert ray.get(where.remote(None), timeout=START_S)[0] == node
        assert moved(after, ["train worker 0"], 1.0) is None, "no GPU is free"


@pytest.mark.slow
def test_gpus_of_other_jobs_are_left_to_them(
    start: Callable[[Config, ExitStack], Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bundles, "SETTLE_S", 2.0)
    with nodes(4) as address:
        other = placement_group([{"GPU": 1}], lifetime="detached", name="other")
        assert other.wait(30)
        wait_until(lambda: free_gpus() == 3)
        with ExitStack() as stack:
            assert start(config(1, 1), stack).table() == {"rollout 0": (0, "2"), "train worker 0": (0, "1")}
        leave(address)
        wait_until(lambda: free_gpus() == 3)
        # Ray would give GPU 1 and 2 first.
        mapped = {"trainer_gpus": [3], "rollout_gpus": [2]}
        with ExitStack() as stack:
            seen = start(config(1, 1, resources=mapped), stack)
            assert seen.table() == {"rollout 0": (0, "2"), "train worker 0": (0, "3")}
            wait_until(lambda: free_gpus() == 1)  # GPU 1 is given back
        leave(address)
        wait_until(lambda: free_gpus() == 3)
        with pytest.raises(UserError, match=r"GPU 0 of \S+, expected a free one, but another"):
            gpu_bundles.reserve_places(
                PlacementRequest.of(config(1, 1, resources={**mapped, "rollout_gpus": [0]})), START_S
            )
        wait_until(lambda: free_gpus() == 3)
        with pytest.raises(UserError, match=r"has 3 of 4 GPU\(s\) .* trainer.dp=3 with"):
            gpu_bundles.reserve_places(PlacementRequest.of(config(1, 4)), START_S)


@pytest.mark.slow
def test_an_engine_that_leaves_gives_its_gpus_back_and_another_can_join() -> None:
    elastic = {"elastic": True, "ray_address": "auto"}
    with nodes(3, 2) as address:
        reservation = reserve_places(PlacementRequest.of(config(1, 1, tp=2, resources=elastic)), START_S)
        wait_until(lambda: free_gpus() == 2)
        [far] = [host for host in gpu_bundles.read_hosts() if len(host.free_gpus) == 2]
        deadline = time.monotonic() + START_S
        with_far, index = reservation.with_host(far)
        grown = with_far.with_engines([Seat("rollout 1", 2, index, (0, 1))], deadline)
        assert [seat.devices for seat in grown.placement.engines] == [("1", "2"), ("0", "1")]
        assert grown.placement.hosts[grown.placement.seat("rollout 1").host or 0].node == far.node
        wait_until(lambda: free_gpus() == 0)
        shrunk = grown.without("rollout 0")
        assert [seat.name for seat in shrunk.placement.engines] == ["rollout 1"]
        wait_until(lambda: free_gpus() == 2)
        assert [len(host.free_gpus) for host in gpu_bundles.read_hosts()] == [2, 0]
        leave(address)
        wait_until(lambda: free_gpus() == 5)


@pytest.mark.slow
def test_gpus_that_another_job_takes_meanwhile_are_waited_for_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes(2):
        read = gpu_bundles.read_hosts()
        other = placement_group([{"GPU": 1}])
        assert other.wait(30)
        monkeypatch.setattr(gpu_bundles, "read_hosts", lambda: read)
        with pytest.raises(UserError, match=r"Ray did not give 2 whole GPU\(s\) .* within \d s"):
            gpu_bundles.reserve_places(PlacementRequest.of(config(1, 1)), 3.0)
        remove_placement_group(other)
        wait_until(lambda: free_gpus() == 2)
