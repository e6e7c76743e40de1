"""Who stands on which GPU: every shape has one plan or one sentence, and no plan breaks a rule of NCCL or engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headrace.trainers.cluster.places.placement import Host, Placement, used_gpus, with_reserved_gpus
from headrace.trainers.cluster.places.placement_plan import PlacementRequest, plan_placement, train_groups
from headrace.trainers.config.config import Config
from headrace.trainers.errors import UserError


def config(
    engines: int = 1, tp: int = 1, *, actors: int | None = None, trainer: Any = None, **resources: Any
) -> Config:
    return Config.model_validate(
        {
            "rollout": {"num_engines": engines, "tp": tp, "num_actors": actors, "engine": "vllm"},
            "trainer": {"backend": "megatron", **(trainer or {})},
            "resources": resources,
        }
    )


def hosts(*gpus: int, cpus: float = 100, free: Sequence[Sequence[int]] | None = None) -> list[Host]:
    return [
        Host(f"host{index}", count, tuple(range(count) if free is None else free[index]), cpus)
        for index, count in enumerate(gpus)
    ]


def gpus(placement: Placement) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """GPUs of the train ranks and of the engines, numbered over all hosts."""
    return [placement.numbers(seat) for seat in placement.ranks], [
        placement.numbers(seat) for seat in placement.engines
    ]


@pytest.mark.parametrize(
    ("machine", "asked", "layout", "ranks", "engines"),
    [
        ([1], config(), "colocated", [0], [[0]]),
        ([2], config(), "separate", [0], [[1]]),
        ([2], config(layout="colocated"), "colocated", [0], [[0]]),
        # What the reviews found broken.
        ([2], config(2, trainer={"dp": 2}), "colocated", [0, 1], [[0], [1]]),
        ([2], config(1, 2, trainer={"dp": 2}), "colocated", [0, 1], [[0, 1]]),
        ([2], config(1, trainer={"dp": 2}), "colocated", [0, 1], [[0]]),
        ([3], config(1, 2, trainer={"dp": 1}), "separate", [0], [[1, 2]]),
        ([3], config(1, 2, trainer={"dp": 2}), "colocated", [0, 1], [[0, 1]]),
        ([8, 8], config(8, trainer={"dp": 8}), "separate", list(range(8)), [[gpu] for gpu in range(8, 16)]),
        ([8, 8], config(4, trainer={"tp": 8}), "separate", list(range(8)), [[8], [9], [10], [11]]),
        ([8, 8], config(8, 2, trainer={"dp": 16}), "colocated", list(range(16)), [[i, i + 1] for i in range(0, 16, 2)]),
        # More engines than ranks, fewer, and a tensor-parallel trainer beside them.
        ([4], config(4, trainer={"dp": 2}), "colocated", [0, 1], [[0], [1], [2], [3]]),
        ([4], config(1, trainer={"dp": 4}), "colocated", [0, 1, 2, 3], [[0]]),
        ([2], config(1, 2, trainer={"tp": 2}), "colocated", [0, 1], [[0, 1]]),
        ([4], config(1, 2, trainer={"tp": 2}), "separate", [0, 1], [[2, 3]]),
        # A head without GPUs, hosts of different sizes, and the host that alone can hold an engine.
        ([0, 2], config(), "separate", [0], [[1]]),
        ([1, 2, 4], config(2, trainer={"dp": 2}), "separate", [3, 4], [[5], [6]]),
        ([4, 8], config(1, 8, trainer={"tp": 4}), "separate", [0, 1, 2, 3], [list(range(4, 12))]),
        ([8, 4], config(1, 8, trainer={"tp": 4}), "separate", [8, 9, 10, 11], [list(range(8))]),
        ([4, 8], config(8, trainer={"tp": 8}, layout="colocated"), "colocated", [*range(4, 12)],
         [[gpu] for gpu in range(4, 12)]),
        ([3, 3], config(2, 2, trainer={"dp": 6}), "colocated", [0, 1, 2, 3, 4, 5], [[0, 1], [3, 4]]),
        # Ranks of a replica are not neighbours where stages are: each replica is on one host nonetheless.
        ([2, 2], config(2, 2, trainer={"dp": 2, "pp": 2}), "colocated", [0, 2, 1, 3], [[0, 1], [2, 3]]),
        # A replica larger than any host is cut between its stages.
        ([2, 2], config(1, trainer={"tp": 2, "pp": 2}), "colocated", [0, 1, 2, 3], [[0]]),
        # Maps.
        ([4], config(1, 2, trainer={"dp": 2}, trainer_gpus=[3, 1], rollout_gpus=[2, 3]), "colocated", [3, 1], [[2, 3]]),
        ([2, 2], config(2, trainer_gpus=[3], rollout_gpus=[0, 2]), "separate", [3], [[0], [2]]),
    ],
)  # fmt: skip
def test_each_shape_has_its_places(
    machine: list[int], asked: Config, layout: str, ranks: list[int], engines: list[list[int]]
) -> None:
    placement = plan_placement(PlacementRequest.of(asked), hosts(*machine))
    assert gpus(placement) == ([(gpu,) for gpu in ranks], [tuple(held) for held in engines])
    assert placement.layout == layout and placement.shared == (layout == "colocated")
    assert placement.sentence.startswith(f"GPUs: {layout}, ") and len(placement.sentence) < 300


@pytest.mark.parametrize(
    ("machine", "asked", "sentence"),
    [
        (hosts(1), config(2), "got 'auto' with 1 train worker(s) (trainer.dp=1 x 1 rank(s)) and 2 engine process(es) "
         "(rollout.num_engines=2 x rollout.tp=1), expected 3 GPUs (or 2, each for both roles) that are free, with a "
         "logical CPU for each process on its host: host0 has 1 of 1 GPU(s) and 100 CPU(s) free; trainer.dp=1 with "
         "rollout.num_engines=1 would fit"),
        (hosts(2), config(2, trainer={"dp": 3}), "trainer.dp=2 with rollout.num_engines=2 would fit"),
        (hosts(3), config(1, trainer={"dp": 4, "ep": 4}), "trainer.dp=3 and trainer.ep=1 with "
         "rollout.num_engines=1 would fit"),
        (hosts(2, free=[[1]]), config(layout="separate"), "expected 2 GPUs that are free, with a logical CPU for each "
         "process on its host: host0 has 1 of 2 GPU(s)"),
        (hosts(1, 1), config(1, 2), "2 of them together on one host"),
        (hosts(1, 1), config(1, trainer={"tp": 2}), "no smaller trainer.dp and rollout.num_engines would fit either"),
        (hosts(2, cpus=1), config(), "host0 has 2 of 2 GPU(s) and 1 CPU(s) free"),
        (hosts(2, cpus=2), config(actors=1), "rollout.num_actors: got 1, expected at most 0, because each needs a log"),
        (hosts(0), config(trainer_gpus=[0], rollout_gpus=[1]), "trainer_gpus: got [0], expected it unset, because"),
        (hosts(2), config(trainer_gpus=[0], rollout_gpus=[2]), "rollout_gpus: got GPU 2, expected a number below 2"),
        (hosts(2, 2, free=[[0, 1], [1]]), config(trainer_gpus=[0], rollout_gpus=[2]), "got GPU 2, expected a free one, "
         "but another job holds it (GPU 0 of host1)"),
        (hosts(2, 2), config(1, 2, trainer_gpus=[0], rollout_gpus=[1, 2]), "got [1, 2] for engine 0, expected 2 neigh"),
        (hosts(4), config(1, 2, trainer_gpus=[0], rollout_gpus=[1, 3]), "got [1, 3] for engine 0, expected 2 neighbou"),
        (hosts(2, 2), config(trainer={"tp": 2}, trainer_gpus=[1, 2], rollout_gpus=[0]), "resources.trainer_gpus: got "
         "[1, 2], expected GPUs of one host for the ranks 0, 1, which are a tensor-parallel group"),
        (hosts(2, cpus=1), config(trainer_gpus=[0], rollout_gpus=[1]), "need 2 logical CPUs on host0, expected at m"),
        (hosts(0, 0, cpus=1), config(1, 2), "resources.ray_address: that Ray cluster cannot hold 2 engine process(es) "
         "(rollout.num_engines=1 x rollout.tp=2, each engine on one host) beside 1 train worker(s), expected a free "
         "logical CPU for each: host0 has 1 CPU(s) free, host1 has 1 CPU(s) free"),
        (hosts(0, 0, cpus=1.5), config(actors=1), "rollout.num_actors: got 1, expected at most 0, because each needs"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(machine: list[Host], asked: Config, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_placement(PlacementRequest.of(asked), machine)
    assert sentence in str(caught.value) and str(caught.value).startswith(("resources.", "rollout."))
    assert "\n" not in str(caught.value)


def on_cpus(*cpus: float, driver: int = 0) -> list[Host]:
    """Hosts without GPUs, of which one has the driver."""
    return [Host(f"h{i}", 0, (), count, f"node {i}", has_driver=i == driver) for i, count in enumerate(cpus)]


@pytest.mark.parametrize(
    ("cpus", "asked", "places", "nodes", "row_nodes"),
    [
        # One host if the run fits there, the driver's first; the driver's node belongs to the run in any case.
        ([4, 4], config(2, trainer={"dp": 2}), "engines 00 ranks 00", [0], [0]),
        ([0, 9], config(2, trainer={"dp": 2}), "engines 11 ranks 11", [0, 1], [1]),
        ([1, 9, 2], config(2, trainer={"dp": 2}), "engines 11 ranks 11", [0, 1], [1]),
        # Several hosts: ranks first, and rollout actors where CPUs are left.
        ([1, 2, 9], config(2, 4, trainer={"dp": 2}), "engines 22 ranks 01", [0, 1, 2], [0, 1, 2]),
        ([2, 2], config(1, trainer={"dp": 3}), "engines 1 ranks 001", [0, 1], [0, 1]),
        ([0, 2, 2], config(1, actors=2, trainer={"dp": 1}), "engines 1 ranks 1 rollouts 22", [0, 1, 2], [1, 2]),
        ([0, 3, 1], config(2, actors=1, trainer={"dp": 1}), "engines 11 ranks 1 rollouts 2", [0, 1, 2], [1, 2]),
        # A tensor-parallel group of gloo may cross hosts if no host can hold it.
        ([1, 1, 1], config(1, trainer={"tp": 2}), "engines 2 ranks 01", [0, 1, 2], [0, 1, 2]),
    ],
)  # fmt: skip
def test_hosts_without_gpus_are_dealt_out_by_their_cpus(
    cpus: list[float], asked: Config, places: str, nodes: list[int], row_nodes: list[int]
) -> None:
    machine = on_cpus(*cpus)
    placement = plan_placement(PlacementRequest.of(asked), machine)
    roles = {"engines": placement.engines, "ranks": placement.ranks, "rollouts": placement.rollouts}
    assert " ".join(f"{role} {''.join(str(s.host) for s in seats)}" for role, seats in roles.items() if seats) == places
    assert placement.layout == "cpu" and not used_gpus(placement) and not placement.shared
    assert placement.nodes == tuple(f"node {index}" for index in nodes)
    assert placement.row_nodes == tuple(f"node {index}" for index in row_nodes)
    assert placement.directory_node == "node 0"
    for index, host in enumerate(machine):
        assert sum(seat.cpus for seat in placement.seats if seat.host == index) <= host.free_cpus


def test_a_driver_beside_the_hosts_leaves_the_directory_to_rank_0() -> None:
    placement = plan_placement(PlacementRequest.of(config(1, trainer={"dp": 2})), on_cpus(1, 2, driver=9))
    assert [seat.host for seat in placement.ranks] == [0, 1] and placement.directory_node == "node 0"
    assert placement.nodes == ("node 0", "node 1")


def test_without_gpus_one_host_takes_the_whole_run() -> None:
    for machine in (hosts(0), hosts(0, 0)):
        placement = plan_placement(
            PlacementRequest.of(config(2, 2, actors=1, trainer={"dp": 2}, layout="colocated")), machine
        )
        assert (placement.layout, placement.shared, placement.one_host) == ("cpu", False, True)
        assert [(seat.name, seat.cpus, seat.host, seat.gpus) for seat in placement.seats] == [
            ("engine 0", 2, 0, ()), ("engine 1", 2, 0, ()), ("train worker 0", 1, 0, ()),
            ("train worker 1", 1, 0, ()), ("rollout 0", 1, 0, ()),
        ]  # fmt: skip
    scripted = Config.model_validate({"rollout": {"engine": "scripted"}, "trainer": {"backend": "scripted"}})
    assert plan_placement(PlacementRequest.of(scripted), hosts(8)).layout == "cpu"


def test_rollout_actors_take_the_cpus_that_are_left_near_the_engines() -> None:
    machine = [Host("a", 2, (0, 1), 2), Host("b", 2, (0, 1), 4), Host("c", 0, (), 2)]
    placement = plan_placement(PlacementRequest.of(config(2, actors=4, trainer={"dp": 2})), machine)
    assert [seat.host for seat in placement.engines] == [1, 1], placement
    assert [seat.host for seat in placement.rollouts] == [1, 1, 2, 2]


def test_gpus_that_ray_gives_instead_keep_their_order() -> None:
    placement = plan_placement(PlacementRequest.of(config(1, 2, trainer={"dp": 2})), hosts(8, free=[[0, 1]]))
    given = with_reserved_gpus(placement, {0: {6: "GPU-f", 3: "GPU-c"}})
    assert [(seat.gpus, seat.devices) for seat in given.seats] == [
        ((3, 6), ("GPU-c", "GPU-f")), ((3,), ("GPU-c",)), ((6,), ("GPU-f",)),
    ]  # fmt: skip
    assert given.shared_gpus == (3, 6)


# ---------------------------------------------------------------- any shape


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Config, list[Host]]:
    machine = []
    for index in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 8))
        free = draw(st.sets(st.integers(0, count - 1))) if count else set()
        machine.append(Host(f"host{index}", count, tuple(sorted(free)), draw(st.integers(0, 20))))
    size = st.sampled_from([1, 1, 2, 3, 4])
    mesh = {"dp": draw(size), "tp": draw(size), "pp": draw(st.sampled_from([1, 1, 2]))}
    layout = draw(st.sampled_from(["auto", "separate", "colocated"]))
    actors = draw(st.sampled_from([None, 1, 3]))
    return config(draw(st.integers(1, 6)), draw(size), actors=actors, trainer=mesh, layout=layout), machine


def test_colocated_roles_share_a_gpu_where_there_are_cpus_for_both() -> None:
    placement = plan_placement(
        PlacementRequest.of(config(2, layout="colocated")), [Host("a", 1, (0,), 1), Host("b", 2, (0, 1), 3)]
    )
    assert placement.layout == "colocated"
    assert [(seat.host, seat.gpus) for seat in (*placement.ranks, *placement.engines)] == [
        (1, (0,)), (1, (0,)), (1, (1,)),
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"resources\.layout"):
        plan_placement(PlacementRequest.of(config(layout="colocated")), [Host("a", 1, (0,), 1), Host("b", 1, (0,), 1)])


@given(shapes())
@example((config(2, layout="colocated"), [Host("a", 1, (0,), 1), Host("b", 2, (0, 1), 2)]))
@example((config(6, 1, trainer={"dp": 1}), hosts(3, 4)))
def test_no_plan_breaks_a_rule(shape: tuple[Config, list[Host]]) -> None:
    asked, machine = shape
    assume(any(host.num_gpus for host in machine))
    try:
        placement = plan_placement(PlacementRequest.of(asked), machine)
    except UserError:
        return
    assert placement == plan_placement(PlacementRequest.of(asked), machine)
    for seats in (placement.ranks, placement.engines):
        held = [(seat.host, gpu) for seat in seats for gpu in seat.gpus]
        assert len(held) == len(set(held)), "two processes of a role on a GPU"
        assert all(gpu in machine[host].free_gpus for host, gpu in held if host is not None)
    for seat in placement.engines:
        assert seat.host is not None and len(seat.gpus) == asked.rollout.tp
        free = machine[seat.host].free_gpus
        start = free.index(seat.gpus[0])
        assert seat.gpus == free[start : start + asked.rollout.tp], "an engine's GPUs are not neighbours"
    for group in list(train_groups(asked.trainer.topology))[-1]:
        assert len({placement.ranks[rank].host for rank in group}) == 1, "a tensor-parallel group straddles hosts"
    for index, host in enumerate(machine):
        assert sum(seat.cpus for seat in placement.seats if seat.host == index) <= host.free_cpus
    roles = [(seat.host, gpu) for seat in (*placement.ranks, *placement.engines) for gpu in seat.gpus]
    assert placement.shared == (len(set(roles)) < len(roles)) == (placement.layout == "colocated")
    assert asked.resources.layout in ("auto", placement.layout)


@given(shapes())
def test_a_run_that_fits_on_one_host_s_gpus_is_not_refused(shape: tuple[Config, list[Host]]) -> None:
    asked, _ = shape
    train, rollout = asked.trainer.topology.world, asked.rollout.num_engines * asked.rollout.tp
    needed = max(train, rollout) if asked.resources.layout == "colocated" else train + rollout
    placement = plan_placement(PlacementRequest.of(asked), hosts(0, needed))
    assert sorted(used_gpus(placement)) == [1] and len(used_gpus(placement)[1]) == needed
