"""Tests the simulation of a pool: times worked out by hand, figures against events, policies, mistakes."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import headrace
from headrace import cli
from headrace.tests.trainers.pool.state.pool_states import tenant_map
from headrace.trainers.config.load import read_sections
from headrace.trainers.errors import ConfigError
from headrace.trainers.grpo.pool_demand import Demand
from headrace.trainers.pool.server.gpu_trace import pool_trace
from headrace.trainers.pool.simulation.config import PhaseSeconds, Policy, PoolFile, partition, place_tenants, pool_file
from headrace.trainers.pool.simulation.policies import (
    FirstComePool,
    jain_index,
    pool_figures,
    pool_table,
    simulate_pool,
)
from headrace.trainers.pool.simulation.simulated_tenants import PoolSimulation
from headrace.trainers.pool.state.commands import Ask, Command, Outcome, Register, Report, StepFinished
from headrace.trainers.pool.state.plan import Plan, PoolState, Priority
from headrace.trainers.pool.state.pool import Pool, PoolBounds

EXAMPLES = Path(headrace.__file__).resolve().parent / "examples" / "time-sharing"
POLICIES: tuple[Policy, ...] = ("gap_ratio", "first_come", "fixed")
AT_ONCE = {f"{name}_s": 0 for name in ("drain", "sleep", "memory", "wake", "sync", "onload", "offload")}
"""A switch that takes no time."""


def tenant(**changes: Any) -> dict[str, Any]:
    """Return a tenant on two GPUs of which it trains on one; all groups and all steps take equally long."""
    plain = {"rollout_gpus": 2, "train_gpus": 1, "groups": 2, "engine_groups": 1, "group_s": 10, "train_s": 5}
    return {**plain, "group_sigma": 0, "train_sigma": 0, "switch": AT_ONCE, **changes}


def three_tenants(seed: int = 0) -> PoolFile:
    """Return a pool of 16 GPUs that three tenants with engines of 1, 2 and 4 GPUs contend for."""
    common = {"groups": 24, "engine_groups": 4, "group_s": 8, "train_s": 10, "steps": 6}
    tenants = {
        "one": {**common, "rollout_gpus": 8, "train_gpus": 3, "weight": 2},
        "two": {**common, "rollout_gpus": 12, "train_gpus": 4, "tp": 2, "max_staleness": 2},
        "four": {**common, "rollout_gpus": 16, "train_gpus": 8, "tp": 4, "arrives_s": 20},
    }
    return pool_file({"pool": {"gpus": 16, "seed": seed}, "tenants": tenants})


@pytest.mark.parametrize(
    ("changes", "end_s", "wait_s"),
    [
        ({"max_staleness": 0}, 45, 0.0),  # 10 s of generation on both GPUs, then 5 s of training, three times
        # While GPU 0 trains, the next step's second group waits for it: GPU 1 generates one of them meanwhile.
        ({"max_staleness": 1}, 45, 0.0),
        # Training waits 1 s for the engine's sleep; when all is done, the last engine falls asleep for 1 s.
        ({"max_staleness": 0, "switch": {**AT_ONCE, "sleep_s": 1}}, 49, 1.0),
        ({"max_staleness": 0, "switch": {**AT_ONCE, "onload_s": 2, "offload_s": 1}}, 54, 0.0),
    ],
)
def test_a_tenant_alone_takes_the_time_that_its_phases_add_up_to(
    changes: dict[str, Any], end_s: float, wait_s: float
) -> None:
    file = pool_file({"pool": {"gpus": 2}, "tenants": {"a": tenant(steps=3, **changes)}})
    pool = simulate_pool(file, "gap_ratio")
    [figures] = pool.tenants
    assert pool.end_s == pytest.approx(end_s)
    assert figures.train_waits_s == pytest.approx([wait_s] * 3)
    assert (figures.steps, figures.train_gpu_s, figures.rollout_gpu_s) == pytest.approx((3, 15, 60))
    assert pool_figures(pool)["utilisation"] == pytest.approx(75 / (2 * end_s))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_gpu_has_two_holders_and_figures_are_those_of_the_events(policy: Policy) -> None:
    pool = simulate_pool(three_tenants(), policy, keep_events=True)
    assert pool.num_rejected == 0
    trace = pool_trace(pool.events)
    open_holds: dict[int, tuple[str | None, str | None]] = {}
    for event in pool.events:
        if event["event"] == "grant":
            assert event["gpu"] not in open_holds
            open_holds[event["gpu"]] = (event["tenant"], event["role"])
        elif event["event"] == "release":
            assert open_holds.pop(event["gpu"]) == (event["tenant"], event["role"])
        else:
            assert open_holds[event["gpu"]] == (event["tenant"], event["role"])
    assert not open_holds  # all tenants have left
    for figures in pool.tenants:
        assert figures.steps == 6
        assert figures.held_gpu_s == pytest.approx(sum(lane.held_s(figures.name) for lane in trace.lanes))
        switching = sum(s.seconds for lane in trace.lanes for s in lane.switches if s.tenant == figures.name)
        assert figures.busy_gpu_s <= figures.held_gpu_s - switching + 1e-6
        waits = trace.waits_s[figures.name, "train"]
        assert sorted(waits) == pytest.approx(sorted(figures.train_waits_s))


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_figures(policy: Policy) -> None:
    first, again, other = (pool_figures(simulate_pool(three_tenants(seed), policy)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_first_seconds_can_be_left_out() -> None:
    def figures(**pool: float) -> tuple[int, float]:
        data = {"pool": {"gpus": 2, "seconds": 307, **pool}, "tenants": {"a": tenant(max_staleness=0)}}
        [found] = simulate_pool(pool_file(data), "gap_ratio").tenants
        return found.steps, found.busy_gpu_s

    assert figures() == pytest.approx((20, 20 * 25 + 14))  # a step of 15 s has 25 GPU seconds; 7 s are left
    assert figures(warmup_s=157) == pytest.approx((10, 10 * 25))


def test_the_gap_rule_beats_the_others_on_the_example() -> None:
    file = pool_file(read_sections(EXAMPLES / "simulate.yaml"))
    use = {policy: pool_figures(simulate_pool(file, policy))["utilisation"] for policy in POLICIES}
    assert use["gap_ratio"] > 1.03 * use["fixed"]
    assert use["gap_ratio"] > 1.2 * use["first_come"]


def test_first_come_is_first_served_and_nobody_is_interrupted() -> None:
    pool = FirstComePool(2)
    for name in "abc":
        pool.apply(0.0, Register(tenant_map(name, range(2), 1, 1)))
        pool.apply(0.0, StepFinished(name))

    def tell(now_s: float, *commands: Command) -> dict[str, set[int]]:
        """Give the pool commands, obey all orders, and return the shards that are awake then."""
        for command in commands:
            pool.apply(now_s, command)
        while pool.orders:
            order = min(pool.orders.values(), key=lambda one: one.number)
            pool.apply(now_s, Outcome(order.tenant, order.number, order.shards, {}))
        return {name: set(found.awake) for name, found in pool.tenants.items()}

    nobody: set[int] = set()
    for second, name in enumerate("abc"):
        tell(second, Ask(name, "rollout", Priority.GENERATION, 8), Report(name, Demand(8, 0)))
    assert tell(3.0, Ask("c", "train", Priority.TRAINING)) == {"a": {0, 1}, "b": nobody, "c": nobody}
    assert not pool.has("c", "train")
    # The next step of `a` is behind all others.
    assert tell(4.0, Report("a", Demand(8, 8)), Report("a", Demand(8, 0))) == {"a": nobody, "b": {0, 1}, "c": nobody}
    # The rollouts of `c` were asked for before its training, for which only its own engine sleeps.
    assert tell(5.0, Report("b", Demand(8, 8))) == {"a": nobody, "b": nobody, "c": {1}}
    assert pool.has("c", "train")
    assert pool.num_rejected == 0


def test_a_fixed_partition_goes_by_weight_in_whole_engines() -> None:
    tenants = {
        "light": {**tenant(), "rollout_gpus": 12, "train_gpus": 8, "tp": 2},
        "heavy": {**tenant(), "rollout_gpus": 12, "train_gpus": 2, "weight": 2},
        "capped": {**tenant(), "rollout_gpus": 2, "train_gpus": 1, "weight": 5},
    }
    file = pool_file({"pool": {"gpus": 16, "seconds": 1}, "tenants": tenants})
    parts = partition(place_tenants(file), 16)
    assert [(len(one.map.rollout_gpus), len(one.map.train_gpus), one.first_gpu) for one in parts] == [
        (4, 4, 0),
        (10, 2, 4),
        (2, 1, 14),
    ]
    assert [one.train_scale for one in parts] == [2, 1, 1]
    with pytest.raises(ConfigError, match=r"pool.gpus: got 2, of which a fixed partition has 0 for light"):
        partition(place_tenants(file), 2)


def test_tenants_are_placed_on_their_gpus_and_around_the_end() -> None:
    tenants = {"a": tenant(rollout_gpus=4, train_gpus=2, tp=2, first_gpu=6), "b": tenant(count=2)}
    specs = place_tenants(pool_file({"pool": {"gpus": 8, "seconds": 1}, "tenants": tenants}))
    assert [one.name for one in specs] == ["a", "b-0", "b-1"]
    assert specs[0].map.shards == ((6, 7), (0, 1))
    assert specs[0].map.train_gpus == (6, 7)


def test_the_mean_of_a_phase_does_not_depend_on_sigma() -> None:
    for sigma in (0.0, 0.5, 1.0):
        seconds = PhaseSeconds(20, sigma, 3)
        assert sum(seconds.draw() for _ in range(20_000)) / 20_000 == pytest.approx(20, rel=0.05)


def test_jains_index_is_1_for_equal_shares_and_a_quarter_for_one_of_four() -> None:
    assert jain_index([3.0, 3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([3.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0, 0.0]) == 1.0


MISTAKES = {
    "tenants.a.rollout_gpus: got 3, expected a multiple of tenants.a.tp (2)": {"rollout_gpus": 3, "tp": 2},
    "tenants.a.tp: got 3, expected a number that divides pool.gpus (8)": {"rollout_gpus": 6, "tp": 3},
    "tenants.a.rollout_gpus: got 16, expected at most pool.gpus (8)": {"rollout_gpus": 16},
    "tenants.a.first_gpu: got 9, expected a number below pool.gpus (8)": {"first_gpu": 9},
    "tenants.a.train_gpus: got 2, expected at most 1, so that one engine stays awake while it trains": {
        "train_gpus": 2
    },
    "tenants.a.steps: not set, expected a number of steps, because pool.seconds is not set either": {"steps": None},
    "tenants.a.group_s: got 0, expected a number > 0": {"group_s": 0},
    "tenants.a.weigth: unknown key; did you mean tenants.a.weight?": {"weigth": 2},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_is_told_in_a_sentence(sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pool_file({"pool": {"gpus": 8}, "tenants": {"a": tenant(**{"steps": 2, **MISTAKES[sentence]})}})
    assert caught.value.problems == (sentence,)


def test_a_warm_up_longer_than_the_simulation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pool.seconds: got 5, expected more than pool.warmup_s \(5\)"):
        pool_file({"pool": {"gpus": 2, "seconds": 5, "warmup_s": 5}, "tenants": {"a": tenant()}})


def test_the_command_writes_figures_events_and_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example, out = str(EXAMPLES / "simulate.yaml"), tmp_path / "out"
    assert cli.main(["simulate", example, "pool.seconds=200", "tenants.math.weight=2", "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines()[:-1])) <= 80
    summary = json.loads((out / "summary.json").read_text())
    assert summary["conditions"]["file"]["pool"]["seconds"] == 200
    assert summary["pool.gap_ratio.utilisation_vs_fixed"] == pytest.approx(
        summary["pool.gap_ratio.utilisation"] / summary["pool.fixed.utilisation"]
    )
    for policy in POLICIES:
        assert f"{summary[f'pool.{policy}.utilisation']:.1%}" in table
        assert summary["tenants"][policy]["math"]["weight"] == 2
        events = [json.loads(line) for line in (out / f"pool_trace.{policy}.jsonl").read_text().splitlines()]
        assert {event["gpu"] for event in events} == {0, 1, 2, 3}
        lanes = re.findall(r"GPU \d", (out / f"pool.{policy}.trace.json").read_text())
        assert lanes == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]


def test_options_for_one_run_are_refused_with_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", str(EXAMPLES / "simulate.yaml"), "--gpus", "4"]) == 2
    assert "--from, --gpus: got one of them with" in capsys.readouterr().err


def test_the_table_of_the_largest_waits_fits_80_columns() -> None:
    figures = pool_figures(simulate_pool(three_tenants(), "gap_ratio"))
    waits = {"steps": 99_999.0, "switches": 999_999.0, "train_wait_p95_s": 1149.3, "train_wait_max_s": 2117.2}
    summary = {f"pool.{policy}.{key}": value for policy in POLICIES for key, value in {**figures, **waits}.items()}
    table = pool_table(summary)
    assert Console(width=200).measure(table).maximum <= 80
    assert table.row_count == 3


class TimedPool(Pool):
    """A pool that notes the CPU seconds of each plan."""

    __slots__ = ("took_s",)
    took_s: list[float]

    def plan(self, state: PoolState) -> Plan:
        begun_s = time.process_time()
        plan = Pool.plan(self, state)
        self.took_s.append(time.process_time() - begun_s)
        return plan


@pytest.mark.slow
def test_a_plan_for_64_tenants_on_4096_gpus_takes_less_than_50_ms() -> None:
    file = pool_file(read_sections(EXAMPLES / "simulate-large.yaml"))
    pool = TimedPool(file.pool.gpus, PoolBounds(lease_s=math.inf))
    pool.took_s = []
    figures = PoolSimulation(pool, place_tenants(file), seed=0).run(600)
    assert len(figures) == 64
    assert pool.num_rejected == 0
    looked = sorted(pool.took_s)
    assert len(looked) > 500
    assert looked[int(0.99 * len(looked))] < 0.05
