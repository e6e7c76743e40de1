"""Actors of a host that is gone move to hosts with room, and a restart waits for room and names the host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace.trainers.cluster import lost_hosts, run_actors
from headrace.trainers.cluster.engine_pool import EnginePool
from headrace.trainers.cluster.gpu_bundles import Reservation
from headrace.trainers.cluster.lost_hosts import NoRoom, Patience, gone, host_of, moved, used_hosts
from headrace.trainers.cluster.places.placement import Host, Placement, Seat
from headrace.trainers.cluster.run_actors import RunActors
from headrace.trainers.errors import UserError

A, B, C, D = (letter * 56 for letter in "abcd")
"""Ids of nodes."""
HOSTS = (Host("a", 0, (), 1.0, A, True), Host("b", 0, (), 1.0, B), Host("c", 0, (), 1.0, C))
PLACEMENT = Placement(
    "cpu", "", HOSTS, (Seat("rollout 0", 1, 1), Seat("rollout 1", 1, 1)), (Seat("train worker 0", 1, 0),)
)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The nodes that Ray reports as alive, with their free CPUs. All of them accept connections."""
    free = {A: 0.0, C: 1.0}

    def nodes() -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": True, "NodeManagerHostname": node[-1]} for node in free]

    def read_hosts() -> Sequence[Host]:
        return [Host(node[-1], 0, (), cpus, node) for node, cpus in free.items()]

    monkeypatch.setattr(lost_hosts.ray, "nodes", nodes)
    monkeypatch.setattr(lost_hosts.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(lost_hosts.ray, "available_resources", lambda: {"CPU": sum(free.values())})
    monkeypatch.setattr(lost_hosts, "read_hosts", read_hosts)
    monkeypatch.setattr(lost_hosts, "_answers", lambda node: True)
    monkeypatch.setattr(lost_hosts, "LOOK_S", 0.0)
    return free


def test_actors_move_together_or_not_at_all(alive: dict[str, float]) -> None:
    assert [host.name for host in used_hosts(PLACEMENT)] == ["a", "b"]
    assert gone(used_hosts(PLACEMENT)) == [HOSTS[1]]
    assert moved(Reservation(PLACEMENT), ["rollout 0", "rollout 1"], 1.0) is None, "there is one CPU"
    alive[D] = 2.0
    assert moved(Reservation(PLACEMENT), ["rollout 0", "rollout 1"], 1.0, lambda node: node != D) is None, "D differs"
    reservation = moved(Reservation(PLACEMENT), ["rollout 0", "rollout 1"], 1.0)
    assert reservation is not None
    places = [host_of(reservation.placement, f"rollout {number}") for number in range(2)]
    assert [host and host.node for host in places] == [D, C]
    assert host_of(reservation.placement, "train worker 0") == HOSTS[0]
    assert reservation.options(reservation.placement.engines[0])["scheduling_strategy"].node_id == D


def test_the_gpus_of_a_lost_host_are_given_back(alive: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the engine would hold them beside its new ones when the host comes back."""
    removed: list[str] = []
    monkeypatch.setattr(lost_hosts, "remove_placement_group", removed.append)
    monkeypatch.setattr(lost_hosts, "reserve_apart", lambda hosts, seats, deadline: dict.fromkeys(seats, "new"))
    groups: Any = {"rollout 0": "old", "rollout 1": "other"}
    reservation = moved(Reservation(PLACEMENT, None, {}, groups), ["rollout 0"], 1.0)
    assert reservation is not None and reservation.groups == {"rollout 0": "new", "rollout 1": "other"}
    assert removed == ["old"]


def test_units_are_started_without_waiting_for_hosts_that_have_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gone` waits for a host that does not answer, also one that the run does not use."""
    asked: list[str] = []
    started: list[str] = []

    def gone_of(hosts: Sequence[Host]) -> list[Host]:
        asked.extend(host.name for host in hosts)
        return [host for host in hosts if host.name == "b"]

    monkeypatch.setattr(run_actors, "gone", gone_of)
    actors = RunActors(EnginePool([], embedded=True), [], [], 0, (), 1.0, PLACEMENT, ensure_unit=started.append)
    actors.ensure_units()
    assert asked == ["a", "b"] and started == [A]


def test_the_hosts_of_the_run_come_first(alive: dict[str, float]) -> None:
    alive |= {A: 1.0, C: 5.0}
    reservation = moved(Reservation(PLACEMENT), ["rollout 0"], 1.0)
    assert reservation is not None and host_of(reservation.placement, "rollout 0") == HOSTS[0]


def test_ray_chooses_the_host_in_a_cluster_of_one_node() -> None:
    one = replace(PLACEMENT, hosts=HOSTS[:1], engines=(Seat("rollout 0", 1, 0),))
    assert host_of(one, "rollout 0") is None


def test_a_node_that_does_not_answer_is_waited_for(alive: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts it as alive until it has missed some health checks."""
    alive[B] = 1.0
    looks = []

    def answers(node: dict[str, Any]) -> bool:
        looks.append(node["NodeID"])
        if len(looks) == 3:
            del alive[B]
        return False

    monkeypatch.setattr(lost_hosts, "_answers", answers)
    assert gone([HOSTS[1]]) == [HOSTS[1]] and looks == [B] * 3


def test_a_raylet_that_listens_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert lost_hosts._answers(node)
    assert not lost_hosts._answers(node)


def test_a_restart_waits_for_room_and_then_blames_the_host(alive: dict[str, float]) -> None:
    told: list[str] = []

    def attempt() -> str:
        if len(tries) == 3:
            return "placed"
        tries.append(1)
        raise UserError("that Ray cluster cannot hold it")

    tries: list[int] = []
    assert Patience(HOSTS[:2], 60.0, told.append).wait(attempt, 3) == "placed"
    assert told == ["waiting for 2 logical CPU(s): host b is gone"], "told once"
    tries.clear()
    with pytest.raises(NoRoom, match="waiting for 2 logical CPU.*host b is gone in vain for 0 s; --resume goes on"):
        Patience(HOSTS[:2], 0.0, told.append).wait(attempt, 3)
    assert not issubclass(NoRoom, ValueError), "it is no mistake of the user, so the exit code is 1"
