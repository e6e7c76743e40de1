"""A run under observation: its endpoint answers while it trains and ends with it; every process' calls are counted."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.tests import cli_runs as runs

NUM_STEPS = 60
STANDING = ("rows", "bytes_used", "bytes_reserved", "leased_rows", "oldest_lease_s", "waiting_claims", "waiting_puts")


def scrape(address: str) -> dict[str, float]:
    """Sample, with the operation if it has one -> value."""
    with urllib.request.urlopen(address, timeout=15) as reply:
        text = reply.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {" ".join([sample.name, *[value for name, value in sample.labels.items() if name == "op"]]): sample.value
            for sample in samples if "le" not in sample.labels}  # fmt: skip


@pytest.mark.timeout(280)
def test_a_run_is_observed_while_it_lasts(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = runs.start(run_dir, "logging.prometheus_port=0", f"algorithm.steps={NUM_STEPS}")
    try:
        runs.wait_for_step(run_dir, 2, process, timeout_s=150)
        address = (run_dir / "prometheus.txt").read_text().strip()
        found = scrape(address)
        output, _ = process.communicate(timeout=100)
    except (subprocess.TimeoutExpired, OSError):
        process.kill()
        print(process.communicate()[0])
        raise
    assert process.returncode == 0 and f"metrics for Prometheus: {address}" in output, output
    with pytest.raises(urllib.error.URLError):
        scrape(address)
    assert not (run_dir / "prometheus.txt").exists()
    steps = {line["step"]: line for line in runs.metrics(run_dir) if "time/step_s" in line}
    check_steps(steps)
    check_scrape(found, steps)


def check_steps(steps: dict[int, dict]) -> None:
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    for line in steps.values():
        for op in ("put", "get", "claim", "release", "clear"):
            assert line[f"dataplane/{op}/calls"] >= 1
            p50, p90, p99 = (line[f"dataplane/{op}/{name}_ms"] for name in ("p50", "p90", "p99"))
            assert 0 < p50 <= p90 <= p99
        # Rollout actors put, train workers get: both are other processes than the one that writes this.
        assert line["dataplane/put/bytes"] == line["dataplane/bytes_put"] > 0
        assert line["dataplane/get/bytes"] == line["dataplane/bytes_got"] > 0
        assert {"dataplane/get/fixed_us", "dataplane/put/gb_per_s"} <= set(line)
        assert {f"dataplane/{name}" for name in STANDING} <= set(line)
        assert line["dataplane/rows"] == line["dataplane/leased_rows"] == 0, "a step in lock-step leaves nothing"
        assert 0 <= line["idle/rollout"] <= 1 and 0 <= line["idle/train"] <= 1
        assert 0 < line["driver/bytes_per_row"] < 100


def check_scrape(found: dict[str, float], steps: dict[int, dict]) -> None:
    step = int(found["headrace_step"])
    assert found["headrace_reward_mean"] == steps[step]["reward/mean"]
    assert found["headrace_dataplane_up"] == 1 and found["headrace_dataplane_capacity_bytes"] > 0
    for op, name, key in (
        ("put", "headrace_dataplane_call_seconds_count put", "calls"),
        ("get", "headrace_dataplane_call_seconds_count get", "calls"),
        ("put", "headrace_dataplane_bytes_total put", "bytes"),
        ("get", "headrace_dataplane_bytes_total get", "bytes"),
    ):
        # A step's calls are added just before its figures are published.
        up_to = [sum(steps[at][f"dataplane/{op}/{key}"] for at in range(1, last + 1)) for last in (step, step + 1)]
        assert found[name] in up_to
