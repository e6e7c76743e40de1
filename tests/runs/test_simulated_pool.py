"""A real pool with scripted engines, against `headrace simulate` of the same pool."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.tests.runs.pool_runs import SCRIPTED, shared_pool
from headrace.tests.runs.test_time_sharing import expect_whole
from headrace.tools.measure.pool_figures import read_tenant, read_timed_events, shared_window, stage_seconds
from headrace.trainers.pool.server.gpu_trace import pool_trace
from headrace.trainers.pool.simulation.config import SwitchSection, pool_file
from headrace.trainers.pool.simulation.policies import simulate_pool
from headrace.trainers.pool.state.status import PoolEvent

pytestmark = pytest.mark.processes

STEPS = 20
WARMUP_S, SIMULATED_S = 100.0, 1000.0


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("group_s", "train_s"), [(2.0, 1.5), (3.0, 1.0), (1.0, 2.0)])
def test_the_simulation_agrees_with_the_pool(tmp_path: Path, group_s: float, train_s: float) -> None:
    """Steps of one run and of two together are within 10 % of the simulation of the same pool. They take as long and
    hold the GPUs as much; the simulation's switches take as long as the real ones did. Prints how much longer a step
    takes beside the other run than alone. It needs a machine that does nothing else."""
    work = (
        f"algorithm.steps={STEPS}", f"scripted.latency_s={group_s}", f"scripted.train_step_s={train_s}",
        "scripted.response_tokens=200", "rollout.max_new_tokens=48",  # 48 tokens each: a cut costs a part of one
    )  # fmt: skip
    with shared_pool(tmp_path) as pool, ThreadPoolExecutor() as threads:
        code, output = pool.run("alone", 0, *SCRIPTED, *work)
        assert code == 0, output
        both = [threads.submit(pool.run, name, gpu, *SCRIPTED, *work) for gpu, name in enumerate("ab")]
        for done in both:
            code, output = done.result()
            assert code == 0, output
        pool.wait_until_empty()
    pool.expect_kept_rules()
    for name in ("alone", "a", "b"):
        expect_whole(tmp_path / name, STEPS)
    events = read_timed_events(tmp_path)
    seconds = stage_seconds(events, ("alone", "a", "b"))
    section = {
        "rollout_gpus": 2, "train_gpus": 1, "groups": 8, "engine_groups": 64, "group_s": group_s, "group_sigma": 0,
        "train_s": train_s, "train_sigma": 0,
        "switch": {
            f"{stage}_s": statistics.median(found)
            for stage, found in seconds.items()
            if f"{stage}_s" in SwitchSection.model_fields
        },
    }  # fmt: skip
    [alone_s] = _expect_as_simulated(tmp_path, events, ["alone"], section)
    for name, step_s in zip("ab", _expect_as_simulated(tmp_path, events, ["a", "b"], section), strict=True):
        print(f"{name}: a step takes {step_s / alone_s:.2f} times that of a run alone")


def _expect_as_simulated(
    folder: Path, events: Sequence[tuple[float, PoolEvent]], names: Sequence[str], section: Mapping[str, object]
) -> list[float]:
    """Expect runs that were on the pool together to be as in its simulation. Returns the real seconds per step of
    each."""
    tenants = [read_tenant(name, folder / name) for name in names]
    since, until = shared_window(tenants)
    simulated = simulate_pool(
        pool_file(
            {
                "pool": {"gpus": 2, "seconds": SIMULATED_S, "warmup_s": WARMUP_S},
                "tenants": {name: {**section, "first_gpu": gpu} for gpu, name in enumerate(names)},
            }
        ),
        "gap_ratio",
    )
    trace = pool_trace(PoolEvent(**{**event, "t": at}) for at, event in events)
    found = []
    for tenant, expected in zip(tenants, simulated.tenants, strict=True):
        step_s = tenant.step_s(since, until)
        assert step_s is not None
        held_s = sum(
            max(0.0, min(segment.end_s, until) - max(segment.begin_s, since))
            for lane in trace.lanes
            for segment in lane.segments
            if segment.tenant == tenant.name
        )
        held, expected_held = held_s / (until - since), expected.held_gpu_s / (SIMULATED_S - WARMUP_S)
        expected_s = (SIMULATED_S - WARMUP_S) / expected.steps
        print(
            f"{tenant.name}: a step takes {step_s:.2f} s, {expected_s:.2f} s in the simulation; it holds {held:.2f} "
            f"GPUs in the mean, {expected_held:.2f} in the simulation"
        )
        assert step_s == pytest.approx(expected_s, rel=0.1)
        assert held == pytest.approx(expected_held, rel=0.1)
        found.append(step_s)
    return found
