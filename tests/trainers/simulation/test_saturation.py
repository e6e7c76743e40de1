"""Tests the closed formulas for parts of the data plane against the simulation and cases worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.actors.weight_sync.plan.regions import Party, held
from headrace.actors.weight_sync.plan.transfer_plan import plan_transfer
from headrace.trainers.config.load import build_config
from headrace.trainers.simulation.cluster import Cluster
from headrace.trainers.simulation.config import SimulationConfig
from headrace.trainers.simulation.modes import SimulateOptions, run_simulation
from headrace.trainers.simulation.saturation import part_seconds, saturation_table
from headrace.trainers.simulation.scenario import DIRECTORY_S, MODES, Mode, build_scenario, measure_run
from headrace.trainers.simulation.simulate import simulate

CONFIG = build_config({"algorithm": {"steps": 12, "prompts_per_step": 16, "group_size": 4}, "run": {"seed": 3}})
SECTION = SimulationConfig(response_tokens=50, train_token_s=1e-4, sync_s=0.5, gpus=8, batch_grows=True)
HOSTS = Cluster(
    gpus=32, host_gpus=8, engine_gpus=8, train_share=0.5, links=8, link_bytes_s=50e9, unit_gib_per_s=2.0, far_share=1.0,
    weights_bytes=1e12, weights_bytes_s=1e12, weights_senders="all", weights_copies=1.0,
)  # fmt: skip
"""Four hosts, two with train workers and two with engines of 8 GPUs."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", [1, 2])
def test_directorys_work_is_what_the_formula_says(mode: Mode, shards: int) -> None:
    section = SECTION.model_copy(update={"directory_shards": shards, "num_engines": 8, "directory_claim_s": 1e-4})
    case = build_scenario(CONFIG, section, {})
    run = simulate(case, mode)
    expected = part_seconds(case, mode)["directory"] * shards * case.steps
    # Rows of later steps are put, too, groups can be put together, and chunks can have more groups than asked for.
    found = sum(step.directory_busy_s for step in run.steps)
    assert 0.8 * expected < found <= expected * (run.started / run.trained) * 1.001


@pytest.mark.parametrize("mode", ["async", "async_streaming"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_saturated_directory_makes_the_step_as_long_as_its_work(mode: Mode, shards: int) -> None:
    changes = {"directory_row_s": 0.25, "directory_shards": shards, "sync_s": 0.01, "async_staleness": 3}
    case = build_scenario(CONFIG, SECTION.model_copy(update=changes | {"num_engines": 16}), {})
    run = simulate(case, mode)
    seconds = (run.steps[-1].end_s - run.steps[3].end_s) / (len(run.steps) - 4)
    assert seconds == pytest.approx(part_seconds(case, mode)["directory"], rel=0.05)
    assert run.directory_wait_s > 1.0


def test_weights_take_the_time_of_the_busiest_link() -> None:
    assert HOSTS.weights_link_s() == pytest.approx(1e12 / 400e9)
    assert replace(HOSTS, engine_gpus=16).weights_link_s() == pytest.approx(0.5e12 / 400e9), "half a copy a host"
    more_receivers = replace(HOSTS, gpus=64, train_share=0.25)
    assert more_receivers.weights_link_s() == pytest.approx(3 * 1e12 / 400e9), "two senders, six receivers"
    assert replace(HOSTS, train_share=1.0).weights_link_s() == pytest.approx(0.75 * 1e12 / 400e9)
    one = replace(HOSTS, weights_senders="one", weights_copies=2.0)
    assert one.weights_link_s() == pytest.approx(2 * 1e12 / 50e9), "one link of rank 0's host"
    alone = replace(one, gpus=8)
    assert (alone.weights_link_s(), alone.weights_s()) == (0.0, 1.0)
    assert replace(alone, weights_senders="all").weights_s() == pytest.approx(1 / 8), "each GPU its part"


def test_all_senders_keep_to_the_formula_with_a_trillion_parameters() -> None:
    """The transfer plan sends experts from 256 train ranks to eight engines of 16 GPUs, one bucket at a time per link.

    The formula is the bound of the links.
    """
    shape, names = (384, 6144, 7168), [f"{layer}.experts" for layer in range(60)]

    def party(rank: int, kind: str, num: int) -> Party:
        return Party(
            f"{kind}{rank // 8}", tuple(r for name in names for r in held(name, shape, [(0, num, rank % num)]))
        )

    senders = [party(rank, "trainer", 128) for rank in range(256)]
    receivers = [party(rank, "engine", 16) for rank in range(128)]
    specs = dict.fromkeys(names, (torch.bfloat16, shape))
    buckets = plan_transfer(specs, senders, receivers, 1 << 30).buckets
    free = [0.0] * 384
    for sender, receiver, nbytes in zip(
        *(c.tolist() for c in (buckets.sender, buckets.receiver, buckets.nbytes)), strict=True
    ):
        free[sender] = free[256 + receiver] = max(free[sender], free[256 + receiver]) + nbytes / 50e9
    weights_bytes = 60 * 2.0 * 384 * 6144 * 7168
    hosts = replace(HOSTS, gpus=384, engine_gpus=16, train_share=2 / 3, weights_bytes=weights_bytes)
    assert weights_bytes > 2e12 and (hosts.train_hosts, hosts.rollout_hosts) == (32, 16)
    assert hosts.weights_link_s() == pytest.approx(2.54, abs=0.01)
    assert hosts.weights_link_s() * 0.999 < max(free) < 1.3 * hosts.weights_link_s()


def test_rows_cross_hosts_by_units_and_links() -> None:
    gib = float(1 << 30)
    assert HOSTS.unit_s(8 * gib) == pytest.approx(8 / 2 / 2.0), "two hosts hold the rows"
    assert HOSTS.rows_link_s(8 * gib) == pytest.approx(4 * gib / 50e9)
    assert HOSTS.most_gib_per_s() == pytest.approx(4.0)
    assert replace(HOSTS, link_bytes_s=0.5 * gib).most_gib_per_s() == pytest.approx(1.0)
    assert replace(HOSTS, far_share=0.25).unit_s(8 * gib) == pytest.approx(0.5)
    assert replace(HOSTS, gpus=8).most_gib_per_s() == float("inf"), "nothing crosses hosts"


def test_a_larger_cluster_syncs_over_links() -> None:
    section = SECTION.model_copy(update={"weights_gb": 425.0, "weights_gb_per_s": 425.0, "sync_s": 1.5, "pause_s": 0.5})
    base = build_scenario(CONFIG, section, {})
    large = base.scaled(section, 64)
    assert (base.sync_s, large.sync_s) == pytest.approx((1.5, 1.5 - 1.0 + 10.0)), "425 GB over 0.85 of 400 Gbit/s"
    assert large.pause_s == pytest.approx(large.sync_s / 3)
    assert large.controller_s == pytest.approx(base.controller_s + (8 - 1) * 16 * 4 * section.controller_row_s)
    assert large.scaled(section, 8) != large and base.scaled(section, 8) == base
    unset = section.model_copy(update={"sync_s": None, "pause_s": None})
    assert build_scenario(CONFIG, unset, {}).sync_s == 1.0
    pairs = CONFIG.model_copy(update={"sync": CONFIG.sync.model_copy(update={"transport": "pairs"})})
    assert [build_scenario(c, section, {}).cluster.weights_senders for c in (CONFIG, pairs)] == ["one", "all"]


def test_a_runs_cpu_time_gives_the_costs_of_the_directory(tmp_path: Path) -> None:
    record = {
        "time/train_s": 1.0, "time/step_s": 3.0, "time/rollout_s": 1.5, "rollout/response_length_mean": 22.0,
        "rollout/response_length_max": 40.0, "dataplane/put/calls": 4.0, "dataplane/bytes_put": 64 * 150 * 20.0,
        "dataplane/bytes_got": 64 * 150 * 30.0, "sync/bytes": 2e9,
    }  # fmt: skip
    once = 4 * DIRECTORY_S["directory_put_s"] + DIRECTORY_S["directory_claim_s"] + 64 * DIRECTORY_S["directory_row_s"]
    lines = [record | {"step": step, "dataplane/directory_cpu_s": 5 + 3 * once * step} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = measure_run(tmp_path, CONFIG, SECTION)
    assert {name: measured[name] / seconds for name, seconds in DIRECTORY_S.items()} == pytest.approx(
        dict.fromkeys(DIRECTORY_S, 3.0)
    )
    assert (measured["put_groups"], measured["weights_gb"]) == (4.0, 2.0)
    assert (measured["put_bytes"], measured["got_bytes"]) == pytest.approx((20.0, 30.0))
    case = build_scenario(CONFIG, SECTION, measured)
    assert 16 * case.directory_groups_s() + case.directory_claim_s == pytest.approx(3 * once)


def test_table_names_the_part_that_saturates_first(tmp_path: Path) -> None:
    section = SECTION.model_copy(update={"directory_row_s": 0.025, "steps": 4})
    summary = run_simulation(CONFIG, SimulateOptions(section, gpus=(32,)), tmp_path)
    assert summary["simulate.gpus32.async.directory_share"] > summary["simulate.async.directory_share"] > 0.2
    table = saturation_table(summary)
    assert list(table.columns[0].cells) == ["as configured", "gpus32"]
    assert list(table.columns[-1].cells)[1] == "directory"
