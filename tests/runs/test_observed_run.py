"""A run under observation: its endpoint, its counted calls, its timeline, and docs that name every figure. The endpoint
answers while the run trains and ends with it."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.tests.runs import cli_runs as runs
from headrace.tests.trainers.observe.trace_events import complete, crossing, names
from headrace.trainers.observe.samples import mismatch, read_samples

pytestmark = pytest.mark.processes

NUM_STEPS = 30
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
    process = runs.start(run_dir, runs.shared_ray(), "logging.prometheus_port=0", f"algorithm.steps={NUM_STEPS}")
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
    check_documented(run_dir)
    check_samples(run_dir)


def check_samples(run_dir: Path) -> None:
    """Of every tenth step, by prompts of the stream, the rows of two groups; of each validation two prompts."""
    rows = read_samples(run_dir / "samples.jsonl")
    trained = [row for row in rows if row["set"] == "train"]
    assert sorted({row["step"] for row in trained}) == [1, 11, 21] and len(trained) == 3 * 2 * 8
    for row in trained:
        distance = mismatch(row)
        assert distance is not None and distance < 1e-3, "the engine had the trainer's weights"
        assert row["version"] == row["step"] - 1 and len(row["turns"]) == 1
    assert {row["advantage"] > 0 for row in trained} == {True, False}
    held_out = [row for row in rows if row["set"] == "validation"]
    assert len({row["prompt"] for row in held_out}) == 2 and {row["step"] for row in held_out} >= {0, NUM_STEPS}
    assert "samples-data" in (run_dir / "report.html").read_text()


def check_steps(steps: dict[int, dict]) -> None:
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    for line in steps.values():
        for op in ("put", "get", "claim", "clear"):
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
        assert 0 < line["driver/bytes_per_row"] < 130


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


# ---------------------------------------------------------------- what is documented


def documented() -> re.Pattern[str]:
    """A pattern that matches the keys in the tables of docs/reference/metrics.md."""
    text = (runs.ROOT / "docs" / "reference" / "metrics.md").read_text()
    keys = []
    for line in text.splitlines():
        if line.startswith("| `"):
            keys += re.findall(r"`([^`]+)`", line.split("|")[1])
    return re.compile("|".join(re.sub(r"<\w+>", "[a-z0-9_]+", key) for key in keys))


def check_documented(run_dir: Path) -> None:
    logged = {key for line in runs.metrics(run_dir) if "event" not in line for key in line} - {"step"}
    unknown = sorted(key for key in logged if not documented().fullmatch(key))
    assert not unknown, "figures that docs/reference/metrics.md does not name"


# ---------------------------------------------------------------- rollouts ahead

PROMPTS = 8
"""A step, in `cli_runs.SMALL`."""


@pytest.mark.timeout(280)
def test_the_timeline_of_an_async_run_shows_training_under_the_next_rollouts(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    runs.finish(
        run_dir, "algorithm.mode=async", "algorithm.max_staleness=1", "algorithm.steps=8", "validation.every=4",
        "run.trace_step=3", "run.trace_num_steps=3", "run.checkpoint_every=4",
    )  # fmt: skip
    check_documented(run_dir)
    for line in runs.metrics(run_dir):
        shares = [value for key, value in line.items() if key.startswith("staleness/share_")]
        assert not shares or (len(shares) == 2 and sum(shares) == pytest.approx(1))
        assert line.get("queue/groups_ready", 0) <= line.get("queue/groups_in_flight", 0)
    assert "Rollouts beside the training" in (run_dir / "report.html").read_text()
    check_timeline(json.loads((run_dir / "trace.json").read_text())["traceEvents"])


def check_timeline(events: list[dict[str, Any]]) -> None:
    drawn = complete(events)
    assert crossing(events) == [] and all(event["dur"] >= 0 and event["ts"] >= 0 for event in drawn)
    processes, lanes = names(events, "process"), names(events, "thread")
    by_lane: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in drawn:
        lane = re.sub(r" \d+$", "", lanes[event["pid"], event["tid"]])
        by_lane.setdefault((processes[event["pid"], 0], lane), []).append(event)
    assert set(by_lane) >= {
        ("driver", "steps"), ("driver", "stages"), ("rollout 0", "generation"), ("rollout 0", "reward"),
        ("rollout 0", "put"), ("rollout 0", "sync"), ("train worker 0", "compute"), ("train worker 0", "get"),
        ("train worker 0", "sync"),
    }  # fmt: skip
    steps = {int(event["name"].split()[1]): event for event in by_lane["driver", "steps"]}
    assert sorted(steps) == [3, 4, 5]
    passes = [event for event in by_lane["train worker 0", "compute"] if event["name"] == "forward backward"]
    sent = [event for event in by_lane["train worker 0", "sync"] if event["name"] == "send weights"]
    assert len(sent) == 3, "that of the last step is reported in the next"
    ahead = 0
    for step, drawn_step in steps.items():
        [trained] = [event for event in passes if overlap(event, drawn_step) > 0]
        for generated in by_lane["rollout 0", "generation"]:
            found = re.fullmatch(r"generate (\d+)(-\d+)?", generated["name"])
            if found and int(found[1]) // PROMPTS + 1 == step + 1:
                # On busy cores it may even end before the training begins. In mode `sync` it begins after its end.
                ahead += generated["ts"] < trained["ts"] + trained["dur"]
    assert ahead > 0, "generation for the next step that began before the training ended"


def overlap(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Microseconds that two spans have in common."""
    return max(0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"]))
