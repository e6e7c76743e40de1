"""What a dry run and the doctor say about GPUs, and which weight transports a placement allows."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.process.own_process import show_gpus, shown_gpus
from headrace.actors.weight_sync.config import SyncConfig
from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.cluster.places.placement import Host, Placement, Seat
from headrace.trainers.cluster.places.placement_plan import PlacementRequest, plan_placement
from headrace.trainers.cluster.transport_choice import WeightRoute
from headrace.trainers.config.config import Config
from headrace.trainers.errors import UserError
from headrace.trainers.run.checks import doctor
from headrace.trainers.run.checks.dry_run import count_gpus, describe, gpu_lines, plan_here
from headrace.trainers.run.checks.preflight import check_start


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as files in /dev show it."""
    glob = Path.glob

    def found(self: Path, pattern: str) -> Any:
        return iter([self / "nvidia0", self / "nvidia1"]) if self == Path("/dev") else glob(self, pattern)

    monkeypatch.setattr(Path, "glob", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def pair(engines: int = 2, **more: Any) -> Config:
    lengths = {"data": {"max_prompt_tokens": 16}}
    rollout = {"num_engines": engines, "max_new_tokens": 10}
    return Config.model_validate({"rollout": rollout, "trainer": {"dp": engines}, **lengths, **more})


def test_a_dry_run_shows_who_stands_where(two_gpus: None) -> None:
    text = describe(pair())
    assert "GPUs\n  GPUs: colocated, because 2 train worker(s) beside 2 engine process(es) do not fit on 2 free" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  GPU ")]
    assert [row[:2] + row[3:] for row in rows] == [
        ["GPU", "0", "train", "worker", "0,", "rollout", "0"],
        ["GPU", "1", "train", "worker", "1,", "rollout", "1"],
    ]
    assert "not used" not in text
    joined = pair(resources={"ray_address": "10.0.0.1:6379"})
    assert "those of the Ray cluster at 10.0.0.1:6379, which the run sees when it joins" in describe(joined)


def test_lines_take_further_text() -> None:
    placement = plan_placement(PlacementRequest.of(Config()), [Host("a", 4, (1, 3), 8)])
    first, *rows = gpu_lines(placement, {3: "engine 4.0 GiB"})
    assert "because the 2 free GPU(s) hold 1 train worker(s) beside 1 engine process(es)" in first
    assert [" ".join(row.split()) for row in rows] == [
        "GPU 1 a train worker 0", "GPU 3 a rollout 0 engine 4.0 GiB", "not used 2 GPU(s)",
    ]  # fmt: skip


def test_what_the_machine_cannot_hold_is_refused_before_the_start(two_gpus: None, tmp_path: Path) -> None:
    refused = pair(3, run={"dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match=r"resources.layout: got 'auto' .* trainer.dp=2 with rollout.num_engines=2"):
        check_start(refused)
    joined = pair(3, resources={"ray_address": "auto"})
    assert plan_here(PlacementRequest.of(joined), joined.resources, joined.sync) is None
    collective = pair(run={"dir": str(tmp_path / "run")}, sync={"transport": "collective"})
    with pytest.raises(UserError, match="sync.transport: got 'collective' with GPU 0 shared by an engine and a train"):
        check_start(collective)


def test_the_environment_limits_the_gpus(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for shown, count in (("1", 1), ("", 0), ("NoDevFiles", 0), ("0,1,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert count_gpus() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert count_gpus() == 2


def test_the_doctor_names_the_layout(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    [finding] = doctor._layout()
    assert finding.detail.startswith("separate with 1 engine and 1 train worker: GPU 0 ")
    assert "train worker 0; GPU 1 " in finding.detail
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor._layout() == []


@pytest.mark.parametrize(
    ("gpus", "layout", "given", "kind"),
    [
        ((2,), "auto", "auto", "ipc"),
        ((2,), "auto", "collective", "collective"),
        ((2,), "colocated", "auto", "ipc"),
        ((1, 1), "auto", "auto", "collective"),
        ((0, 2), "auto", "auto", "ipc"),
        ((0, 0), "auto", "auto", "ipc"),  # The run fits on one of the hosts.
        ((0, 0), "auto", "ipc", "ipc"),
        ((1, 1), "auto", "ipc", "expected 'auto', because ipc shares the memory of one host"),
        ((2,), "colocated", "collective", "because NCCL does not allow two processes of one group on a GPU"),
        ((2,), "colocated", "pairs", "pairs"),
        ((1, 1), "auto", "pairs", "pairs"),
    ],
)
def test_the_transport_fits_the_placement(gpus: tuple[int, ...], layout: str, given: str, kind: str) -> None:
    config = Config.model_validate({"resources": {"layout": layout}, "sync": {"transport": given}})
    placement = plan_placement(
        PlacementRequest.of(config), [Host(str(index), n, tuple(range(n)), 8) for index, n in enumerate(gpus)]
    )
    if " " in kind:
        with pytest.raises(UserError, match=f"^sync.transport: got '{given}' .*{kind}"):
            WeightRoute.of(config.sync, placement, pooled=False)
    else:
        assert WeightRoute.of(config.sync, placement, pooled=False).kind == kind


def test_pairs_are_refused_on_a_pool() -> None:
    placement = plan_placement(PlacementRequest.of(Config()), [Host("a", 2, (0, 1), 8)])
    with pytest.raises(UserError, match=r"^sync.transport: got 'pairs' with pool.address, expected 'auto'"):
        WeightRoute.of(SyncConfig(transport="pairs"), placement, pooled=True)
    with pytest.raises(UserError, match="sync.delta: got true with sync.transport='pairs' on GPUs, expected false"):
        WeightRoute.of(SyncConfig(transport="pairs", delta=True), placement, pooled=False)


def test_pairs_need_a_train_worker_on_each_host_with_an_engine_if_they_share_gpus() -> None:
    hosts = tuple(Host(name, 1, (0,), 8) for name in "ab")
    engines = tuple(Seat(f"engine {host}", 1, host, (0,)) for host in range(2))
    placement = Placement("colocated", "as asked", hosts, engines, (Seat("train worker 0", 1, 0, (0,)),))
    with pytest.raises(UserError, match="^sync.transport: got 'pairs' .* an engine on a host without a train worker"):
        WeightRoute.of(SyncConfig(transport="pairs"), placement, pooled=False)
    near = replace(placement, engines=placement.engines[:1])
    assert WeightRoute.of(SyncConfig(transport="pairs"), near, pooled=False).kind == "pairs"


def test_shared_gpus_on_two_hosts_go_through_the_store() -> None:
    placement = plan_placement(PlacementRequest.of(pair()), [Host("a", 1, (0,), 8), Host("b", 1, (0,), 8)])
    assert placement.shared and not placement.one_host
    route = WeightRoute.of(SyncConfig(), placement, pooled=False)
    assert route.kind == "store" and route.lasting
    together = plan_placement(PlacementRequest.of(pair()), [Host("a", 2, (0, 1), 8)])
    assert not WeightRoute.of(SyncConfig(), together, pooled=False).lasting, (
        "the next version overwrites the memory of a GPU"
    )


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        ({"trainer_gpus": [0]}, "resources.rollout_gpus: not set, expected GPU numbers, because the other map"),
        ({"rollout_gpus": [0]}, "resources.trainer_gpus: not set, expected GPU numbers, because the other map"),
        ({"trainer_gpus": [0], "rollout_gpus": [1, 2]}, "resources.rollout_gpus: got 2 GPU(s), expected 1, rollout.tp"),
        ({"trainer_gpus": [], "rollout_gpus": [1]}, "resources.trainer_gpus: got 0 GPU(s), expected 1, one for each"),
        ({"trainer_gpus": [0], "rollout_gpus": [-1]}, "resources.rollout_gpus.0: got -1, expected a number >= 0"),
        ({"trainer_gpus": [0], "rollout_gpus": [1], "layout": "separate"}, "resources.layout: got 'separate' with re"),
    ],
)  # fmt: skip
def test_a_map_must_fit_the_mesh(resources: dict[str, Any], sentence: str) -> None:
    assert only_problem({"resources": resources}).startswith(sentence)


def test_a_map_names_no_gpu_twice() -> None:
    data = {"trainer": {"dp": 2}, "resources": {"trainer_gpus": [1, 1], "rollout_gpus": [1]}}
    assert only_problem(data).startswith("resources.trainer_gpus: got [1, 1], expected each GPU once, because two proc")


def test_a_process_sees_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    show_gpus(None)
    assert shown_gpus() == ("5",)
    show_gpus(("3", "GPU-1f"))
    assert (shown_gpus(), os.environ["CUDA_VISIBLE_DEVICES"]) == (("3", "GPU-1f"), "3,GPU-1f")
    show_gpus(())
    assert (shown_gpus(), os.environ["CUDA_VISIBLE_DEVICES"]) == ((), "")
