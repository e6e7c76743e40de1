"""`tools/measure/pool.py`: figures from traces and metrics, complaints, and the command on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.gpu.nvml import GpuSamples
from headrace.bench.gpu.work_report import WorkReport
from headrace.tests.bench.gpu.runs import record, write_run
from headrace.tools.measure import pool
from headrace.tools.measure.pool import POOL_WORKS, PoolOptions, link_bytes_per_s, main
from headrace.tools.measure.pool_figures import (
    TenantFigures,
    against_link,
    double_grants,
    read_tenant,
    shared_window,
    stage_seconds,
    switch_figures,
    tenant_figures,
)
from headrace.tools.measure.pool_tenants import TenantTask, tail
from headrace.trainers.config.load import load_config


def event(t: float, gpu: int, who: str, role: str, kind: str, seconds: float | None = None) -> tuple[float, Any]:
    one: dict[str, Any] = {"t": t, "gpu": gpu, "tenant": who, "role": role, "event": kind}
    return t, one if seconds is None else {**one, "seconds": seconds}


def tenant(name: str, folder: Path, ends: list[float], **changes: list[float]) -> TenantFigures:
    """A tenant whose steps ended so many seconds after the start of its metrics, with these metrics of each step."""
    lines = [
        record(step, end, 1.0, **{key.replace("__", "/"): values[step - 1] for key, values in changes.items()})
        for step, end in enumerate(ends, 1)
    ]
    write_run(folder / name, lines)
    return read_tenant(name, folder / name)


def test_stages_are_those_of_switches_of_one_gpu_without_the_drain() -> None:
    shrink = [("drain", 5.0), ("sleep", 0.1), ("memory", 0.02)]
    events = [event(number, 0, "a", "rollout", name, seconds) for number, (name, seconds) in enumerate(shrink, 1)]
    events += [event(4, 0, "a", "rollout", "sync", 0.3), event(5, 0, "a", "rollout", "wake", 0.2)]
    events += [event(6, gpu, "a", "rollout", name, 9.0) for name in ("sync", "wake") for gpu in (0, 1)]
    events += [event(7, 1, "a", "train", "onload", 0.4), event(8, 1, "b", "train", "onload", 8.0)]
    events += [event(9, 0, "a", "rollout", "sleep", 0.5), event(10, 0, "a", "rollout", "memory", 0.1)]
    events += [event(11, 0, "a", "rollout", "grant", 70.0), event(12, 1, "a", "train", "sync", 70.0)]
    seconds = stage_seconds(events, ["a"])
    assert seconds["shrink"] == pytest.approx([0.12, 0.6]) and seconds["expand"] == [0.5]
    assert seconds["onload"] == [0.4] and seconds["sync"] == [0.3] and "grant" not in seconds
    figures = switch_figures(seconds)
    assert figures["shrink_s"] == pytest.approx(0.36) and figures["shrink_max_s"] == pytest.approx(0.6)
    assert figures["shrinks"] == 2 and figures["drain_s"] == 5.0 and figures["expands"] == 1


def test_both_are_measured_while_both_are_at_work() -> None:
    early = TenantFigures("a", ({},) * 6, (1.0, 2.0, 6.0, 8.0, 10.0, 12.0), ())
    late = TenantFigures("b", ({},) * 3, (7.0, 9.0, 10.5), ())
    since, until = shared_window([early, late])
    assert (since, until) == (7.0, 10.5)
    assert early.step_s(since, until) == pytest.approx(2.0)
    assert late.step_s(since, until) == pytest.approx(1.75)
    assert early.step_s(since, since + 1.5) is None, "one step ended then"
    assert shared_window([early, TenantFigures("b", (), (), ())]) == (0.0, 0.0)
    found = pool._Measured(TenantFigures("alone", ({},) * 3, (1.0, 2.6, 4.2), ()), [early, late], GpuSamples([]), None)
    walls = pool._walls(found, since, until)
    assert walls["alone.step_s"] == pytest.approx(1.6) and walls["wall_vs_alone"] == pytest.approx(1.25)


def test_growth_losses_and_what_was_moved_are_told(tmp_path: Path) -> None:
    held = [0.9, 1.0, 0.9, 1.2]
    one = tenant(
        "a", tmp_path, [1.0, 2.0, 3.0, 4.0], pool__engine_gib_asleep=held, pool__lost_tokens=[0, 0, 0, 3],
        pool__offload_gib=[2.0] * 4, pool__offload_copy_s=[0.1, 0.2, 0.2, 0.3], pool__offload_memory_s=[0.1] * 4,
        rollout__actors_replaced=[0, 0, 1, 1],
    )  # fmt: skip
    figures = tenant_figures([one], one.ends[0], one.ends[-1])
    assert figures["engine_gib_asleep"] == 1.2 and figures["engine_gib_asleep_growth"] == pytest.approx(0.2)
    assert figures["lost_tokens"] == 3 and figures["offload_copy_s"] == pytest.approx(0.2)
    link = against_link({**figures, "expand_s": 0.5}, 10**9, 40e9, 50e9)
    assert link["offload_vs_link"] == pytest.approx(0.3 / (2 * 2**30 / 40e9)) and "onload_vs_link" not in link
    assert link["expand_over_link_s"] == pytest.approx(0.48)
    wrong = " ".join(pool._losses(one))
    assert "pool/lost_tokens is 3" in wrong and "actors_replaced is 1" in wrong
    assert all(rate > 0 for rate in link_bytes_per_s(torch.device("cpu"), num_bytes=1 << 16, repeats=2))
    assert "engine_gib_asleep grew by 0.200 GiB" in " ".join(pool._growth(figures))
    assert pool._losses(TenantFigures("b", (), (), ())) == ["b: no step was finished"]


def test_a_gpu_that_two_hold_is_complained_of() -> None:
    events = [event(1, 0, "a", "train", "grant"), event(2, 0, "b", "rollout", "grant")]
    assert double_grants(events) == ["GPU 0 was granted to b (rollout) while a (train) held it"]
    assert not double_grants([events[0], event(1.5, 0, "a", "train", "release"), events[1]])


@pytest.mark.parametrize("work", POOL_WORKS)
def test_what_a_tenant_runs_is_a_configuration(tmp_path: Path, work: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "some words"}\n')
    one = TenantTask("b", POOL_WORKS[work], 1, "fsdp", tmp_path, tmp_path / "run", 3, 8, True, ("trainer.lr=0.5",))
    config = load_config(one.arguments("host:1")[1], one.arguments("host:1")[2:])
    assert config.pool.address == "host:1" and config.trainer.lr == 0.5
    assert config.engine_gpus == ((0,), (1,)) and config.resources.trainer_gpus == (1,) and config.run.name == "b"


def test_mistakes_and_failures_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--work", "pool-0.6b", "--out", str(tmp_path / "out")]) == 2
    assert "--work: got 'pool-0.6b' with 0 GPU(s), expected 2" in capsys.readouterr().err
    output = tmp_path / "a.txt"
    output.write_text("".join(f"line {number}\n" for number in range(40)))
    assert tail(output).splitlines()[0] == str(output) and tail(output).splitlines()[-1] == "    line 39"
    assert len(tail(output).splitlines()) == 16 and tail(tmp_path / "none").strip() == str(tmp_path / "none")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tiny_work_runs_on_a_cpu(tmp_path: Path) -> None:
    report, before = WorkReport("pool-tiny", tmp_path / "out"), dict(os.environ)
    pool.run_pool(PoolOptions(report.out, "pool-tiny"), report)
    assert not report.complaints
    assert os.environ == before, "later Ray clusters of this process would want the pool's token"
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    for figure in ("alone.step_s", "a.step_s", "b.step_s", "wall_vs_alone", "shrink_s", "expand_s", "lost_tokens"):
        assert f"gpu.pool-tiny.{figure}" in written, figure
    assert "GPU 0" in (tmp_path / "out" / "pool.trace.json").read_text() and not (tmp_path / "out" / "model").exists()
